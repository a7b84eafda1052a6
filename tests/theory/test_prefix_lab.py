"""`inlay lab prefix` as a person types it, with few and small trainings."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from inlay.cli.lab import PREFIX_FIGURES
from inlay.report import charts_prefix
from inlay.theory.prefix import lab, lab_attention, lab_kernel
from inlay.theory.prefix.setting import kept_steps

Lab = Callable[..., tuple[int, str, str]]
SMALL = ("--widths", "16,256", "--seeds", "1", "--steps", "30")


@pytest.fixture
def run(typed: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """The command in the test's folder: its exit status, output and errors."""
    monkeypatch.setattr(lab_attention, "PREFIXES", (4, 256, 512))
    monkeypatch.setattr(lab, "PREFIXES", (4, 256, 512))
    monkeypatch.setattr(lab_kernel, "START_DRAWS", 4)
    return partial(typed, "lab", "prefix")


def test_the_command_and_the_pictures_know_the_same_experiments() -> None:
    assert tuple(lab.EXPERIMENTS) == PREFIX_FIGURES == tuple(charts_prefix.DRAWN)


@pytest.mark.parametrize("figure", PREFIX_FIGURES)
def test_every_experiment_draws_and_tells(run: Lab, tmp_path: Path, figure: str) -> None:
    status, out, err = run("--figure", figure, "--out", "here", *SMALL)
    assert status == 0, err
    folder = tmp_path / "here" / figure
    assert {path.name for path in folder.iterdir()} == {f"{figure}.{end}" for end in ("png", "svg", "csv", "json")}
    with (folder / f"{figure}.csv").open() as file:
        assert len(list(csv.DictReader(file))) >= 2
    facts = json.loads((folder / f"{figure}.json").read_text())
    header, *lines = [line.split("\t") for line in out.splitlines()]
    assert header == ["claim", "measured", "holds?"]
    assert lines == [[claim["claim"], claim["measured"], claim["holds"]] for claim in facts["claims"]]
    assert all("nan" not in claim["measured"] for claim in facts["claims"])


@pytest.mark.parametrize("figure", PREFIX_FIGURES)
def test_the_bar_is_as_long_as_the_work(run: Lab, figure: str) -> None:
    begun: list[str] = []
    setting = lab.Setting((16, 64), seeds=1, steps=20)
    lab.EXPERIMENTS[figure](setting, begun.append)
    assert len(begun) == lab.beginnings(figure, setting)


def test_verdicts_that_do_not_depend_on_long_runs(run: Lab) -> None:
    """Each of these is the opposite where the computation is wrong."""
    setting = lab.Setting((64, 256), seeds=2, steps=30)

    def holds(figure: str) -> dict[str, str]:
        found = lab.EXPERIMENTS[figure](setting, lambda what: None)
        return {claim.claim: claim.holds for claim in found.claims}

    kernels = holds("kernel")
    assert kernels["H is the kernel of the network (Definition K.1)"] == "no"
    assert kernels["C_11 <= -1.6 m eta r H r (L.2)"] == "yes"
    assert kernels["lambda_min(H*) > 0 (assumed)"] == "yes"
    assert next(iter(holds("lemma-m6").values())) == "no"
    drifts = holds("lemma-b1")
    assert drifts["the change is of order R, up to R = 0.1"] == "yes"
    assert drifts["gradient descent stays within R < 0.01 (M.1, K.3)"] == "no"


def test_steps_that_are_kept() -> None:
    assert kept_steps(10)[:4] == [0, 1, 2, 3]
    assert kept_steps(3000)[-1] == 3000
    assert len(kept_steps(3000)) < 80


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--figure", "lemma-b2"), "lemma-b1"),
        (("--widths", "many"), "from 2 on"),
        (("--widths", "2,3"), "from 4 on"),
        (("--widths", "64"), "two lengths"),
        (("--c", "0"), "above 0"),
    ],
)
def test_bad_options_are_told(run: Lab, tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    status, _, err = run(*options)
    assert status == 2
    assert words in " ".join(err.split())
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())
