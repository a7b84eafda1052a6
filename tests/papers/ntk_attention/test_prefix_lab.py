"""`inlay lab prefix` as a person types it, with few and small trainings."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from inlay.papers.findings import number
from inlay.papers.ntk_attention.charts import theory as charts_prefix
from inlay.papers.ntk_attention.command import FIGURES
from inlay.papers.ntk_attention.theory import lab
from inlay.papers.ntk_attention.theory.lab import attention, kernels
from inlay.papers.ntk_attention.theory.network import PrefixProblem, draw
from inlay.papers.ntk_attention.theory.setting import EXAMPLES, SIZE, both_kernels, kept_steps

Lab = Callable[..., tuple[int, str, str]]
SMALL = ("--widths", "16,256", "--seeds", "1", "--steps", "30")


@pytest.fixture
def run(typed: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """The command in the test's folder: its exit status, output and errors."""
    monkeypatch.setattr(attention, "PREFIXES", (4, 256, 512))
    monkeypatch.setattr(lab, "PREFIXES", (4, 256, 512))
    monkeypatch.setattr(kernels, "START_DRAWS", 4)
    return partial(typed, "lab", "prefix")


def test_the_command_and_the_pictures_know_the_same_experiments() -> None:
    assert tuple(lab.EXPERIMENTS) == FIGURES == tuple(charts_prefix.DRAWN)


@pytest.mark.parametrize("figure", FIGURES)
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


@pytest.mark.parametrize("figure", FIGURES)
def test_the_bar_is_as_long_as_the_work(run: Lab, figure: str) -> None:
    begun: list[str] = []
    setting = lab.PrefixSetting((16, 64), seeds=1, steps=20)
    lab.EXPERIMENTS[figure](setting, begun.append)
    assert len(begun) == lab.beginnings(figure, setting)


def test_verdicts_that_do_not_depend_on_long_runs(run: Lab) -> None:
    """Each of these is the opposite where the computation is wrong."""
    setting = lab.PrefixSetting((64, 256), seeds=2, steps=30)

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


def test_the_law_of_b3_and_the_late_rate_by_hand() -> None:
    setting = lab.PrefixSetting((16, 256), seeds=1, steps=40)
    found = lab.EXPERIMENTS["proposition-b3"](setting, lambda what: None)
    rows = {(row[0], row[2]): row for row in found.rows}
    for width in setting.widths:
        printed, true = both_kernels(draw(width, EXAMPLES, SIZE, 0))
        rate = float(torch.linalg.eigvalsh(printed)[0] / torch.linalg.eigvalsh(true)[-1])  # m eta lambda, at c = 1
        for steps in (0, 20, 40):
            assert number(rows[width, steps][5]) == pytest.approx(12 * math.exp(-rate * steps))
    fall = math.log(number(rows[256, 20][4]) / number(rows[256, 40][4])) / 20
    (late,) = [claim for claim in found.claims if "exponentially" in claim.claim]
    assert late.measured.startswith(f"late rate {fall / rate:.2f} times")


def test_a_kernel_with_a_negative_eigenvalue_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def indefinite(problem: PrefixProblem) -> tuple[Tensor, Tensor]:
        printed, true = both_kernels(problem)
        return printed - 2 * torch.linalg.eigvalsh(printed)[0] * torch.eye(len(printed)), true

    monkeypatch.setattr(kernels, "both_kernels", indefinite)
    found = lab.EXPERIMENTS["kernel"](lab.PrefixSetting((16, 64), seeds=1, steps=20), lambda what: None)
    (claim,) = [claim for claim in found.claims if claim.claim.startswith("lambda_min")]
    assert claim.holds == "no"
    assert claim.measured.startswith("-")


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
        (("--c", "nan"), "above 0"),
    ],
)
def test_bad_options_are_told(run: Lab, tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    status, _, err = run(*options)
    assert status == 2
    assert words in " ".join(err.split())
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())
