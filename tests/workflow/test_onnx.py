"""Models with adapters as ONNX files: what onnxruntime gives beside what the run predicts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

import inlay
from inlay import InlayError, Spec, tune
from inlay.records.store import Run
from inlay.workflow import onnx
from inlay.workflow.export import export
from inlay.workflow.onnx import FACTS, FILE

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
Typed = Callable[..., tuple[int, str, str]]


def outputs(folder: Path, inputs: dict[str, Any]) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(folder / FILE), providers=["CPUExecutionProvider"])
    wanted = {each.name for each in session.get_inputs()}
    return session.run(None, {name: np.asarray(inputs[name]) for name in wanted})[0]


def softmax(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def facts(folder: Path) -> dict[str, Any]:
    return json.loads((folder / FACTS).read_text())


def test_texts_in_batches_of_any_size_and_length(
    review_spec: Spec, reviews: Path, typed: Typed, tmp_path: Path
) -> None:
    """A LoRA that is folded in, with a head that reads the mean, by the command."""
    run = tune(review_spec.with_(method="lora", pooling="mean"), tmp_path / "runs", progress=False)
    status, _, errors = typed("export", "--adapter", run.folder, "--to", "onnx", "--output", "made")
    assert status == 0, errors
    assert "checked by onnxruntime" in errors
    made, rows = tmp_path / "made", inlay.predict(run, reviews, probabilities=True)
    assert facts(made)["labels"] == ["1", "2", "3"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(made)
    for some in (rows[:1], rows[:7], [*rows[:2], {**rows[2], "body": rows[2]["body"] + " w9" * 5}]):
        texts = [row["body"] for row in some]
        wanted = [
            list(row["probabilities"].values())
            for row in inlay.predict(run, [*({"body": t} for t in texts)], probabilities=True)
        ]
        found = softmax(outputs(made, tokenizer(texts, padding=True, return_tensors="np")))
        assert found == pytest.approx(np.array(wanted), abs=1e-5)
    assert str(tmp_path).encode() not in b"".join(each.read_bytes() for each in made.iterdir() if each.is_file())


@pytest.mark.slow
def test_values_have_their_scale_beside_them(review_spec: Spec, tmp_path: Path) -> None:
    rows = [{"body": f"w{6 + i % 9} w{8 + i}", "price": 100.0 + 37.5 * (i % 9)} for i in range(60)]
    (tmp_path / "prices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = review_spec.with_(data=str(tmp_path / "prices.jsonl"), label="price", method="bias")
    run = tune(spec, tmp_path / "runs", progress=False)
    made = export(run.folder, None, tmp_path / "made", to="onnx")
    tokenizer, scale = transformers.AutoTokenizer.from_pretrained(made), facts(made)["value"]
    found = outputs(made, tokenizer([row["body"] for row in rows[:5]], padding=True, return_tensors="np"))[:, 0]
    wanted = [row["value"] for row in inlay.predict(run, rows[:5])]
    assert (found * scale["scale"] + scale["shift"]).tolist() == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("method", ["vpt-shallow", pytest.param("norm", marks=pytest.mark.slow)])
def test_images_with_tokens_that_no_weight_can_hold(
    method: str, image_model: Path, photos: Path, tmp_path: Path
) -> None:
    spec = Spec(model=str(image_model), data=str(photos), method=method, max_steps=3, batch_size=8, learning_rate=0.05)
    run = tune(spec, tmp_path / "runs", progress=False)
    said: list[str] = []
    made = export(run.folder, None, tmp_path / "made", to="onnx", say=said.append)
    assert any("stays beside the weights" in line for line in said) == (method == "vpt-shallow")
    answers = inlay.predict(run, photos, probabilities=True)[::9]
    processor = transformers.AutoImageProcessor.from_pretrained(made, use_fast=False)
    images = [Image.open(photos / row["image"]).convert("RGB") for row in answers]
    found = softmax(outputs(made, processor(images=images, return_tensors="np")))
    assert found == pytest.approx(np.array([list(row["probabilities"].values()) for row in answers]), abs=1e-3)


@pytest.fixture
def run(review_spec: Spec, tmp_path: Path) -> Run:
    return tune(review_spec.with_(method="linear-probe"), tmp_path / "runs", progress=False)


def test_a_file_that_computes_something_else_is_not_kept(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tracer is given a head with another bias: the check finds it, and nothing is written."""
    trace = onnx._trace

    def traced(whole: Any, *others: Any) -> None:
        bias = next(each for name, each in whole.named_parameters() if name.endswith("bias") and len(each) == 3)
        bias.data += 1e-2
        trace(whole, *others)
        bias.data -= 1e-2

    monkeypatch.setattr(onnx, "_trace", traced)
    with pytest.raises(InlayError, match="gives other outputs than the model"):
        export(run.folder, None, tmp_path / "made", to="onnx")
    assert not (tmp_path / "made").exists()


def test_what_cannot_be_written_is_one_error(
    run: Run, review_spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("data-dependent branch\nand much more")

    monkeypatch.setattr("torch.onnx.export", broken)
    with pytest.raises(
        InlayError, match=r"BertForSequenceClassification with linear-probe could not be traced .*data-dep"
    ):
        export(run.folder, None, tmp_path / "made", to="onnx")
    prompted = review_spec.with_(method="warp", template="{body} {soft_prompt} {mask}", max_steps=1)
    with pytest.raises(InlayError, match=r"places for prompts in the text|is not written as ONNX"):
        export(tune(prompted, tmp_path / "runs", progress=False).folder, None, tmp_path / "made", to="onnx")
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(InlayError, match=r"pip install 'inlay\[onnx\]'"):
        export(run.folder, None, tmp_path / "made", to="onnx")
    assert not (tmp_path / "made").exists()
