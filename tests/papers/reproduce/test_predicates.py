"""Predicates on small tables whose answers are known, and the papers' printed claims that their own numbers refute."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.errors import InlayError
from inlay.papers.findings import Finding, MeasuredClaim
from inlay.papers.reproduce import catalogue, kept
from inlay.papers.reproduce.experiments import over_starts
from inlay.papers.reproduce.predicates import (
    above,
    above_at_most,
    above_on_average,
    best_in,
    difference,
    mean_of_columns,
    near,
    prefers,
    ranked,
    rises,
    stated,
    times,
    within,
)
from inlay.papers.reproduce.recipe import FAILS, HOLDS, OPEN, SCALES, UNJUDGED, UNTESTED, Claim, Recipe, RecipeScale
from inlay.papers.reproduce.results import ResultCell, Results, Stated, from_finding

TABLE = Results.of(
    {
        ("", "a", "x"): [3.0, 4.0, 5.0],
        ("", "b", "x"): [1.0, 2.5, 2.0],
        ("", "a", "y"): [1.0, 1.0, 1.0],
        ("", "b", "y"): [1.5, 0.5, 0.9],
        ("", "c", "y"): 7.0,
    }
)


def test_above_is_decided_by_the_worst_column_with_its_paired_interval() -> None:
    verdict = above("a", "b")(TABLE)
    gaps = [-0.5, 0.5, 0.1]
    half = 4.30265 * stdev(gaps) / 3**0.5
    assert verdict.judgement == HOLDS
    assert verdict.interval == pytest.approx((fmean(gaps) - half, fmean(gaps) + half), rel=1e-4)
    assert verdict.clear is False
    assert "2 of 2" in verdict.measured
    assert above("b", "a")(TABLE).judgement == FAILS
    assert above("a", "b", columns=["x"], by=1.5)(TABLE).judgement == HOLDS
    assert above("a", "b", columns=["x"], by=2.5)(TABLE).judgement == FAILS
    assert above("a", "nobody")(TABLE).judgement == UNTESTED


def test_the_others() -> None:
    assert above_on_average("a", "b", by=1.0)(TABLE).judgement == HOLDS
    assert above_on_average("a", "b", by=1.2)(TABLE).judgement == FAILS
    assert within("a", "b", 0.1, columns=["y"])(TABLE).judgement == HOLDS
    assert within("a", "b", 0.1)(TABLE).judgement == FAILS
    assert above_at_most("b", "a", 0.0)(TABLE).judgement == HOLDS
    assert above_at_most("a", "b", 2.0)(TABLE).judgement == FAILS
    assert ranked("a", ("a", "b", "c"), 2, 2, columns=["y"])(TABLE).judgement == HOLDS
    assert ranked("a", ("a", "b", "c"), 1, 1, columns=["y"])(TABLE).judgement == FAILS
    assert ranked("b", ("a", "b"), 1, 1, columns=["x"], lowest=True)(TABLE).judgement == HOLDS
    assert times("c", "a", "y", 7.0)(TABLE).judgement == HOLDS
    assert times("c", "a", "y", 7.1)(TABLE).judgement == FAILS
    assert near("c", "y", 7.3)(TABLE).judgement == HOLDS
    assert near("c", "y", 7.8)(TABLE).judgement == FAILS
    assert near("c", "x", 7.3)(TABLE).judgement == UNTESTED
    assert best_in("a", ("a", "b"), 1.0)(TABLE).judgement == HOLDS
    assert best_in("b", ("a", "b"), 0.5)(TABLE).judgement == FAILS
    assert best_in("b", ("a", "c"), 0.5, columns=["x"])(TABLE).judgement == UNTESTED
    assert rises("a", ["y", "x"])(TABLE).judgement == HOLDS
    assert rises("a", ["x", "y"])(TABLE).judgement == FAILS
    assert rises("c", ["x", "y"])(TABLE).judgement == UNTESTED
    both = Results.of({("", "r", "x"): 1.0, ("", "r", "y"): 2.0, ("", "r", "Average"): 1.5}, printed=True)
    assert mean_of_columns()(both).judgement == HOLDS
    off = Results({**both.cells, ("", "r", "Average"): ResultCell((1.6,))}, printed=True)
    assert mean_of_columns()(off).judgement == FAILS
    assert mean_of_columns()(replace(off, printed=False)).judgement == UNTESTED  # ours are computed


def test_a_place_among_fewer_is_no_place() -> None:
    """c is not in column x: a place among a, b and c is not known there."""
    verdict = ranked("a", ("a", "b", "c"), 1, 1, columns=["x"])(TABLE)
    assert (verdict.judgement, verdict.measured) == (UNTESTED, "not measured: c")
    assert ranked("a", ("a", "b", "c"), 2, 2, columns=["x", "y"])(TABLE).measured.count(" of 3") == 1


def test_a_verdict_is_clear_only_where_every_interval_leaves_the_limit_out() -> None:
    """The smallest mean has a narrow interval, and the larger one a wide one that has 0 in it."""
    table = Results.of(
        {
            ("", "a", "x"): [1.0, 1.1, 0.9],
            ("", "b", "x"): [0.0, 0.0, 0.0],
            ("", "a", "y"): [9.0, -4.0, 4.0],
            ("", "b", "y"): [0.0, 0.0, 0.0],
        }
    )
    verdict = above("a", "b")(table)
    assert (verdict.judgement, verdict.clear, verdict.kind) == (HOLDS, False, OPEN)
    assert verdict.measured.endswith("; 1 of 2 not significant")
    assert str(verdict) == "not significant (by the means it holds)"
    assert above("a", "b", columns=["x"])(table).clear is True
    assert above("a", "b", by=2.0)(table).kind == FAILS  # x is surely below 2, whatever y is
    assert within("a", "b", 5.0)(table).kind == OPEN
    tight = within("a", "b", 0.5)(table)  # the largest gap is y's, which is open; x settles it
    assert tight.kind == FAILS
    assert "largest +3 ± 16 (y); decided by +1 ± 0.25 (x)" in tight.measured
    assert tight.interval == pytest.approx((0.7516, 1.2484), abs=1e-3)
    assert within("a", "b", 0.5, columns=["x"])(table).kind == FAILS
    assert best_in("a", ("a", "b"), 1.0)(table).kind == OPEN
    assert best_in("a", ("a", "b"), 0.5)(table).kind == HOLDS  # x alone is enough
    assert best_in("b", ("a", "b"), 1.0)(table).kind == FAILS
    assert ranked("a", ("a", "b"), 1, 1, columns=["x", "y"])(table).kind == OPEN
    assert ranked("b", ("a", "b"), 1, 1, columns=["x", "y"])(table).kind == FAILS
    assert near("a", "x", 1.0, relative=0.5)(table).kind == HOLDS
    assert near("a", "y", 3.0, relative=0.5)(table).kind == OPEN
    long = Results.of({("", "a", "x"): [3.9, 4.0, 4.1], ("", "b", "x"): [1.0, 1.0, 1.1]})
    assert times("a", "b", "x", 2.0)(long).kind == HOLDS
    assert times("a", "b", "x", 3.9)(long).kind == OPEN
    assert times("a", "b", "x", 9.0)(long).kind == FAILS


def test_one_seed_is_not_judged_and_a_count_is() -> None:
    seed = Results.of({("", "a", "x"): [2.0], ("", "b", "x"): [1.0], ("", "a", "y"): [2.0], ("", "b", "y"): [1.0]})
    tests = (
        above("a", "b"),
        above_on_average("a", "b"),
        within("a", "b", 5.0),
        above_at_most("a", "b", 5.0),
        best_in("a", ("a", "b"), 1.0),
        ranked("a", ("a", "b"), 1, 1, columns=["x"]),
        times("a", "b", "x", 1.5),
        near("a", "x", 2.0),
        rises("a", ["x", "y"], slack=1.0),
    )
    assert [test(seed).kind for test in tests] == [UNJUDGED] * len(tests)
    assert {str(test(seed)) for test in tests} == {"one seed: not judged"}
    assert [test(Results.from_json(seed.to_json())).kind for test in tests] == [UNJUDGED] * len(tests)
    counted = Results({key: ResultCell(cell.values) for key, cell in seed.cells.items()})
    assert [test(counted).kind for test in tests] == [HOLDS] * len(tests)
    averaged = seed.with_average()
    assert above("a", "b", columns=["Average"])(averaged).kind == UNJUDGED
    # What several seeds have refuted stays so beside one seed; what they leave to it does not.
    cells = {("", "a", "x"): [0.0, 0.1, 0.2], ("", "b", "x"): [1.0, 1.1, 1.2], ("", "a", "y"): [2.0]}
    mixed = Results.of({**cells, ("", "b", "y"): [1.0]})
    assert above("a", "b")(mixed).kind == FAILS
    assert above("b", "a", columns=["x"])(mixed).kind == HOLDS
    assert above("a", "b", columns=["y"])(mixed).kind == UNJUDGED
    assert above("a", "b", by=-2.0)(mixed).kind == UNJUDGED


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(-9, 9), min_size=1, max_size=1), min_size=4, max_size=4))
def test_no_numbers_of_one_seed_hold_or_fail(values: list[list[float]]) -> None:
    table = Results.of(dict(zip([("", row, column) for row in "ab" for column in "xy"], values, strict=True)))
    tests = (above("a", "b"), within("a", "b", 1.0), best_in("a", ("a", "b"), 0.5), rises("a", ["x", "y"]))
    assert {test(table).kind for test in tests} == {UNJUDGED}


def claimed(short: str, panels: tuple[str, ...] = ()) -> Recipe:
    """A recipe whose scale `here` is too short, about two panels of accuracies and a count."""
    scales = {name: RecipeScale("", "") for name in SCALES}
    scales["here"] = RecipeScale("", "", short=short, made_panels=panels)
    tests = (above("a", "b", panels=["one"]), above("a", "b", panels=["two"]), near("a", "size", 7.0, panel="one"))
    claims = (*(Claim(str(number), test) for number, test in enumerate(tests)), Claim("3", above("a", "nobody")))
    return Recipe("p/x", "", scales, lambda bench, settings: Results(), claims)


def test_what_is_too_short_judges_nothing_and_counts_are_judged() -> None:
    cells: dict[tuple[str, str, str], float | list[float]] = {
        (panel, row, "x"): [base, base + 0.1, base + 0.3]
        for panel in ("one", "two")
        for row, base in (("a", 5), ("b", 1))
    }
    table = Results.of({**cells, ("one", "a", "size"): 7.0})

    def kinds(recipe: Recipe, scale: str, read: bool = False) -> list[str]:
        return [verdict.kind for verdict in recipe.judged(table, scale, read=read)]

    toy = claimed("a demonstration")
    assert kinds(toy, "paper") == kinds(toy, "here", read=True) == [HOLDS, HOLDS, HOLDS, UNTESTED]
    assert kinds(toy, "here") == [UNJUDGED, UNJUDGED, HOLDS, UNTESTED]
    assert [str(verdict) for verdict in toy.judged(table, "here")][:2] == ["a demonstration: not judged"] * 2
    assert kinds(claimed("2 epochs", ("two",)), "here", read=True) == [HOLDS, UNJUDGED, HOLDS, UNTESTED]
    assert kinds(toy, "smoke") == [UNJUDGED] * 4


def test_a_doubtful_value_judges_nothing_and_other_values_are_judged() -> None:
    cells = {
        (panel, row, "x"): ResultCell(
            (base, base + 0.1, base + 0.3), doubt="a tie" if (panel, row) == ("two", "b") else ""
        )
        for panel in ("one", "two")
        for row, base in (("a", 5.0), ("b", 1.0))
    }
    table = Results({**cells, ("one", "a", "size"): ResultCell((7.0,))})
    for results in (table, Results.from_json(table.to_json())):
        assert results.doubts == ["a tie"]
        verdicts = claimed("").judged(results)
        assert [verdict.kind for verdict in verdicts] == [HOLDS, UNJUDGED, HOLDS, UNTESTED]
        assert str(verdicts[1]) == "a tie: not judged"
    mean = table.with_average(columns=["x"]).get("b", "Average", "two")
    assert mean is not None
    assert mean.doubt == "a tie"


def test_claims_of_the_lab_need_starts_at_the_printed_length() -> None:
    def one(holds: str, seeds: int | None = None, short: str = "") -> Results:
        return Results(stated=(Stated("a claim", "so much", holds, seeds, short),))

    test = stated("a claim")
    assert [test(one(holds)).kind for holds in ("yes", "no", "cannot tell")] == [HOLDS, FAILS, UNTESTED]
    assert [test(one(holds, 1)).kind for holds in ("yes", "no", "cannot tell")] == [UNJUDGED] * 3
    assert str(test(one("yes", 1, "200 of 600 epochs"))) == "200 of 600 epochs, one seed: not judged"
    assert over_starts([one("yes", 1)] * 3, range(3)).stated[0] == Stated(
        "a claim", "seed 0: so much; seed 1: so much; seed 2: so much", "yes", 3
    )
    assert over_starts([one("yes", 1)] * 2, [0, 10]).stated[0].measured == "seed 0: so much; seed 10: so much"
    assert test(over_starts([one("yes", 1)] * 3, range(3))).kind == HOLDS
    assert test(over_starts([one("no", 1)] * 3, range(3))).kind == FAILS
    assert test(over_starts([one("no", 1), one("yes", 1)], range(2))).kind == OPEN
    assert test(over_starts([one("cannot tell", 1), one("yes", 1)], range(2))).kind == UNTESTED
    assert test(over_starts([one("cannot tell", 1, "cut"), one("yes", 1)], range(2))).kind == UNJUDGED
    assert over_starts([Results.of({("", "a", "x"): [float(at)]}) for at in range(3)], range(3)).seeds == [3]


def test_a_claim_on_average_is_about_the_mean_that_there_is() -> None:
    other = TABLE.with_average("mean of 2", ["x", "y"])
    assert above("a", "b", columns=["Average"])(other).measured.endswith("(mean of 2)")
    assert above_on_average("a", "b", columns=["Average"], by=1.0)(other).judgement == HOLDS
    assert above("a", "b", columns=["Average"])(TABLE).judgement == UNTESTED
    assert above("a", "b")(other).measured.startswith("in 2 of 2")  # a mean is no further set


def test_an_exact_number_beside_repeated_ones() -> None:
    """The interval is that of what was repeated."""
    found = difference(ResultCell((1.0, 2.0, 3.0)), ResultCell((0.5,)))
    assert found.mean == 1.5
    assert found.half == ResultCell((1.0, 2.0, 3.0)).half
    assert difference(ResultCell((1.0, 2.0, 3.0)), ResultCell.of_seeds([0.5])).half is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=9))
def test_a_curve_prefers_one_end_at_most(values: list[float]) -> None:
    """Halves by hand; and a curve read backwards prefers the other end."""
    half = len(values) // 2
    late = fmean(values[-half:]) - fmean(values[:half])
    table, back = (
        Results.of({("", "r", str(place)): value for place, value in enumerate(order, start=1)})
        for order in (values, values[::-1])
    )
    if abs(late) > 1e-9:
        assert prefers("r", "late")(table).judgement == (HOLDS if late > 0 else FAILS)
        assert prefers("r", "early")(back).judgement == (HOLDS if late > 0 else FAILS)


@pytest.mark.parametrize(
    ("model", "end", "told"), [("vit_tiny_patch16_224", "early", "+0.336"), ("resnet50_v1", "late", "+0.0")]
)
def test_the_pixels_are_no_block(model: str, end: str, told: str) -> None:
    """The halves of the kept curves by hand, from the files: layer 0 is visual prompting, and in neither."""
    with kept.path("activation_prompts", f"layers-{model}.csv").open(encoding="utf-8", newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["method"] == "activation-prompt"]
    by_layer = {int(line["layer"]): 100 * float(line["test_mean"]) for line in lines}
    assert sorted(by_layer) == list(range(len(by_layer)))
    half = max(by_layer) // 2
    early, late = (
        fmean(by_layer[layer] for layer in layers)
        for layers in (range(1, half + 1), range(max(by_layer) - half + 1, max(by_layer) + 1))
    )
    gap = early - late if end == "early" else late - early
    verdict = prefers("AP", end)(Results.of({("", "AP", str(layer)): value for layer, value in by_layer.items()}))
    assert f"by {gap:+.3g};" in verdict.measured
    assert told in verdict.measured
    moved = Results.of({("", "AP", str(layer)): value if layer else 0.0 for layer, value in by_layer.items()})
    assert prefers("AP", end)(moved) == verdict


def test_what_the_lab_has_judged() -> None:
    claims = [MeasuredClaim("layer 1: yes", "all", "yes"), MeasuredClaim("layer 2: who knows", "few", "cannot tell")]
    finding = Finding(
        "one", ("kind", "P", "value", "seed"), [("s", 4, 1.0, 0), ("s", 4, 3.0, 1), ("t", 8, 2.0, 0)], claims
    )
    found = from_finding(finding, ("kind",), curve=("P", "value"))
    assert found.cells == {("", "s", "4"): ResultCell((1.0, 3.0)), ("", "t", "8"): ResultCell((2.0,))}
    assert stated("layer 1")(found).judgement == HOLDS
    assert stated("layer 2")(found).judgement == UNTESTED
    assert stated("layer 3")(found).judgement == UNTESTED
    assert Results.from_json(found.to_json()) == found


def test_printed_numbers_are_read_with_their_errors(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("panel,row,x,y\np,a,81.3±0.4,\np,b,80,1e3\n", encoding="utf-8")
    table = Results.read(path)
    assert table.get("a", "x", "p") == ResultCell((81.3,), printed=0.4)
    assert str(table.get("a", "x", "p")) == "81.3 ± 0.4"
    assert table.get("a", "x", "p").half is None  # type: ignore[union-attr]  # nobody says that it is an interval
    assert Results.read(path, intervals=True).get("a", "x", "p").half == 0.4  # type: ignore[union-attr]
    assert table.get("a", "y", "p") is None
    assert table.get("b", "y", "p") == ResultCell((1000.0,))
    assert above("a", "b", columns=["x"])(table).interval is None  # b has no error
    path.write_text("method,x\na,1\n")
    with pytest.raises(InlayError, match="'row'"):
        Results.read(path)


@pytest.mark.parametrize(
    ("name", "begins", "judgement"),
    [
        ("activation-prompts/table-1", "AP is above VP on every set", FAILS),
        ("activation-prompts/table-1", "On StanfordCars, SVHN and GTSRB", FAILS),
        ("activation-prompts/table-1", "With ResNet-101 AP is above VP by over 4", HOLDS),
        ("activation-prompts/table-1", "With ViT-L/16 AP is the best of four in 15", HOLDS),
        ("activation-prompts/table-3", "The printed averages", FAILS),
        ("activation-prompts/table-4", "AP has place 2 to 4", FAILS),
        ("activation-prompts/table-4", "AP is first in throughput", FAILS),
        ("activation-prompts/table-5", "On Swin AP is above VP on every set", FAILS),
        ("activation-prompts/table-a7", "SSF is under AdaptFormer", FAILS),
        ("activation-prompts/table-a8", "Accuracy grows with the rank", FAILS),
        ("activation-prompts/table-a3", "An added prompt is above a multiplied one", HOLDS),
    ],
)
def test_claims_that_the_printed_numbers_decide(name: str, begins: str, judgement: str) -> None:
    recipe = catalogue.recipes()[name]
    verdicts = dict(zip((claim.text for claim in recipe.claims), recipe.judged_as_printed(), strict=True))
    (found,) = [verdict for text, verdict in verdicts.items() if text.startswith(begins)]
    assert found.judgement == judgement
