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
from inlay.records.store import Store
from inlay.serve.hosting import host
from inlay.workflow.answer import Tasks, answer
from inlay.workflow.export import export

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
    from inlay.records.sealed import checksum

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
        for name in ("spec.json", "record.json"):  # each says what was run
            edit(
                run.folder / name,
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


# ---- what the outputs mean

CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "labels": lambda facts: facts["tasks"]["cola"]["label_names"].reverse(),
    "mean": lambda facts: facts["tasks"]["stsb"].update(mean=100.0),
    "name": lambda facts: facts["tasks"].update(cola=facts["tasks"]["sst"]),
    "no checksum": lambda facts: facts.pop("checksum"),
}


def tampered(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("what", CHANGES)
def test_an_edited_tasks_file_is_an_error(folder: Path, requests: Path, what: str) -> None:
    served = host(folder, batch=4)
    tampered(folder / "tasks.json", CHANGES[what])
    for call in (
        lambda: answer(folder, requests),
        lambda: host(folder, batch=4),
        lambda: served.check(folder, "cola"),
        lambda: served.add(folder, "cola2"),
    ):
        with pytest.raises(InlayError, match=r"tasks\.json .*checksum"):
            call()
    assert set(served.schemas) == set(TEXTS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda facts: facts.update(tasks=["cola"]), "tasks="),
        (lambda facts: facts.update(tasks={}), "no tasks"),
        (lambda facts: facts.update(batch_size="4"), "batch_size="),
        (lambda facts: facts.pop("revision"), "lacks 'revision'"),
    ],
)
def test_a_tasks_file_of_the_wrong_shape(
    folder: Path, requests: Path, change: Callable[[dict[str, Any]], Any], says: str
) -> None:
    edit(folder / "tasks.json", change)
    with pytest.raises(InlayError, match=says):
        answer(folder, requests)


def test_a_run_answers_for_its_files(made: Path, requests: Path, tmp_path: Path) -> None:
    """With its record, a folder from before there was a checksum is whole; and an edited one is not, however edited."""
    spec = Spec(model="m", method="multi-lora", tasks=("cola", "cb"))
    with Store(tmp_path / "runs").open(spec, "d" * 64) as run:
        shutil.copytree(made, run.adapter)
        tampered(run.adapter / "tasks.json", lambda facts: facts.pop("checksum"))
        run.finish({"metrics": {}})
    for place in (run.folder, run.adapter):
        assert answer(place, requests) == answer(made, requests)
    edit(run.adapter / "tasks.json", CHANGES["labels"])
    for place in (run.folder, run.adapter):
        for call in (
            lambda place=place: answer(place, requests),
            lambda place=place: host(place, batch=4),
            lambda place=place: export(place, "cola", tmp_path / "lora"),
        ):
            with pytest.raises(InlayError, match=r"is damaged: adapter/tasks\.json"):
                call()
