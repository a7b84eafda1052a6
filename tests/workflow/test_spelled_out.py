"""A default that is spelled out is the same run, and a run that an earlier inlay made of the same words is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inlay import Spec
from inlay.records.store import Store
from inlay.workflow import settle as settling
from inlay.workflow.settle import digest_of, settle
from inlay.workflow.tune import tune


@pytest.fixture
def plain(text_model: Path, reviews: Path) -> Spec:
    """Two columns of texts: the text must be named, the label (of few values, called `stars`) need not."""
    Path(str(reviews)).write_text(Path(str(reviews)).read_text().replace("stars", "label"))
    return Spec(str(text_model), "lora", data=str(reviews), max_steps=2, batch_size=8)


SAME: dict[str, dict[str, Any]] = {
    "label": {"label": "label"},
    "text": {"text": ("body",)},
    "kind": {"kind": "classification"},
    "all": {"text": ("body",), "label": "label", "kind": "classification"},
    "set": {"settings": {"r": 8}},
    "set two": {"settings": {"lora_alpha": 16, "r": 8}},
}
OTHER: dict[str, dict[str, Any]] = {
    "label": {"label": "id", "text": ("body",), "kind": "regression"},
    "kind": {"kind": "regression"},
    "set": {"settings": {"r": 4}},
    "not known before the model is": {"settings": {"target_modules": ["query", "value"]}},
    "another type": {"settings": {"use_rslora": True}},
}


@pytest.mark.parametrize("changes", SAME.values(), ids=SAME)
def test_what_is_the_default_anyway_is_the_same_run(plain: Spec, changes: dict[str, Any]) -> None:
    assert settle(plain.with_(**changes)).digest == settle(plain).digest
    assert settle(plain).digest == digest_of(settle(plain).spec, settle(plain).data)  # as it always was


@pytest.mark.parametrize("changes", OTHER.values(), ids=OTHER)
def test_what_is_not_is_another(plain: Spec, changes: dict[str, Any]) -> None:
    assert settle(plain.with_(**changes)).digest != settle(plain).digest


def test_layers(image_model: Path, photos: Path, text_model: Path) -> None:
    spec = Spec(str(image_model), "activation-prompt", data=str(photos))
    own = settle(spec).digest
    assert settle(spec.with_(settings={"layers": [3]})).digest == own
    assert settle(spec.with_(settings={"layers": [2]})).digest != own
    # All layers by themselves, one or the other by choice.
    norm = spec.with_(method="norm")
    assert settle(norm.with_(settings={"layers": [3]})).digest != settle(norm).digest


def test_the_run_is_found_and_its_spec_says_what_was_typed_first(plain: Spec, tmp_path: Path) -> None:
    first = tune(plain.with_(**SAME["all"], settings={"r": 8}), tmp_path / "runs", progress=False)
    said: list[str] = []
    assert tune(plain, tmp_path / "runs", progress=False, say=said.append).id == first.id
    assert said == [f"already done: {first.id}"]
    assert Store(tmp_path / "runs").get(first.id).spec.label == "label"


def test_a_run_of_the_same_words_from_before_is_found(
    plain: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spelled = plain.with_(**SAME["all"])
    with monkeypatch.context() as patch:
        patch.setattr(settling, "without_defaults", lambda spec, tasks: spec)
        earlier = tune(spelled, tmp_path / "runs", progress=False)
    assert earlier.digest != settle(spelled).digest
    assert tune(spelled, tmp_path / "runs", progress=False).id == earlier.id
    new = tune(plain, tmp_path / "runs", progress=False)
    assert new.id != earlier.id
    assert tune(spelled, tmp_path / "runs", progress=False).id == new.id  # one run from now on
