"""One run from end to end: what it leaves, what it shows, where it stops, and what it says when it cannot go on."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import toys
from safetensors.torch import load_file
from torch import nn

import zoo
from inlay.errors import InlayError
from inlay.methods.attach import attach, restore
from inlay.methods.registry import all_methods, get
from inlay.records import Spec
from inlay.training import FitOptions, FitResult, Interrupted, evaluate, fit

SPEC = Spec(model="toy", method="lora", task="toy", epochs=3, batch_size=16, learning_rate=3e-2)


def train(folder: Path, spec: Spec = SPEC, **options: object) -> FitResult:
    return fit(toys.backbone(), toys.text_task(), get(spec.method), spec, folder, FitOptions(progress=False, **options))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FitResult]:
    folder = tmp_path_factory.mktemp("run")
    return folder, train(folder)


def test_it_learns_and_leaves_an_adapter_and_a_history(trained: tuple[Path, FitResult]) -> None:
    folder, outcome = trained
    assert outcome.metrics["test"]["accuracy"] > 0.6
    assert outcome.metrics.keys() == {"validation", "test"}
    assert (outcome.steps, outcome.resumed_from, outcome.stopped_early) == (18, None, False)
    assert [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] == outcome.history
    evaluations = [entry for entry in outcome.history if "validation" in entry]
    assert [entry["step"] for entry in evaluations] == [6, 12, 18]
    assert evaluations[-1]["validation"] == outcome.metrics["validation"]
    losses = [entry["loss"] for entry in outcome.history if "loss" in entry]
    assert len(losses) == 18
    assert losses[-1] < losses[0]
    assert (folder / "adapter" / "adapter_model.safetensors").exists()
    assert not any(module.training for module in outcome.model.modules())
    assert outcome.model.config.use_cache is toys.backbone().model.config.use_cache
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_portrait_is_measured_from_the_run(trained: tuple[Path, FitResult]) -> None:
    folder, outcome = trained
    portrait = outcome.portrait
    assert json.loads(json.dumps(portrait)) == portrait
    assert 0 < portrait["parameters"]["trained"] < portrait["parameters"]["total"]
    assert portrait["saved_bytes"] == sum(path.stat().st_size for path in (folder / "adapter").iterdir())
    assert portrait["peak_memory"]["bytes"] > 4 * portrait["parameters"]["total"]
    rate = portrait["train_examples_per_second"]
    assert rate["repetitions"] > 5
    epoch = portrait["seconds_per_epoch"]
    assert epoch["repetitions"] == rate["repetitions"]
    # Of the same blocks: a mean of 96 / rate is at least 96 / mean rate, by how much depends on the machine.
    assert epoch["mean"] >= 96 / rate["mean"] * (1 - 1e-9)
    assert portrait["inference_examples_per_second"]["repetitions"] == 4


def test_a_reloaded_adapter_evaluates_to_the_same_bits(trained: tuple[Path, FitResult]) -> None:
    folder, outcome = trained
    fresh = toys.backbone()
    model = restore(fresh.model, get("lora"), folder / "adapter", fingerprint=fresh.fingerprint)
    before = torch.random.get_rng_state()
    metrics, predictions = evaluate(model, toys.text_task(), "test", None, SPEC)
    assert metrics == outcome.metrics["test"]
    assert predictions.shape == (48, 3)
    assert torch.equal(torch.random.get_rng_state(), before)
    _, again = evaluate(outcome.model, toys.text_task(), "test", None, SPEC)
    assert np.array_equal(predictions, again)


def test_the_same_seed_gives_the_same_bits_and_another_does_not(
    trained: tuple[Path, FitResult], tmp_path: Path
) -> None:
    _, outcome = trained
    torch.manual_seed(123)  # whatever happened before
    assert train(tmp_path / "a").history == outcome.history
    assert train(tmp_path / "b", SPEC.with_(seed=1)).history != outcome.history


def test_how_often_it_is_evaluated_does_not_change_what_is_learnt(
    trained: tuple[Path, FitResult], tmp_path: Path
) -> None:
    _, outcome = trained
    often = train(tmp_path, SPEC.with_(evaluations=9))
    assert [entry["step"] for entry in often.history if "validation" in entry] == list(range(2, 19, 2))
    assert often.metrics == outcome.metrics


def reads_text(method: str) -> bool:
    try:
        attach(toys.backbone().model, method)
    except InlayError:
        return False
    return True


@pytest.mark.parametrize("method", all_methods())
def test_every_method_trains_resumes_and_reloads(tmp_path: Path, method: str) -> None:
    spec = SPEC.with_(
        method=method, max_steps=4, evaluations=2, learning_rate=None, schedule="cosine", weight_decay=0.1
    )
    family, task = ("bert", toys.text_task()) if reads_text(method) else ("vit", toys.image_task(train=96))
    if family == "vit" and get(method).takes("image_size"):  # a toy has no processor to tell it
        spec = spec.with_(settings={"image_size": zoo.IMAGE_SIZE})
    outcome = fit(toys.backbone(family), task, get(method), spec, tmp_path / "whole", FitOptions(progress=False))
    fresh = toys.backbone(family)
    model = restore(fresh.model, get(method), tmp_path / "whole" / "adapter", fingerprint=fresh.fingerprint)
    metrics, _ = evaluate(model, task, "test", fresh.processor, spec)
    assert metrics == outcome.metrics["test"]
    rates = [entry["learning_rate"] for entry in outcome.history if "learning_rate" in entry]
    assert max(rates) == pytest.approx(get(method).learning_rate_for("encoder"))
    with pytest.raises(Interrupted):
        fit(
            toys.backbone(family),
            signals(at=3, task=task),
            get(method),
            spec,
            tmp_path / "cut",
            FitOptions(progress=False),
        )
    resumed = fit(toys.backbone(family), task, get(method), spec, tmp_path / "cut", FitOptions(progress=False))
    assert resumed.resumed_from is not None
    assert resumed.history == outcome.history


def test_full_saves_the_config_as_it_was(tmp_path: Path) -> None:
    task = toys.lm_task()
    task.metrics = ("accuracy",)
    backbone = toys.backbone("gpt2", "causal-lm")
    backbone.newly_initialised = []
    spec = SPEC.with_(method="full", max_steps=1, learning_rate=1e-4)
    fit(backbone, task, get("full"), spec, tmp_path, FitOptions(progress=False))
    assert json.loads((tmp_path / "adapter" / "config.json").read_text()).get("use_cache", True) is True


def test_early_stopping_returns_to_the_best_state(tmp_path: Path) -> None:
    spec = SPEC.with_(epochs=8, early_stopping=2, learning_rate=0.1, settings={"lora_dropout": 0.3})
    outcome = train(tmp_path, spec)
    values = [entry["validation"]["accuracy"] for entry in outcome.history if "validation" in entry]
    assert outcome.stopped_early
    assert outcome.steps < 48
    assert outcome.best_step == 6 * (1 + values.index(max(values)))
    assert outcome.best_step == outcome.steps - 12, "stopped after two evaluations without a better one"
    metrics, _ = evaluate(outcome.model, toys.text_task(), "validation", None, spec)
    assert metrics == outcome.metrics["validation"]
    assert metrics["accuracy"] == max(values)


def test_early_stopping_by_a_metric_that_falls(tmp_path: Path) -> None:
    task = toys.text_task()
    task.metrics = ("mse",)
    for split in (task.train, task.validation, task.test):
        for row in split:
            row["labels"] = float(row["labels"])
    spec = SPEC.with_(early_stopping=1, epochs=6)
    outcome = fit(toys.backbone(num_labels=1), task, get("lora"), spec, tmp_path, FitOptions(progress=False))
    values = [entry["validation"]["mse"] for entry in outcome.history if "validation" in entry]
    assert outcome.metrics["validation"]["mse"] == min(values)


def test_early_stopping_needs_a_validation_split_and_training_does_not(tmp_path: Path) -> None:
    task = toys.text_task(validation=0)
    with pytest.raises(InlayError, match="needs a validation split"):
        fit(toys.backbone(), task, get("lora"), SPEC.with_(early_stopping=1), tmp_path, FitOptions(progress=False))
    outcome = fit(toys.backbone(), task, get("lora"), SPEC.with_(max_steps=2), tmp_path, FitOptions(progress=False))
    assert outcome.metrics.keys() == {"test"}


class Poison(nn.Module):
    """A head that, after a number of forward passes in training, gives what it is told to."""

    def __init__(self, head: nn.Module, value: float, after: int) -> None:
        super().__init__()
        self.head, self.value, self.after, self.passes = head, value, after, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        return self.head(x) * (self.value if self.passes > self.after else 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_state(tmp_path: Path, value: float) -> None:
    def poisoned(after: int) -> toys.ToyBackbone:
        backbone = toys.backbone()
        backbone.model.classifier = Poison(backbone.model.classifier, value, after)
        return backbone

    with pytest.raises(InlayError) as caught:
        fit(poisoned(4), toys.text_task(), get("linear-probe"), SPEC, tmp_path / "bad", FitOptions(progress=False))
    message = str(caught.value)
    assert "step 5 of 18" in message
    assert "learning rate of" in message
    assert "Try a lower learning rate, for example 0.01" in message
    assert "last-good" in message
    # The state kept is that after four updates: a run that ends there has the same.
    spec = SPEC.with_(max_steps=4, schedule="constant")
    with pytest.raises(InlayError, match="step 5"):
        fit(
            poisoned(4),
            toys.text_task(),
            get("linear-probe"),
            spec.with_(max_steps=9),
            tmp_path / "c",
            FitOptions(progress=False),
        )
    fit(poisoned(99), toys.text_task(), get("linear-probe"), spec, tmp_path / "good", FitOptions(progress=False))
    assert (tmp_path / "c/last-good/head.safetensors").read_bytes() == (
        tmp_path / "good/adapter/head.safetensors"
    ).read_bytes()


def test_the_last_good_state_has_the_statistics_of_before_the_step(tmp_path: Path) -> None:
    """Batch norms move in the forward pass, before anything is known about the loss."""

    def poisoned(after: int) -> toys.ToyBackbone:
        backbone = toys.backbone("resnet")
        stem = backbone.model.resnet.embedder.embedder.convolution
        backbone.model.resnet.embedder.embedder.convolution = Poison(stem, math.nan, after)
        return backbone

    spec = SPEC.with_(method="full", max_steps=3, schedule="constant", learning_rate=1e-3, gradient_accumulation=2)
    task = toys.image_task()
    with pytest.raises(InlayError, match=r"step 4 .* for example 0.0003"):
        fit(poisoned(6), task, get("full"), spec.with_(max_steps=9), tmp_path / "bad", FitOptions(progress=False))
    fit(poisoned(99), task, get("full"), spec, tmp_path / "good", FitOptions(progress=False))
    kept, expected = (load_file(tmp_path / place / "model.safetensors") for place in ("bad/last-good", "good/adapter"))
    assert sum("running_" in name for name in kept) > 2
    assert kept.keys() == expected.keys()
    assert all(torch.equal(kept[name], expected[name]) for name in kept)


def test_predictions_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    backbone = toys.backbone()
    with torch.no_grad():
        backbone.model.classifier.bias.fill_(math.nan)
    with pytest.raises(InlayError, match="not finite"):
        evaluate(backbone.model, toys.text_task(), "test", None, SPEC)


class Drifting(nn.Module):
    """A head with a parameter that every update moves by the learning rate, and no answer once it is below a limit."""

    class Push(torch.autograd.Function):
        @staticmethod
        def forward(context: object, x: torch.Tensor, drift: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: object, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return gradient, torch.ones(1)

    def __init__(self, head: nn.Module, limit: float) -> None:
        super().__init__()
        self.head, self.limit, self.drift = head, limit, nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.Push.apply(self.head(x), self.drift)
        return found if self.training or float(self.drift) > self.limit else found * math.nan


@pytest.mark.parametrize(("limit", "kept"), [(-0.085, True), (-0.075, False)])
def test_predictions_that_turn_bad_leave_the_last_good_checkpoint(tmp_path: Path, limit: float, kept: bool) -> None:
    backbone = toys.backbone()
    backbone.model.classifier = Drifting(backbone.model.classifier, limit)
    spec = SPEC.with_(learning_rate=1e-2, schedule="constant", warmup=0, max_steps=9, evaluations=3, clip=1e9)
    with pytest.raises(InlayError, match=r"not finite numbers.*after step 9 of 9") as caught:
        fit(
            backbone,
            toys.text_task(),
            get("linear-probe"),
            spec,
            tmp_path,
            FitOptions(progress=False, checkpoint_seconds=0),
        )
    assert ("after step 8, with which they were finite" in str(caught.value)) is kept
    assert (tmp_path / "last-good").exists() is kept
    if kept:
        drift = load_file(tmp_path / "last-good" / "head.safetensors")["classifier.drift"]
        assert float(drift) == pytest.approx(-0.08, rel=1e-3)


class Signals(toys.ToyTask):
    """Sends this process a signal while a batch is being made."""

    number, at, batches = signal.SIGINT, 4, 0

    def collator(self, processor: object, model: nn.Module) -> object:
        def collate(rows: object) -> object:
            self.batches += 1
            if self.batches == self.at:
                os.kill(os.getpid(), self.number)
            return toys.collate(rows)

        return collate


def signals(number: signal.Signals = signal.SIGINT, at: int = 4, task: toys.ToyTask | None = None) -> Signals:
    made = Signals(**vars(task or toys.text_task()))
    made.number, made.at = number, at
    return made


@pytest.mark.parametrize(("number", "at"), [(signal.SIGINT, 4), (signal.SIGTERM, 8), (signal.SIGINT, 29)])
def test_an_interruption_leaves_a_checkpoint_from_which_the_run_ends_the_same(
    trained: tuple[Path, FitResult], tmp_path: Path, number: signal.Signals, at: int
) -> None:
    """In the midst of an epoch, of an evaluation, and of the evaluation after the last update."""
    _, outcome = trained
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Interrupted):
        fit(
            toys.backbone(),
            signals(number, at),
            get("lora"),
            SPEC,
            tmp_path,
            FitOptions(progress=False, checkpoint_seconds=1000),
        )
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert "the same command resumes it" in (tmp_path / "log.txt").read_text()
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 1
    files = {path.suffix for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()}
    assert files <= {".json", ".safetensors"}
    resumed = train(tmp_path)
    assert resumed.resumed_from is not None
    assert resumed.history == outcome.history
    assert resumed.metrics == outcome.metrics


def test_training_outside_the_main_thread(trained: tuple[Path, FitResult], tmp_path: Path) -> None:
    found: list[FitResult] = []
    thread = threading.Thread(target=lambda: found.append(train(tmp_path)))
    thread.start()
    thread.join()
    assert found[0].metrics == trained[1].metrics


def test_a_checkpoint_of_other_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        fit(toys.backbone(), signals(), get("lora"), SPEC, tmp_path, FitOptions(progress=False))
    with pytest.raises(InlayError, match="does not hold what this model trains"):
        train(tmp_path, SPEC.with_(method="bias"))
    step = next((tmp_path / "checkpoints").glob("step-*"))
    weights = (step / "trained.safetensors").read_bytes()
    (step / "trained.safetensors").write_bytes(weights[:100])
    assert train(tmp_path).resumed_from is None, "a damaged one is passed over: see test_checkpoints.py"


def test_a_checkpoint_on_another_base_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        fit(toys.backbone(), signals(), get("lora"), SPEC, tmp_path, FitOptions(progress=False))
    other = toys.backbone()
    other.fingerprint = "e" * 64
    with pytest.raises(InlayError, match=r"other weights \(fingerprint ffffffffffff, now eeeeeeeeeeee\)"):
        fit(other, toys.text_task(), get("lora"), SPEC, tmp_path, FitOptions(progress=False))
    assert train(tmp_path).resumed_from is not None


def test_gradient_checkpointing_learns_the_same(tmp_path: Path) -> None:
    spec = SPEC.with_(epochs=1)
    plain, checkpointed = train(tmp_path / "a", spec), train(tmp_path / "b", spec.with_(gradient_checkpointing=True))
    for mine, its in zip(plain.history, checkpointed.history, strict=True):
        if "loss" in mine:
            assert its["loss"] == pytest.approx(mine["loss"], rel=1e-4)


def test_bfloat16_where_it_is_asked_for(tmp_path: Path) -> None:
    spec = SPEC.with_(epochs=1, precision="bfloat16")
    outcome = train(tmp_path, spec)
    assert outcome.portrait["precision"] == "bfloat16"
    assert "forward" not in outcome.model.__dict__, "accelerate's wrapper is taken off again"
    metrics, _ = evaluate(outcome.model, toys.text_task(), "test", None, spec)
    assert metrics == outcome.metrics["test"]
    with pytest.raises(InlayError, match="needs a CUDA device"):
        train(tmp_path, SPEC.with_(precision="float16"))


def test_tensorboard_where_it_is_asked_for(tmp_path: Path) -> None:
    train(tmp_path, SPEC.with_(max_steps=2), log_to=("tensorboard",))
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_lines_for_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(toys.backbone(), toys.text_task(), get("lora"), SPEC.with_(max_steps=4, evaluations=2), tmp_path)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [line.split("  ")[0] for line in shown.err.splitlines()] == ["toy lora: step 2/4", "toy lora: step 4/4"]
    assert "validation: accuracy 0." in shown.err


def test_a_disk_that_is_full_while_training(tmp_path: Path) -> None:
    spec = SPEC.with_(method="full", max_steps=4, learning_rate=1e-3)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(InlayError, match=f"No room to write {tmp_path / 'checkpoints' / 'step-00000001'}"):
            train(tmp_path, spec, checkpoint_seconds=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert train(tmp_path, spec).steps == 4
