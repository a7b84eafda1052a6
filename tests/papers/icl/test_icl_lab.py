"""`inlay lab icl` as a person types it, at sizes that take seconds, with the claims that do not need large ones."""

from __future__ import annotations

import csv
import gzip
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from inlay.errors import InlayError
from inlay.papers import findings
from inlay.papers.experiment_files import read
from inlay.papers.icl import live
from inlay.papers.icl import theory as icl
from inlay.papers.icl.charts import training as charts_icl
from inlay.papers.icl.command import ALL, FIGURES
from inlay.papers.icl.theory import deep, lab, language, traces
from inlay.papers.icl.theory.lab import one_head, one_layer, theorems
from inlay.papers.reproduce.kept import experiments, path
from inlay.papers.reproduce.predicates import stated
from inlay.papers.reproduce.recipe import FAILS, UNJUDGED
from inlay.papers.reproduce.results import Results, Stated

Lab = Callable[..., tuple[int, str, str]]
DOCS = Path(__file__).parents[3] / "docs"
TINY = ("--N", "4", "--K", "12", "--d", "6", "--m", "3")


@pytest.fixture
def run(typed: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """The command in the test's folder: its exit status, output and errors."""
    monkeypatch.setattr(theorems, "RANK_DRAWS", 8)
    monkeypatch.setattr(theorems, "DRAWS", 3)
    monkeypatch.setattr(theorems, "PROMPTS", 500)
    return partial(typed, "lab", "icl")


def kept_in(folder: Path) -> tuple[list[dict[str, str]], dict]:
    name = folder.name
    assert {path.name for path in folder.iterdir()} == {f"{name}.{end}" for end in ("png", "svg", "csv", "json")}
    with (folder / f"{name}.csv").open() as file:
        return list(csv.DictReader(file)), json.loads((folder / f"{name}.json").read_text())


def test_the_command_the_experiments_and_the_pictures_know_each_other() -> None:
    names = {name for group in FIGURES.values() for name in group}
    assert names == {*lab.EXPERIMENTS, "language"} == {*ALL, "language"}
    drawn = {name.removeprefix("icl-").removeprefix("figure-") for name in charts_icl.DRAWN}
    assert drawn == {*names, "run"}


OPTIONS = {
    "2a": ("--heads", "5", "--steps", "30", *TINY),
    "2b": ("--heads", "4", "--steps", "3", "--batch", "4", *TINY),
    "3": ("--m", "6", "--K", "20"),
    "4": ("--heads", "1,5", "--steps", "20", *TINY),
    "5": ("--heads", "2,4", "--seconds", "0.1", "--batch", "4", *TINY),
    "theorem-1": ("--steps", "60"),
    "theorem-2": (),
    "proposition-1": (),
    "section-3-3": (),
}


@pytest.mark.parametrize("figure", lab.EXPERIMENTS)
def test_every_figure_draws_and_tells(run: Lab, tmp_path: Path, figure: str) -> None:
    status, out, err = run("--figure", figure, "--out", "here", *OPTIONS[figure])
    assert status == 0, err
    rows, facts = kept_in(tmp_path / "here" / f"icl-{'figure-' if figure[0].isdigit() else ''}{figure}")
    assert len(rows) >= 4
    header, *lines = [line.split("\t") for line in out.splitlines()]
    assert header == ["claim", "measured", "holds?"]
    assert lines == [
        [claim["claim"], claim["measured"], str(findings.MeasuredClaim(**claim))] for claim in facts["claims"]
    ]
    assert all("nan" not in claim["measured"] for claim in facts["claims"])
    begun = re.findall(r"^\[(\d+)/(\d+)\]", err, re.MULTILINE)
    assert begun[-1][0] == begun[-1][1]  # the bar is as long as the work


def given(options: Sequence[str]) -> dict[str, str]:
    return dict(zip(options[::2], options[1::2], strict=True))


LONG = {"2b", "5", "theorem-2"}


@pytest.mark.parametrize(
    "figure", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in lab.EXPERIMENTS]
)
def test_what_is_on_record_was_used(figure: str, run: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of a setting stands on record changes the numbers; the theorems' sizes are those of their instances."""
    monkeypatch.setattr(one_head, "STEPS", 20)  # no setting changes how long section 3.3 trains
    small = {name.strip("-"): int(value) for name, value in given(OPTIONS[figure]).items() if value.isdigit()}
    heads = {"heads": (2, 4)} if figure in ("4", "5") else {"heads": (4,)}
    setting = lab.InContextSetting(**{**small, **heads, "steps": 12, "seconds": 60.0})

    def numbers(setting: lab.InContextSetting) -> list[tuple]:
        found = lab.EXPERIMENTS[figure](setting, lambda what: None, lambda name, trace: None)
        clock = {found.columns.index("seconds")} if "seconds" in found.columns else set()
        return [tuple(cell for place, cell in enumerate(row) if place not in clock) for row in found.rows]

    facts = lab.EXPERIMENTS[figure](setting, lambda what: None, lambda name, trace: None).facts
    other = {"N": 5, "K": 25, "d": 7, "m": 4, "tau": 0.3, "heads": (8,), "steps": 13, "rate": 0.02, "seed": 1}
    other |= {"batch": 3, "unit": True}
    before = numbers(setting)
    for name, value in other.items():
        alike = numbers(replace(setting, **{name: value})) == before
        fixed = {"proposition-1": ("N", "K", "d"), "section-3-3": ("N", "K", "d", "m", "tau", "unit")}
        own = name in fixed.get(figure, ())
        assert alike == (name not in facts or own), name


@pytest.mark.parametrize("figure", ["theorem-1", "theorem-2"])
def test_the_theorems_tell_their_instances(figure: str, run: Lab) -> None:
    found = lab.EXPERIMENTS[figure](lab.InContextSetting(steps=3), lambda what: None, lambda name, trace: None)
    told = [facts for facts in found.facts.values() if isinstance(facts, dict)]
    count = len({row[0] for row in found.rows})
    assert len(told) == count
    for facts, (N, K, H, beta) in zip(told, theorems.INSTANCES[:count], strict=True):
        assert (facts["N"], facts["K"], facts["H"], facts["beta"]) == (N, K, H, beta)
        assert (facts["m"], facts["tau"], facts["unit"], facts["optimiser"]) == (N, 1.0, True, "gd")
        assert facts["eta_w"] > facts["eta_Q"] > 0
    assert not {"N", "K", "m", "tau", "rate", "optimiser"} & {*found.facts}


def test_a_run_of_ones_own_by_both_optimisers(run: Lab, tmp_path: Path) -> None:
    for optimiser, rate in (("adam", ("--rate", "0.01")), ("gd", ())):
        options = (*TINY, "--unit", "--heads", "6", "--steps", "60", *rate, "--optimiser", optimiser)
        status, out, err = run(*options, "--out", optimiser, "--watch")
        assert status == 0, err
        rows, facts = kept_in(tmp_path / optimiser / "icl-run")
        assert facts["settings"]["optimiser"] == optimiser
        assert ("rate" in facts["settings"]) == (optimiser == "adam")
        assert float(rows[-1]["gap"]) < float(rows[0]["gap"])
        assert "the loss descends towards its infimum" in out
        lines = [line for line in err.splitlines() if "gap to the infimum" in line]  # --watch into a pipe: lines
        assert "step 60:" in lines[-1]


def test_watching_leaves_the_bar_to_those_without_curves(run: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    import inlay.papers.icl.command as command

    monkeypatch.setattr(command, "ALL", ("proposition-1", "4"))
    status, _, err = run("--figure", "all", *OPTIONS["4"], "--watch")
    assert status == 0, err
    assert re.findall(r"^\[(\d+)/(\d+)\] (.*)$", err, re.MULTILINE) == [("1", "1", "proposition 1")]
    assert re.search(r"^figure 4: .*: step 20: training loss", err, re.MULTILINE)


def test_all_on_one_page(run: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import inlay.papers.icl.command as command

    monkeypatch.setattr(command, "ALL", ("3", "proposition-1"))
    status, _, err = run("--figure", "all", "--m", "6", "--K", "20", "--d", "5")
    assert status == 0, err
    page = (tmp_path / "lab" / "icl.html").read_text()
    for link in re.findall(r"<img src='([^']+)'", page):
        assert (tmp_path / "lab" / link).is_file()
    assert page.count("<img") == 2
    assert "by construction" in page


def test_figure_3_at_a_small_scale(run: Lab) -> None:
    """Each verdict is the opposite where a strength is wrong."""
    setting = lab.InContextSetting(N=4, K=30, d=5, m=10, tau=0.5)
    found = lab.EXPERIMENTS["3"](setting, lambda what: None, lambda name, trace: None)
    holds = [claim.holds for claim in found.claims]
    assert holds == ["yes", "no", "no", "yes", "no"]
    # The closed form of the gap is the mean over prompts.
    exact, drawn = ([float(row[place]) for row in found.rows] for place in (2, 3))
    assert sum(drawn) == pytest.approx(sum(exact), rel=0.3)


def test_figure_4_at_a_small_scale() -> None:
    """Few heads stay behind, and one head the most."""
    setting = lab.InContextSetting(N=6, K=20, d=8, m=4, heads=(1, 3, 6, 24), steps=400, rate=0.01)
    found = lab.EXPERIMENTS["4"](setting, lambda what: None, lambda name, trace: None)
    ends = {H: [row[6] for row in found.rows if row[:3] == ("norm 1", 0.01, H)][-1] for H in (1, 3, 24)}
    assert ends[24] < ends[3] < ends[1]  # type: ignore[operator]
    assert ends[24] < 0.05 * found.rows[0][6]  # type: ignore[operator]


def trained(gaps: Sequence[float], epochs: int, **name: str | float) -> list[tuple]:
    """Rows of figure 4 for one training that is made up, of so many epochs of 40 steps."""
    every = epochs / (len(gaps) - 1)
    return [
        (name["tokens"], name["rate"], name["H"], round(40 * at * every), at * every, 1 + gaps[at], gaps[at], rise)
        for at, rise in traces.rises(list(gaps), 1)
    ]


def figure_4_claims(
    few: Sequence[float], most: Sequence[float], faster: Sequence[float], epochs: int
) -> list[findings.MeasuredClaim]:
    """The claims on curves that are made up: H = 5, H = 400, and H = 400 at the larger rate."""
    falls = [0.9**at for at in range(50)]
    rows = [
        row
        for tokens in ("Gaussian", "norm 1")
        for H, gaps in ((5, few), (40, falls), (400, most))
        for row in trained(gaps, epochs, tokens=tokens, rate=1e-4, H=H)
    ]
    rows += trained(falls, 6, tokens="Gaussian", rate=1e-2, H=40)
    rows += trained(faster, 6, tokens="Gaussian", rate=1e-2, H=400)
    facts = {"N": 30, "rate": 1e-4, "steps": 40 * epochs, "infimum": 1.0, "tau": 0.01}
    facts["largest safe eta_w of gradient descent"] = {"Gaussian": {"40": 0.2, "400": 0.1}}
    found = findings.Finding("icl-figure-4", one_layer.FIGURE_4_COLUMNS, rows, [], facts)
    return lab.CLAIMS["icl-figure-4"](found)


def figure_4_of(few: Sequence[float], most: Sequence[float], faster: Sequence[float], epochs: int = 600) -> list[str]:
    """What these claims say, the same of both kinds of tokens."""
    claims = figure_4_claims(few, most, faster, epochs)
    assert [claim.holds for claim in claims[:3]] == [claim.holds for claim in claims[3:6]]
    return [claim.holds for claim in (*claims[:3], *claims[6:])]


def test_figure_4_tells_the_printed_picture_from_others() -> None:
    """The paper's curves would be told so, and each of them otherwise otherwise."""
    falls, stalls = [0.9**at for at in range(50)], [0.5 + 0.5 * 0.7**at for at in range(50)]
    wild = [*falls[:30], *(3 * gap for gap in falls[30:])]
    assert figure_4_of(stalls, wild, wild) == ["yes", "yes", "yes", "yes", "no"]
    assert figure_4_of(falls, falls, falls) == ["no", "yes", "no", "no", "no"]
    assert figure_4_of(stalls, [*falls[:40], *[math.nan] * 10], falls)[2] == "yes"
    # Still far from the minimum, but not stopped.
    assert figure_4_of([0.98**at for at in range(50)], falls, falls)[0] == "no"
    # Rounding's ups and downs are not instability, a leap out of it is.
    assert figure_4_of(stalls, [*falls, 1e-9, 1e-7, 1e-8], falls)[2] == "no"
    assert figure_4_of(stalls, [*falls, 1e-9, 1e-3], falls)[2] == "yes"


def test_figure_4_is_not_judged_before_the_printed_epochs() -> None:
    """The same curves after a third of them: nothing but what no training can change."""
    falls, stalls = [0.9**at for at in range(50)], [0.5 + 0.5 * 0.7**at for at in range(50)]
    assert figure_4_of(stalls, falls, falls, epochs=200) == ["cannot tell"] * 3 + ["no", "no"]
    cut = figure_4_claims(stalls, falls, falls, epochs=200)
    assert {str(claim) for claim in cut[:6]} == {"not judged: 200 of 600 epochs"}
    assert cut[-1].seeds is None  # the infimum is above the printed axis, from whatever start
    whole = figure_4_claims(stalls, falls, falls, epochs=600)
    assert [str(claim) for claim in whole[:2]] == ["yes, in one run"] * 2
    table = Results(stated=tuple(Stated(**vars(claim)) for claim in whole))
    assert [stated(claim.claim)(table).kind for claim in whole] == [UNJUDGED] * 7 + [FAILS]


def test_figure_5_tells_the_printed_picture_from_others() -> None:
    def verdicts(ends: dict[int, float], steps: dict[int, int], seconds: float = 100.0, batch: int = 256) -> list[str]:
        rows = [
            (H, step, step / 40, 10 * (ends[H] / 10) ** (step / steps[H]), 0.0, 1.0, 1.0, seconds * step / steps[H])
            for H in ends
            for step in range(0, steps[H] + 1, 10)
        ]
        facts = {"infimum": 0.2, "seconds": seconds, "batch": batch}
        found = findings.Finding("icl-figure-5", ("H", *traces.COLUMNS), rows, [], facts)
        return [claim.holds for claim in lab.CLAIMS["icl-figure-5"](found)]

    slow = {2: 200, 4: 200, 32: 100, 64: 50}
    same = dict.fromkeys(slow, 100)
    assert verdicts({2: 1.0, 4: 0.5, 32: 2.0, 64: 4.0}, same) == ["yes", "yes", "no", "yes"]
    assert verdicts({2: 1.0, 4: 0.5, 32: 6.0, 64: 8.0}, slow)[2] == "yes"
    assert verdicts({2: 9.9, 4: 1.0, 32: 0.4, 64: 0.5}, same) == ["no", "no", "no", "no"]
    assert verdicts(dict.fromkeys(slow, 9.9), same)[:2] == ["cannot tell"] * 2
    # In less time, or with smaller batches, nothing is judged.
    printed = {2: 1.0, 4: 0.5, 32: 2.0, 64: 4.0}
    assert verdicts(printed, same, seconds=60.0) == verdicts(printed, same, batch=16) == ["cannot tell"] * 4


def figure_2_of(epochs: int, inside: Callable[[float], float], outside: Callable[[float], float]) -> list[str]:
    """The verdicts on a training of four layers that is made up, as many epochs long, from 0 to 1 of its length."""
    at = [step / (40 * epochs) for step in range(0, 40 * epochs + 1, 40)]
    rows = [
        (40 * epoch, epoch, 0.2 + inside(t), inside(t), inside(t), 5 * outside(t), 0.0) for epoch, t in enumerate(at)
    ]
    facts = {"infimum": 0.2, "batch": 256, "steps in an epoch": 40}
    found = findings.Finding("icl-figure-2b", traces.COLUMNS, rows, [], facts)
    return [claim.holds for claim in lab.CLAIMS["icl-figure-2b"](found)]


def test_figure_2_tells_the_printed_picture_from_others() -> None:
    def falls(t: float) -> float:
        return 100**-t

    def lags(t: float) -> float:
        return 10**-t

    def stays(t: float) -> float:
        return 2**-t

    assert figure_2_of(200, falls, falls) == ["yes", "yes", "yes"]
    # One shape, but the one falls ten times as far: not together; near y* in-domain alone is not near.
    assert figure_2_of(200, falls, lags) == ["no", "yes", "no"]
    assert figure_2_of(66, falls, lags) == figure_2_of(66, falls, falls) == ["cannot tell"] * 3
    assert figure_2_of(200, stays, stays) == ["yes", "yes", "no"]
    assert figure_2_of(200, falls, lambda t: falls(t) / 10)[1] == "no"


@pytest.mark.parametrize(("name", "printed"), [("2a", 200), ("2b", 200), ("4", 600)])
def test_a_picture_says_where_a_training_was_cut(name: str, printed: int) -> None:
    """As it is kept, and the same with the rows of its first 60 epochs alone."""
    found, _ = read(path("icl", f"lab/icl-figure-{name}"))
    epochs = max(found.column("epoch"))
    early = replace(found, rows=[row for row in found.rows if row[found.columns.index("epoch")] <= 60])  # type: ignore[operator]
    titles = [charts_icl.DRAWN[found.name](each).get_suptitle() for each in (found, early)]
    assert (
        (f"{epochs:.0f} of the printed {printed}" in titles[0]) == ("of the printed" in titles[0]) == (epochs < printed)
    )
    assert f"60 of the printed {printed}" in titles[1]


def test_theorem_1_shows_what_is_rounding() -> None:
    def titles(end: float) -> list[str]:
        rows = [(f"N = {at}", step, gap, 1.0) for at in range(4) for step, gap in enumerate((1.0, end if at else 0.1))]
        facts = {"rounding": 1e-25}
        found = findings.Finding("icl-theorem-1", ("instance", "step", "gap", "bound (18)"), rows, [], facts)
        return [axes.get_title(loc="left") for axes in charts_icl.DRAWN["icl-theorem-1"](found).axes]

    assert titles(1e-9) == [f"N = {at}" for at in range(4)]
    assert titles(1e-30) == ["N = 0", *(f"N = {at}; grey: below 1e-25, rounding" for at in (1, 2, 3))]


def test_figure_2a_at_a_small_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_layer, "FIGURE_2_EPOCHS", 10)
    setting = lab.InContextSetting(N=6, K=20, d=8, m=4, heads=(24,), steps=400, rate=0.01)
    found = lab.EXPERIMENTS["2a"](setting, lambda what: None, lambda name, trace: None)
    assert [claim.holds for claim in found.claims if "Gaussian tokens, samples" not in claim.claim] == ["yes"] * 7
    limit = found.claims[-1]
    assert "limit" in limit.claim
    # With the samples of one batch in the place of all, it would not be.
    few = [row for row in found.rows if row[1] != one_layer.ONE_BATCH]
    few += [(row[0], one_layer.ONE_BATCH, *row[2:]) for row in found.rows if row[:2] == ("Gaussian", "samples")]
    assert lab.CLAIMS[found.name](replace(found, rows=few))[-1].holds == "no"


def test_what_was_kept_is_drawn_and_told_again(run: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--redraw: the same claims from the same numbers, other claims from other numbers, command and versions kept."""
    monkeypatch.setattr(one_layer, "FIGURE_2_EPOCHS", 0)  # long enough
    options = ("--figure", "2a", *OPTIONS["2a"])
    assert run(*options)[0] == 0
    folder = tmp_path / "lab" / "icl-figure-2a"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    facts = json.loads(before["icl-figure-2a.json"])
    status, out, err = run("--figure", "2", "--redraw")
    assert status == 0, err
    assert "descend together" in out
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    lines = before["icl-figure-2a.csv"].decode().splitlines()
    place = lines[0].split(",").index("out-of-domain")
    changed = [[*cells[:place], "0.001", *cells[place + 1 :]] for cells in (line.split(",") for line in lines[1:])]
    text = "\r\n".join([lines[0], *map(",".join, changed)]) + "\r\n"
    (folder / "icl-figure-2a.csv").write_text(text, newline="")
    assert run("--figure", "2a", "--redraw")[0] == 0
    again = json.loads((folder / "icl-figure-2a.json").read_text())
    # Now out-of-domain is neither above nor falling, and so the output does not converge.
    for words in ("above the in-dom", "descend together", "converges to y*"):
        assert [claim["holds"] for claim in again["claims"] if words in claim["claim"]] == ["no"] * 3
    assert (again["command"], again["versions"]) == (facts["command"], facts["versions"])
    for wrong in (("--figure", "5", "--redraw"), ("--figure", "2a", "--redraw", "--out", "nowhere")):
        status, _, err = run(*wrong)
        assert status == 2
        assert "to draw again" in err
    few = [line for line in text.splitlines() if "samples" not in line]
    (folder / "icl-figure-2a.csv").write_text("\n".join(few))
    assert "another version" in run("--figure", "2a", "--redraw")[2]
    (folder / "icl-figure-2a.csv").write_text("")
    assert "can be read" in run("--figure", "2a", "--redraw")[2]


def test_the_seed_reaches_the_tasks_of_training_and_of_testing() -> None:
    """At step 0 the output is 0, whatever the start: losses differ there by the tasks that were drawn alone."""
    problem = icl.InContextProblem.sample(4, 12, 6, 3, seed=0)
    starts = []
    for seed in (0, 1, 1):
        setting = lab.InContextSetting(N=4, K=12, d=6, m=3, heads=(2,), steps=2, batch=8, seed=seed)
        starts.append(lab.free(problem, setting, lambda what: None, lambda name, trace: None).rows[0])
    assert starts[1][:-1] == starts[2][:-1]  # all but the seconds
    for name in ("loss", "in-domain", "out-of-domain"):
        assert starts[0][traces.COLUMNS.index(name)] != starts[1][traces.COLUMNS.index(name)], name


@pytest.mark.parametrize("figure", ["2a", "2b", "5"])
@pytest.mark.parametrize("seed", [0, 1])
def test_figures_are_tested_on_the_tasks_of_their_seed(figure: str, seed: int) -> None:
    setting = lab.InContextSetting(N=4, K=12, d=6, m=3, heads=(2,), steps=1, batch=4, seed=seed, seconds=60)
    found = lab.EXPERIMENTS[figure](setting, lambda what: None, lambda name, trace: None)
    problem = setting.problem()
    model = icl.OneLayer(problem, 2) if figure == "2a" else deep.DeepTransformer(problem, 2, seed=seed)
    for test, begins, tasks in (("in-domain", 1000, icl.IN_DOMAIN), ("out-of-domain", 1001, icl.OUT_OF_DOMAIN)):
        shown = problem.prompts(200, begins + 20_000 * seed, tasks).shown
        with torch.no_grad():
            away = model(shown).double() - shown @ icl.ridge.star(problem)
        assert found.rows[0][found.columns.index(test)] == pytest.approx(float(away.square().mean()), rel=1e-5)


def test_other_seeds_of_figure_3_and_proposition_1_draw_nothing_twice(run: Lab) -> None:
    def drawn(figure: str, seed: int, column: str) -> set[float]:
        setting = lab.InContextSetting(N=4, K=20, d=5, m=6, seed=seed)
        found = lab.EXPERIMENTS[figure](setting, lambda what: None, lambda name, trace: None)
        return {value for row in found.rows if (value := findings.number(row[found.columns.index(column)])) > 0}

    for figure, column in (
        ("3", "gap"),
        ("3", "error, y*"),
        ("proposition-1", "least singular value, median of starts"),
    ):
        assert drawn(figure, 0, column), figure
        assert not drawn(figure, 0, column) & drawn(figure, 1, column), figure


def test_seconds_end_a_training_and_what_it_found_is_kept() -> None:
    setting = lab.InContextSetting(N=4, K=12, d=6, m=3, heads=(2,), batch=4, steps=1_000_000, seconds=0.05)
    for figure in ("2a", "2b", "4"):
        found = lab.EXPERIMENTS[figure](setting, lambda what: None, lambda name, trace: None)
        place = found.columns.index("step")
        assert 0 < max(int(row[place]) for row in found.rows) < 1_000_000  # type: ignore[arg-type]
        assert found.claims


def test_the_deep_transformer_learns_and_is_its_seed() -> None:
    problem = icl.InContextProblem.sample(6, 12, 4, 2, 0.01, 0)
    one, other = (deep.DeepTransformer(problem, 2, layers=2, d_model=16, d_ff=32, seed=3) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    layers = [layer.linear1.weight for layer in one.encoder.layers]
    assert not torch.equal(layers[0], layers[1])
    prompts = problem.prompts(3, 0)
    assert one(prompts.shown).shape == (3, 12)
    # A label that is not shown changes nothing, one that is shown does.
    changed = prompts.shown.clone()
    changed[:, 0] += 1
    assert not torch.allclose(one(prompts.shown), one(changed))
    trace = deep.train_deep(
        one, steps=150, rate=3e-3, batches=icl.Batches(32, 500), every=50, tests=icl.held_out(problem, 20)
    )
    assert trace.steps == [0, 50, 100, 150]
    assert trace.loss[-1] < 0.7 * trace.loss[0]
    assert trace.seconds == sorted(trace.seconds)
    for broken in ({"heads": 3}, {"heads": 0}, {"layers": 0}):
        with pytest.raises(InlayError, match=r"divide d_model|layers"):
            deep.DeepTransformer(problem, **{"d_model": 16, **broken})
    with pytest.raises(InlayError, match="give one of them"):
        deep.train_deep(one)


def test_the_theorems_are_not_told_to_hold_where_they_do_not(run: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = lab.InContextSetting(N=4, K=12, d=6, m=3, steps=20)
    monkeypatch.setattr(theorems, "INSTANCES", theorems.INSTANCES[:1])

    def holds(figure: str, begins: str) -> list[str]:
        found = lab.EXPERIMENTS[figure](setting, lambda what: None, lambda name, trace: None)
        return [claim.holds for claim in found.claims if claim.claim.startswith(begins)]

    assert holds("theorem-1", "(18): the gap") == ["yes"]
    assert holds("theorem-2", "after T") == ["yes"]
    assert holds("proposition-1", "") == ["yes", "no", "yes", "yes"]
    bound = icl.BoundConstants.bound
    monkeypatch.setattr(icl.BoundConstants, "bound", lambda found, steps: bound(found, steps) / 1000)
    monkeypatch.setattr(theorems, "needed_steps", lambda *given: 2)
    assert holds("theorem-1", "(18): the gap") == ["no"]
    assert holds("theorem-2", "after T") == ["no"]


def solver(strength: float, width: float = 0.0) -> language.Answerer:
    """An answerer that reads the text and does ridge regression with (1, u)."""

    def answer(texts: Sequence[str]) -> torch.Tensor:
        odds = torch.zeros(len(texts), 100)
        for row, text in enumerate(texts):
            pairs = [(int(x), int(y)) for x, y in re.findall(r"x=(\d\d) y=(\d\d)\n", text)]
            asked = int(re.findall(r"x=(\d\d) y=$", text)[0])
            f = language.linear(torch.tensor([x for x, _ in pairs] + [asked], dtype=torch.float64))
            y = (torch.tensor([y for _, y in pairs], dtype=torch.float64) - 50) * math.sqrt(2) / 15
            lam = torch.linalg.solve(f[:-1].T @ f[:-1] + strength * torch.eye(2, dtype=torch.float64), f[:-1].T @ y)
            odds[row, int((50 + 15 / math.sqrt(2) * f[-1] @ lam).round().clamp(0, 99))] = 1
        return odds

    return answer


def test_a_language_experiment_finds_ridge_regression_where_there_is_one() -> None:
    found = language.in_context(solver(1.0), "a solver", lambda what: None, count=30)
    linear = [row for row in found.rows if row[0] == "linear"]
    matched, away = [row[6] for row in linear], [row[7] for row in linear]
    assert all(0.3 < float(strength) < 3 for strength in matched[:-1])  # type: ignore[arg-type]
    assert all(float(value) < 1 for value in away)  # type: ignore[arg-type]
    holds = {
        claim.claim.split(": ", 1)[1][:25]: claim.holds for claim in found.claims if claim.claim.startswith("linear")
    }
    assert holds["at N = 32 ridge regressio"] == "yes"
    assert holds["the error falls as N grow"] == "yes"
    assert charts_icl.DRAWN["icl-language"](found) is not None


def test_a_language_experiment_finds_none_where_there_is_none() -> None:
    def copies(texts: Sequence[str]) -> torch.Tensor:
        return torch.nn.functional.one_hot(
            torch.tensor([int(re.findall(r"y=(\d\d)\n", text)[-1]) for text in texts]), 100
        ).float()

    found = language.in_context(copies, "the last label", lambda what: None, count=30)
    assert {claim.holds for claim in found.claims if "better than a kernel average" in claim.claim} <= {
        "no",
        "cannot tell",
    }
    assert {claim.holds for claim in found.claims if "the error falls" in claim.claim} <= {"no", "cannot tell"}


def test_a_kernel_average_lies_between_copying_and_the_mean() -> None:
    tasks = language.TextTasks.sample("linear", 20, 8, 0)
    away = (tasks.x[:, :8] - tasks.x[:, -1:]).abs().sort(1).values
    alone = away[:, 0] < away[:, 1]  # two labels as near as each other would be averaged
    torch.testing.assert_close(tasks.smoothed(8, 0.05)[alone], tasks.nearest(8)[alone])
    torch.testing.assert_close(tasks.smoothed(8, 1e6), tasks.mean(8))


NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_CUDA)])
def test_a_tiny_language_model_answers(tmp_path: Path, device: str) -> None:
    """Probabilities of two digits, the same as from the model's own logits one prompt at a time."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from inlay.papers.icl.models import language_model

    words = {word: index for index, word in enumerate([*"0123456789xy= \n", "[UNK]"])}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[UNK]").save_pretrained(tmp_path)
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **size)).eval()
    model.save_pretrained(tmp_path)
    texts = language.TextTasks.sample("linear", 3, 2, 0).texts(2)
    odds = language_model(str(tmp_path), batch=2, device=device)(texts)
    assert odds.device.type == "cpu"
    assert odds.shape == (3, 100)
    ids = [words[letter] for letter in texts[2] + "7"]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].softmax(-1)
    expected = logits[-2, words["7"]] * logits[-1, words["3"]]
    assert float(odds[2, 73]) == pytest.approx(float(expected), rel=1e-4)


def test_features_of_a_frozen_backbone(run: Lab, tmp_path: Path) -> None:
    """f by a real model of real pictures."""
    options = ("--features", "embedded:vit", "--task", "digits", "--N", "5", "--K", "30", "--d", "12", "--m", "4")
    status, _, err = run(*options, "--heads", "8", "--steps", "50", "--rate", "0.01", "--unit")
    assert status == 0, err
    rows, facts = kept_in(tmp_path / "lab" / "icl-run")
    assert float(rows[-1]["gap"]) < float(rows[0]["gap"])
    assert (facts["settings"]["m"], facts["settings"]["d"], facts["settings"]["K"]) == (4, 12, 30)


def test_features_of_texts_in_a_folder(run: Lab, tmp_path: Path, text_model: Path) -> None:
    """--data-dir: a named task from a local copy, as `inlay tune` takes it."""
    folder = tmp_path / "data" / "sst2"
    folder.mkdir(parents=True)
    for split, first in (("train", 0), ("test", 60)):
        rows = [{"sentence": f"w{at % 17} w{at % 13} w{at % 11}", "label": at % 2} for at in range(first, first + 60)]
        with gzip.open(folder / f"{split}.jsonl.gz", "wt") as file:
            file.write("\n".join(map(json.dumps, rows)))
    options = ("--features", text_model, "--task", "sst2", *TINY, "--heads", "8", "--steps", "20", "--rate", "0.01")
    status, _, err = run(*options, "--data-dir", "data")
    assert status == 0, err
    assert "my-model on sst2" in kept_in(tmp_path / "lab" / "icl-run")[1]["settings"]["name"]
    status, _, err = run(*options, "--data-dir", "nowhere")
    assert (status, "'nowhere' is not a folder" in err) == (2, True)


def test_components_are_what_they_say() -> None:
    from inlay.papers.icl.models import components

    values = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    found = components(values, 3)
    torch.testing.assert_close(found.T @ found / 20, torch.eye(3, dtype=torch.float64))
    with pytest.raises(InlayError, match="give 1 to 6"):
        components(values, 7)
    with pytest.raises(InlayError, match="independent directions"):
        components(values[:, :1].repeat(1, 6), 2)


def test_curves_in_the_terminal() -> None:
    grid, left, right, low, high = live.cells({"a": ([0, 1, 2], [1, 0.1, 0.01]), "b": ([2], [math.nan])}, 3, 3)
    assert grid == [[0, -1, -1], [-1, 0, -1], [-1, -1, 0]]
    assert (left, right, low, high) == (0, 2, -2, 0)
    text = live.chart({"a": ([0, 1], [1.0, 0.1])}, "title", 10, 4).plain
    assert text.startswith("title\n")
    assert "* a: 0.1" in text
    assert live.cells({"a": ([], [])}, 2, 2)[0] == [[-1, -1], [-1, -1]]


def test_a_trace_draws_itself() -> None:
    trace = icl.descend(icl.OneLayer(icl.InContextProblem.sample(3, 8, 4, 2), 4), 5)
    figure = trace.plot()
    assert len(figure.axes[0].lines) == 3  # two curves and the infimum


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--figure", "6"), "Known: 2, 2a"),
        (("--N", "300"), "N = 300, K = 200"),
        (("--m", "0"), "m = 0"),
        (("--d", "0"), "d = 0"),
        (("--tau", "-1"), "tau = -1"),
        (("--heads", "0"), "from 1 on"),
        (("--heads", "many"), "from 1 on"),
        (("--device", "abacus"), "abacus"),
        (("--seconds", "0"), "above 0"),
        (("--optimiser", "newton"), "adam"),
        (("--optimiser", "gd", "--batch", "8"), "with gd does not read --batch: leave it out"),
        (("--optimiser", "gd", "--rate", "0.1", "--seconds", "3"), "does not read --seconds, --rate"),
        (("--figure", "theorem-1", "--N", "5", "--heads", "3", "--tau", "0.5"), "--N, --tau, --heads"),
        (
            ("--figure", "theorem-2", "--N", "5"),
            "Figure theorem-2 does not read --N: leave it out. What is read: --seed",
        ),
        (("--figure", "proposition-1", "--heads", "5"), "Figure proposition-1 does not read --heads"),
        (("--figure", "2a", "--unit"), "Figure 2a does not read --unit"),
        (("--figure", "3", "--device", "cuda"), "Figure 3 does not read --device"),
        (("--figure", "3", "--unit", "--N", "5"), "Figure 3 does not read --N, --unit"),
        (("--figure", "4", "--batch", "16", "--unit"), "Figure 4 does not read --unit, --batch"),
        (("--figure", "2a", "--model", "embedded:smollm2"), "Figure 2a does not read --model"),
        (("--tasks", "5"), "A run of your own with adam does not read --tasks"),
        (("--task", "digits"), "--features: give both"),
        (("--data-dir", "."), "--data-dir is about the examples that enter the model of --features: give both"),
        (("--redraw", "--N", "5"), "leave out --N"),
        (("--rate", "-1"), "rate = -1"),
        (("--batch", "20000"), "1 to 10000"),
        (("--heads", "1,5"), "takes one"),
        (("--figure", "5", "--heads", "2,3"), "[3]: in figures 2b and 5 they must divide"),
        (("--figure", "3", "--tau", "0"), "y* and y_best are then the same"),
        (("--figure", "2a", "--features", "embedded:vit"), "Figure 2a does not read --features"),
        (("--figure", "2", "--optimiser", "gd"), "Figure 2a, 2b does not read --optimiser"),
        (("--redraw",), "to draw again"),
    ],
)
def test_bad_options_are_told(run: Lab, tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    status, _, err = run(*options)
    assert status == 2
    assert words in " ".join(err.split())
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


@NO_CUDA
@pytest.mark.parametrize("figure", ["2a", "2b", "4", "5", "run"])
def test_every_training_runs_on_cuda(run: Lab, tmp_path: Path, figure: str) -> None:
    options = ("--figure", figure, *OPTIONS[figure]) if figure != "run" else (*TINY, "--steps", "20")
    status, _, err = run(*options, "--device", "cuda")
    assert status == 0, err
    name = f"icl-{'figure-' if figure[0].isdigit() else ''}{figure}"
    assert kept_in(tmp_path / "lab" / name)[1]["settings"]["device"] == "cuda"


def test_the_page_shows_what_is_kept_and_the_command_beside_it() -> None:
    """Every link leads somewhere; every kept experiment is there with its command, claims and verdicts."""
    page = (DOCS / "icl.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", page)
    assert len(links) >= 9
    for link in links:
        assert (DOCS / link).exists(), link
    shown = page.replace("\\", "")
    folders = list(path("icl", "lab").glob("icl-*"))
    assert {folder.name for folder in folders} == {folder.name for folder in (DOCS / "images" / "lab").glob("icl-*")}
    for folder in folders:
        facts = json.loads((folder / f"{folder.name}.json").read_text())
        assert f"images/lab/{folder.name}/{folder.name}.png" in page
        assert " ".join(facts["command"]) in page, folder.name
        starts = [one for one, _ in experiments("icl", folder.name)]
        for of in zip(*(one.claims for one in starts), strict=True):
            # `python scripts/document_icl.py` puts them there.
            line = next(line for line in shown.splitlines() if line.startswith(f"| {of[0].claim} | "))
            assert all(claim.measured in line for claim in of), of[0].claim
            if len(of) == 1:
                assert line.endswith(f"| {of[0]} |")
            elif of[0].seeds is not None and len({claim.holds for claim in of}) > 1:
                assert line.endswith(f"| the starts differ: {', '.join(claim.holds for claim in of)} |")


def test_the_claims_on_record_are_those_of_this_code() -> None:
    """Read again from the numbers kept: `inlay lab icl --figure all --redraw` does that."""
    folders = [*path("icl", "lab").glob("icl-*"), *path("icl", "lab").glob("seed-*/icl-*")]
    known = [folder for folder in folders if folder.name in lab.CLAIMS]
    assert known
    for folder in known:
        found, facts = read(folder)
        assert [vars(claim) for claim in lab.CLAIMS[folder.name](found)] == facts["claims"], folder


def test_the_code_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "icl.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block.replace("steps=500", "steps=2"), {})
    assert capsys.readouterr().out.startswith("20 ")
