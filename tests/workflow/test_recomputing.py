"""Gradient checkpointing: on by itself for large language models on a GPU, as the user says otherwise, the same run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from test_chat_runs import chats, checkpoint

import inlay
from inlay import InlayError, Spec
from inlay.records.command import arguments, asked, command
from inlay.records.store import Run
from inlay.tasks import kinds
from inlay.workflow import run_file
from inlay.workflow import tune as tuning
from inlay.workflow.settle import settle
from inlay.workflow.writing import why_recomputed
from quantised_zoo import missing

Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recomputing")
    checkpoint(folder / "model")
    chats(folder / "chats.jsonl")
    return folder


@pytest.fixture
def spec(folder: Path) -> Spec:
    how = {"max_steps": 4, "batch_size": 8, "learning_rate": 0.01, "max_length": 128}
    return Spec(model=str(folder / "model"), data=str(folder / "chats.jsonl"), method="lora", **how)


@pytest.mark.parametrize(
    ("kind", "parameters", "device", "on"),
    [
        ("causal-lm", 8_030_000_000, "cuda", True),
        ("causal-lm", 1_000_000_000, "cuda", True),
        ("data-to-text", 1_000_000_000, "cuda", True),
        ("sequence-to-sequence", 3_000_000_000, "cuda", True),
        ("causal-lm", 999_999_999, "cuda", False),
        ("causal-lm", 0, "cuda", False),  # not known
        ("causal-lm", 8_030_000_000, "cpu", False),
        ("causal-lm", 8_030_000_000, "mps", False),
        ("classification", 8_030_000_000, "cuda", False),
        ("image-classification", 2_000_000_000, "cuda", False),
    ],
)
def test_the_rule(kind: str, parameters: int, device: str, on: bool) -> None:
    why = why_recomputed(kind, parameters, device)
    assert (why is not None) is on
    if why:
        assert f"this one has {parameters / 1e9:.1f}B" in why
        assert "--no-gradient-checkpointing" in why
    assert kind in kinds.KINDS


def losses(run: Run) -> list[float]:
    found = [each[name] for each in run.history() for name in ("loss", "eval_loss") if name in each]
    return [*found, run.metrics["test"]["loss"], run.metrics["test"]["perplexity"]]


@pytest.mark.parametrize(
    ("method", "quantize"),
    [("lora", None), ("ntk-attention", None), ("full", None), ("lora", "4bit"), ("ntk-attention", "4bit")],
)
def test_yes_and_no_are_honoured_and_learn_the_same(
    spec: Spec, tmp_path: Path, method: str, quantize: str | None
) -> None:
    if quantize and (why := missing(quantize)):
        pytest.skip(why)
    spec = spec.with_(method=method, quantize=quantize)
    runs = {
        on: inlay.tune(spec.with_(gradient_checkpointing=on), tmp_path / str(on), progress=False)
        for on in (True, False, None)
    }
    assert {on: run.portrait["gradient_checkpointing"] for on, run in runs.items()} == {
        True: True,
        False: False,
        None: False,
    }
    assert losses(runs[False]) == losses(runs[None])
    assert losses(runs[True]) == pytest.approx(losses(runs[False]), rel=1e-5)
    assert len(losses(runs[True])) > 4


def test_the_rule_is_followed_where_nobody_says(spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: this model is as large, so to say."""
    monkeypatch.setattr(tuning, "why_recomputed", lambda kind, parameters, device: f"{kind} {parameters} {device}")
    lines: list[str] = []
    run = inlay.tune(spec, tmp_path / "a", progress=False, say=lines.append)
    assert run.portrait["gradient_checkpointing"] is True
    parameters = inlay.load_backbone(spec.model, kind="causal-lm").model.num_parameters()
    assert [line for line in lines if line.startswith("causal-lm")] == [f"causal-lm {parameters} cpu"]
    run = inlay.tune(spec.with_(gradient_checkpointing=False), tmp_path / "b", progress=False, say=lines.append)
    assert run.portrait["gradient_checkpointing"] is False
    # Where it cannot be, it is left out without a word; who asks for it is told.
    prefix = spec.with_(method="prefix", max_steps=1)
    assert inlay.tune(prefix, tmp_path / "c", progress=False).portrait["gradient_checkpointing"] is False
    with pytest.raises(InlayError, match="prefix tuning"):
        inlay.tune(prefix.with_(gradient_checkpointing=True), tmp_path / "d", progress=False)


def test_no_and_nothing_are_one_run(spec: Spec, tmp_path: Path) -> None:
    digests = {on: settle(spec.with_(gradient_checkpointing=on)).digest for on in (True, False, None)}
    assert digests[False] == digests[None] != digests[True]
    run = inlay.tune(spec.with_(max_steps=1), tmp_path, progress=False)
    assert inlay.tune(spec.with_(max_steps=1, gradient_checkpointing=False), tmp_path, progress=False).id == run.id


def test_a_run_from_before_keeps_its_identity() -> None:
    spec = Spec("m", "lora", task="sst2")
    before = "1dda13f91ac700067734ddd9a289f701990a5b1441f186b83afe9432bdf98ff2"
    assert spec.digest() == spec.with_(gradient_checkpointing=False).digest() == before
    assert Spec.from_json({**spec.to_json(), "gradient_checkpointing": False}).digest() == before


def test_the_command_of_a_run_from_before_does_not_say_no(spec: Spec, tmp_path: Path) -> None:
    run = inlay.tune(spec.with_(max_steps=1, gradient_checkpointing=False), tmp_path, progress=False)
    assert "--no-gradient-checkpointing" in command(asked(run))
    before = {key: value for key, value in run.portrait.items() if key != "gradient_checkpointing"}
    run.record["portrait"] = before  # as an earlier inlay wrote it
    assert "checkpointing" not in command(asked(run))
    assert asked(run).digest() == run.spec.digest()


def test_the_words_for_it(typed: Typed, spec: Spec, tmp_path: Path) -> None:
    for on, word in ((True, "--gradient-checkpointing"), (False, "--no-gradient-checkpointing")):
        mine = spec.with_(gradient_checkpointing=on)
        words = arguments(mine)
        assert word in words
        status, out, said = typed(*words[1:], "--print-config")
        assert status == 0, said
        assert yaml.safe_load(out)["gradient_checkpointing"] is on
        (tmp_path / "run.yaml").write_text(run_file.write(mine))
        assert run_file.read(tmp_path / "run.yaml").spec == mine
        other = {"gradient_checkpointing": not on}
        assert run_file.read(tmp_path / "run.yaml", other).spec == mine.with_(**other)
    status, out, _ = typed(*arguments(spec)[1:], "--print-config")
    assert (status, "gradient_checkpointing" in out) == (0, False)
