"""`inlay lab softmax-regression` and `inlay lab decomposable` as a person types them, at small sizes."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from inlay.papers.infoprompt import charts as charts_softmax
from inlay.papers.infoprompt import command as lab_softmax_regression
from inlay.papers.infoprompt.theory import lab as softmax
from inlay.papers.multi_lora import charts as charts_decomposable
from inlay.papers.multi_lora import command as lab_decomposable
from inlay.papers.multi_lora.theory import lab as decomposable

Lab = Callable[..., tuple[int, str, str]]
SMALL = {
    "softmax-regression": ("--seeds", "1", "--rows", "256,1024", "--size", "4"),
    "decomposable": ("--seeds", "1", "--tasks", "1,8", "--samples", "50"),
}
CASES = [("softmax-regression", name) for name in lab_softmax_regression.FIGURES]
CASES += [("decomposable", name) for name in lab_decomposable.FIGURES]


@pytest.fixture
def run(typed: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """The command in the test's folder: its exit status, output and errors."""
    monkeypatch.setattr(softmax, "LEMMA_ROWS", (16, 32))
    monkeypatch.setattr(softmax, "CONVERGENCE_SIZE", 4)
    return partial(typed, "lab")


def test_commands_and_pictures_know_the_same_experiments() -> None:
    assert tuple(softmax.EXPERIMENTS) == lab_softmax_regression.FIGURES == tuple(charts_softmax.DRAWN)
    assert tuple(decomposable.EXPERIMENTS) == lab_decomposable.FIGURES == tuple(charts_decomposable.DRAWN)


@pytest.mark.parametrize(("command", "figure"), CASES)
def test_every_experiment_draws_and_tells(run: Lab, tmp_path: Path, command: str, figure: str) -> None:
    status, out, err = run(command, "--figure", figure, "--out", "here", *SMALL[command])
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


@pytest.mark.parametrize(("command", "figure"), CASES)
def test_the_bar_is_as_long_as_the_work(run: Lab, command: str, figure: str) -> None:
    begun: list[str] = []
    if command == "decomposable":
        small = decomposable.DecomposableSetting((1, 2), 1, 20)
        decomposable.EXPERIMENTS[figure](small, begun.append)
        assert len(begun) == decomposable.beginnings(figure, small)
    else:
        setting = softmax.SoftmaxSetting((256, 512), 4, 1)
        softmax.EXPERIMENTS[figure](setting, begun.append)
        assert len(begun) == softmax.beginnings(figure, setting)


def test_verdicts_that_do_not_depend_on_size(run: Lab) -> None:
    """Each of these is the opposite where the computation is wrong."""

    def holds(found: object) -> list[str]:
        return [claim.holds for claim in found.claims]  # type: ignore[attr-defined]

    setting = softmax.SoftmaxSetting((256, 512), 4, 2)
    assert holds(softmax.lemmas(setting, lambda what: None)) == ["yes", "no", "yes", "yes", "yes", "no", "yes"]
    theorem = softmax.theorem_d1(setting, lambda what: None)
    wanted = ["yes", "yes", "yes", "yes", "no", "yes", "no", "yes", "no", "no", "yes"]
    assert holds(theorem) == wanted, [(claim.claim, claim.measured) for claim in theorem.claims]
    few = decomposable.DecomposableSetting((2, 32), 2, 200)
    assert holds(decomposable.lemmas(few, lambda what: None)) == [
        *("yes", "yes", "yes", "no", "yes", "no", "yes", "no", "yes", "yes")
    ]
    assert holds(decomposable.counterexample_a1(few, lambda what: None)) == ["yes", "yes", "no", "yes"]
    assert holds(decomposable.table_3(few, lambda what: None))[:3] == ["no", "yes", "no"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("softmax-regression", "--figure", "lemma-c15"), "lemmas-c15-c16"),
        (("softmax-regression", "--rows", "many"), "from 2 on"),
        (("softmax-regression", "--rows", "1024,2048", "--size", "512"), "4 d = 2048"),
        (("softmax-regression", "--epsilon", "0.5"), "below 0.1"),
        (("decomposable", "--figure", "table-4"), "table-3"),
        (("decomposable", "--tasks", "0,1"), "from 1 on"),
        (("decomposable", "--tasks", "4"), "two numbers"),
    ],
)
def test_bad_options_are_told(run: Lab, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    status, _, err = run(*arguments)
    assert status == 2
    assert words in " ".join(err.split())
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())
