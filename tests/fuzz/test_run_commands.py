"""Damaged runs of a tiny model: predicting, comparing, exporting and going on end well; what goes on, to the same bits.

Seeds and counts are stated in docs/security.md.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from mutations import cases, damage_file
from test_run_folders import damage_run, ends_well

import zoo
from checkpoints import write_tokenizer
from inlay import Spec, tune
from inlay.engines.job import work
from inlay.records import steps
from inlay.records.command import arguments
from inlay.workflow.compare import job_of

SEED = 20
Typed = Callable[..., tuple[int, str, str]]


@dataclass
class Made:
    """A finished run and an unfinished one in `out`, the command of the second, and what that would come to."""

    out: Path
    finished: str
    unfinished: str
    spec: Spec
    adapter: dict[str, bytes]
    data: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    zoo.tiny("bert", "base")[0].save_pretrained(folder / "model")
    write_tokenizer(folder / "model")
    rng = random.Random(0)
    rows = [f"{' '.join([f'w{1 + i % 3}'] * 3 + [f'w{rng.randrange(6, 20)}'])},{1 + i % 3}" for i in range(60)]
    (folder / "reviews.csv").write_text("\n".join(["body,stars", *rows]) + "\n")
    spec = Spec(
        model=str(folder / "model"),
        data=str(folder / "reviews.csv"),
        text=("body",),
        label="stars",
        method="multi-lora",
        max_steps=5,
        batch_size=8,
        learning_rate=0.01,
        early_stopping=5,
        evaluations=5,
    )
    done = tune(spec, folder / "runs", progress=False)
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 9

    whole = tune(spec.with_(seed=1), folder / "whole", progress=False)
    import inlay.training.fitting as fitting

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting.InlayTrainer, "checkpoint_is_due", lambda self, last=False: True)
        job = job_of(whole.spec, str(folder / "runs"))
        cut = work(job, lambda *_: None, lambda line: None, stop, signals_stop=True)
    assert cut.status == "interrupted"
    assert len(steps.oldest_first(folder / "runs" / str(cut.run) / "checkpoints")) == 2
    adapter = {path.name: path.read_bytes() for path in whole.adapter.iterdir()}
    return Made(folder / "runs", done.id, str(cut.run), whole.spec, adapter, folder / "reviews.csv")


@pytest.mark.parametrize("count", [10, pytest.param(300, marks=pytest.mark.slow)])
def test_commands_on_a_damaged_finished_run(made: Made, typed: Typed, tmp_path: Path, count: int) -> None:
    out = tmp_path / "runs"
    compare = ["compare", *arguments(made.spec.with_(seed=0))[2:], "--out", str(out)]
    at = compare.index("--method")
    compare[at : at + 2] = ["--methods", made.spec.method]
    at = compare.index("--seed")
    compare[at : at + 2] = ["--seeds", "1"]
    for number, rng in cases(SEED, count):
        shutil.copytree(made.out, out, symlinks=True)
        shutil.rmtree(out / made.unfinished)
        what = f"case {number}: {damage_run(out / made.finished, rng) if number else 'none'}"
        run = out / made.finished
        ended = [
            ends_well(typed, what, "predict", "--run", run, "--input", made.data, "--output", "p.jsonl"),
            ends_well(typed, what, "export", "--adapter", run, "--task", "default", "--output", "exported"),
        ]
        shutil.rmtree("exported", ignore_errors=True)
        if number % 3 == 0:
            ended.append(ends_well(typed, what, *compare))
        assert number or [status for status, *_ in ended] == [0, 0, 0], ended  # the first is left alone
        shutil.rmtree(out)


@pytest.mark.parametrize("count", [4, pytest.param(250, marks=pytest.mark.slow)])
def test_going_on_after_damage(made: Made, typed: Typed, tmp_path: Path, count: int) -> None:
    """Whatever was damaged: one clear error, or the very weights of a run that was left alone."""
    out, went_on = tmp_path / "runs", 0
    for number, rng in cases(SEED + 1, count):
        shutil.copytree(made.out, out, symlinks=True)
        run = out / made.unfinished
        checkpoints = sorted(path for path in (run / "checkpoints").rglob("*") if path.is_file())
        if rng.random() < 0.7:
            what = f"case {number}: {damage_file(rng.choice(checkpoints), rng)}"
        else:
            what = f"case {number}: {damage_run(run, rng)}"
        status, _, error = ends_well(typed, what, *arguments(made.spec)[1:], "--out", out)
        if status == 0:
            went_on += 1
            (done,) = (path.parent for path in out.glob("*/record.json") if path.parent.name != made.finished)
            adapter = {path.name: path.read_bytes() for path in (done / "adapter").iterdir()}
            assert adapter == made.adapter, (what, error)
        shutil.rmtree(out)
    assert went_on > count // 3


@pytest.mark.parametrize("count", [300, pytest.param(4000, marks=pytest.mark.slow)])
def test_no_damage_to_a_checkpoint_goes_unseen(made: Made, tmp_path: Path, count: int) -> None:
    source = steps.oldest_first(made.out / made.unfinished / "checkpoints")[-1]
    for number, rng in cases(SEED + 2, count):
        folder = tmp_path / "checkpoints"
        shutil.copytree(source.parent, folder)
        checkpoint = folder / source.name
        path = rng.choice([*sorted(checkpoint.iterdir()), folder / next(iter(steps.bests(checkpoint)))])
        before = path.read_bytes()
        what = damage_file(path, rng)
        changed = not path.is_file() or path.read_bytes() != before
        seal_is_gone = path.name == steps.SEAL and not path.exists()
        if changed and not seal_is_gone:
            assert steps.damage(checkpoint) is not None, f"case {number}: {what}"
        shutil.rmtree(folder)
