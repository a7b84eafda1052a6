"""Folders of adapters that stand for prompts: what is read of them, and what is refused before they are obeyed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from inlay.backbones.locate import remember_folder
from inlay.errors import InlayError
from inlay.methods.folder import CONFIG, NOTE, WEIGHTS
from inlay.workflow.generation import Sampling
from inlay.workflow.prompt_folders import find_base, look, mixing_method, open_writer, put_in
from prompted import KEYS, adapter, decoder

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return decoder(tmp_path / "model")


def test_what_a_folder_says(model: Path, tmp_path: Path) -> None:
    folder = adapter(model, tmp_path / "a", 5, stands_for=1234)
    found = look(folder)
    told = found.describe()
    assert (told["method"], told["size"], told["stands_for_tokens"]) == (KEYS, 5, 1234)
    assert told["bytes"] == (folder / WEIGHTS["peft"]).stat().st_size
    assert len(told["sha256"]) == 64
    assert mixing_method().name == KEYS
    (folder / "compress.json").write_text("{")
    assert look(folder).prompt_tokens is None, "nothing depends on the report"


def test_the_base_model_is_found(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INLAY_CACHE", str(tmp_path / "cache"))  # nobody remembers where this model lies
    found = look(adapter(model, tmp_path / "a"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(InlayError, match=r"a model folder called 'model', and there is none at './model'.*--model"):
        find_base(found)
    monkeypatch.chdir(tmp_path)
    assert find_base(found) == "./model"
    remember_folder(str(found.fingerprint), model)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert find_base(found) == str(model)


def test_what_is_no_adapter(model: Path, text_model: Path, tmp_path: Path) -> None:
    folder = adapter(model, tmp_path / "long_prompt")
    with pytest.raises(InlayError, match=r"is no folder\. Did you mean"):
        look(tmp_path / "long_promt")
    with pytest.raises(InlayError, match=r"has no adapter_config\.json"):
        look(model)
    settings = json.loads((folder / CONFIG["peft"]).read_text())
    for changed, says in (
        ({"peft_type": "XLORA"}, "which is not loaded"),
        ({"peft_type": "NOTHING"}, "no method known here"),
        ({"task_type": "SEQ_CLS"}, "writes no texts"),
    ):
        place = tmp_path / str(changed)
        shutil.copytree(folder, place)
        (place / CONFIG["peft"]).write_text(json.dumps(settings | changed))
        if "task_type" in changed:
            with pytest.raises(InlayError, match="is not the file that was saved"):
                look(place)
        (place / NOTE["peft"]).unlink()
        with pytest.raises(InlayError, match=says):
            look(place)


def test_what_does_not_fit_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    good = adapter(model, tmp_path / "good")
    other = adapter(decoder(tmp_path / "other-model", seed=1), tmp_path / "other")
    cut = shutil.copytree(good, tmp_path / "cut")
    with (cut / WEIGHTS["peft"]).open("r+b") as file:
        file.truncate(300)
    writer = open_writer(str(model))
    put_in(look(good), writer, "good")

    def answer() -> list[int]:
        row = writer.begin("w3 w5", Sampling(6), prompt="good")
        writer.write([row])
        return row.written

    before = answer()
    for folder, says in ((other, "belongs to another base model"), (cut, "truncated or damaged")):
        with pytest.raises(InlayError, match=says):
            put_in(look(folder), writer, "bad")
    assert set(writer.model.peft_config) == {"good"}
    assert answer() == before
    put_in(look(good), writer, "bad")


def test_a_base_that_is_no_language_model(model: Path, text_model: Path) -> None:
    with pytest.raises(InlayError, match="reads in both directions"):
        open_writer(str(text_model))
