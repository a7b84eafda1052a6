"""Folders from somebody else: none allows code to run, and none that was edited is believed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hosts import TEXTS, write
from typer.testing import CliRunner

from inlay import InlayError, Spec, predict, tune
from inlay.cli.app import app
from inlay.serve.hosting import host
from inlay.workflow.answer import Tasks, answer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("made"), TEXTS)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """An adapter folder that a test may harm."""
    return Path(shutil.copytree(made, tmp_path / "adapter"))


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"task": "cola", "sentence": "w6 w7"}\n')
    return file


def with_code(model: Path, target: Path, known: bool) -> tuple[Path, Path]:
    """A copy of a model that brings code, and the file which that code writes when it runs."""
    shutil.copytree(model, target)
    ran = target.with_name("ran")
    (target / "own.py").write_text(
        f"open({str(ran)!r}, 'w').write('ran')\n"
        "from transformers import BertConfig, BertForSequenceClassification\n"
        f"class OwnConfig(BertConfig):\n    model_type = {'bert' if known else 'own'!r}\n"
        "class Own(BertForSequenceClassification):\n    config_class = OwnConfig\n"
    )
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForSequenceClassification": "own.Own"}
    edit(target / "config.json", lambda config: config.update(auto_map=auto_map))
    if not known:
        edit(target / "config.json", lambda config: config.update(model_type="own"))
    return target, ran


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file; where it has a checksum of its own, as somebody does who knows how it is made."""
    from inlay.records.store import checksum

    data = json.loads(path.read_text())
    change(data)
    if "checksum" in data:
        data["checksum"] = checksum(data)
    path.write_text(json.dumps(data))


# ---- code


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("says", [False, True])
def test_no_adapter_folder_lets_code_run(
    folder: Path, made: Path, requests: Path, tmp_path: Path, says: bool, known: bool
) -> None:
    model, ran = with_code(made.parent.parent / "bert-model", tmp_path / "theirs", known)
    edit(folder / "tasks.json", lambda facts: facts.update(model=str(model), trust_remote_code=says))
    arguments = ["--adapter", str(folder)]
    if says or not known:
        for command in (["predict", *arguments, str(requests)], ["serve", *arguments, "--port", "0"]):
            found = CliRunner().invoke(app, command)
            assert isinstance(found.exception, InlayError)
            assert "its own Python code" in str(found.exception)
            assert "--trust-remote-code" in str(found.exception)
        for call in (lambda: answer(folder, requests), lambda: host(folder, batch=4), lambda: Tasks(folder)):
            with pytest.raises(InlayError, match="--trust-remote-code"):
                call()
    else:
        assert answer(folder, requests)[0]["label"] in ("no", "yes")  # by the class that Transformers has
    assert not ran.exists()


def test_code_runs_where_it_was_allowed_here(folder: Path, made: Path, requests: Path, tmp_path: Path) -> None:
    model, ran = with_code(made.parent.parent / "bert-model", tmp_path / "theirs", known=False)
    expected = answer(folder, requests)
    edit(folder / "tasks.json", lambda facts: facts.update(model=str(model), trust_remote_code=True))
    found = CliRunner().invoke(app, ["predict", "--adapter", str(folder), "--trust-remote-code", str(requests)])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout) == expected[0]
    assert ran.exists()
    assert host(folder, batch=4, trust_remote_code=True).describe()["model"] == str(model)


def test_no_run_lets_code_run(review_spec: Spec, reviews: Path, tmp_path: Path) -> None:
    run = tune(review_spec.with_(max_steps=1), tmp_path / "runs", progress=False)
    model, ran = with_code(Path(review_spec.model), tmp_path / "theirs", known=False)
    for says in (True, False):
        edit(
            run.folder / "spec.json",
            lambda whole, says=says: whole["spec"].update(model=str(model), trust_remote_code=says),
        )
        arguments = ["predict", "--run", str(run.folder), "--input", str(reviews)]
        found = CliRunner().invoke(app, arguments)
        assert isinstance(found.exception, InlayError)
        assert "--trust-remote-code" in str(found.exception)
        with pytest.raises(InlayError, match="--trust-remote-code"):
            host(run.folder, batch=4)
        assert not ran.exists()
    assert len(predict(str(run.folder), reviews, trust_remote_code=True)) == 60
    assert ran.exists()
