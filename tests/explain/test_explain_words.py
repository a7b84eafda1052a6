"""The sentences claim what the intervals allow, and no more."""

from __future__ import annotations

import pytest

from inlay import Spec
from inlay.report import charts_explain
from inlay.workflow.explain_runs import Point, Sweep
from inlay.workflow.explain_words import overlap

SPEC = Spec(model="hub/some-vit", method="activation-prompt", task="digits")


def point(layer: int | None, test: list[float], validation: list[float] | None = None, **changes: object) -> Point:
    given: dict[str, object] = {
        "method": "activation-prompt",
        "layer": layer,
        "examples": 100,
        "rate": 0.01,
        "seeds": tuple(range(len(test))),
        "test": tuple(test),
        "validation": tuple(test if validation is None else validation),
        "trained": 1000,
        "norms": (),
        "norms_per_position": (),
        "runs": tuple(f"run-{i}" for i in range(len(test))),
    }
    return Point(**(given | changes))  # type: ignore[arg-type]


def sweep(what: str, points: list[Point], **changes: object) -> Sweep:
    given: dict[str, object] = {"metric": "accuracy", "greater_is_better": True, "depth": 4, "points": points}
    return Sweep(what=what, spec=SPEC, **(given | changes))  # type: ignore[arg-type]


NEAR = [0.001, 0.0, -0.001]


def around(mean: float) -> list[float]:
    return [mean + shift for shift in NEAR]


def test_a_clear_winner_and_a_clear_half() -> None:
    points = [point(1, around(0.9)), point(2, around(0.8)), point(3, around(0.5)), point(4, around(0.4))]
    said = sweep("layers", points).sentence
    assert said.startswith("Layer 1 is best by validation (0.9000 ± 0.0025), with test accuracy 0.9000 ± 0.0025;")
    assert "it stands out from every other" in said
    assert said.endswith("Early layers are better (early 0.8500 ± 0.0025, late 0.4500 ± 0.0025 accuracy on average).")
    late = sweep("layers", [point(5 - p.layer, list(p.test)) for p in points if p.layer][::-1]).sentence
    assert "Late layers are better" in late


def test_what_overlaps_is_not_distinguishable() -> None:
    wide = [0.1, 0.0, -0.1]
    points = [point(layer, [0.7 + 0.01 * layer + shift for shift in wide]) for layer in (1, 2, 3, 4)]
    said = sweep("layers", points).sentence
    assert "Layer 4 is best by validation" in said
    assert "not distinguishable from layers 1, 2, 3." in said
    assert "Early and late layers are not distinguishable" in said


def test_the_layer_is_chosen_on_validation_and_reported_on_test() -> None:
    points = [point(1, around(0.9), around(0.5)), point(3, around(0.6), around(0.8))]
    said = sweep("layers", points).sentence
    assert said.startswith("Layer 3 is best by validation (0.8000")
    assert "with test accuracy 0.6000" in said


def test_a_metric_that_should_be_small() -> None:
    points = [point(1, around(3.0)), point(4, around(2.0))]
    said = sweep("layers", points, metric="perplexity", greater_is_better=False).sentence
    assert said.startswith("Layer 4 is best")
    assert "Late layers are better" in said


def test_one_seed_claims_nothing() -> None:
    assert "cannot be told from chance" in sweep("layers", [point(1, [0.9]), point(4, [0.1])]).sentence
    assert "cannot be told from chance" in sweep("samples", [point(None, [0.9])]).sentence


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [((1.0, 0.1), (1.2, 0.1), True), ((1.0, 0.1), (1.3, 0.1), False), ((1.0, None), (9.0, 0.1), True)],
)
def test_overlap(first: tuple[float, float | None], second: tuple[float, float | None], expected: bool) -> None:
    assert overlap(first, second) is expected
    assert overlap(second, first) is expected


def test_the_largest_training_set_decides() -> None:
    points = [
        point(None, around(0.9), method="full", examples=50),
        point(None, around(0.6), method="full", examples=200),
        point(1, around(0.8), examples=50),
        point(1, around(0.85), examples=200),
    ]
    said = sweep("samples", points).sentence
    assert said.startswith("With 200 training examples activation-prompt, layer 1 is best by validation")
    assert said.endswith("it stands out from every other.")


def test_norm_and_accuracy_are_said_to_go_together_only_when_they_do() -> None:
    falling = [point(1, [0.9 - 0.1 * i], norms=(float(i),), norms_per_position=(i / 4,)) for i in range(6)]
    assert "rank correlation -1.00" in sweep("prompt-norm", falling).sentence
    mixed = [point(1, [v], norms=(float(i),), norms_per_position=(0.1,)) for i, v in enumerate([0.5, 0.2, 0.6, 0.3])]
    assert "no rank correlation beyond chance" in sweep("prompt-norm", mixed).sentence
    assert "too few" in sweep("prompt-norm", mixed[:2]).sentence


@pytest.mark.parametrize("what", ["layers", "samples", "prompt-norm"])
@pytest.mark.parametrize("seeds", [1, 3])
def test_every_sweep_can_be_drawn_and_listed(what: str, seeds: int) -> None:
    points = [
        point(
            layer,
            around(0.5 + layer / 10)[:seeds],
            examples=size,
            norms=(1.0,) * seeds,
            norms_per_position=(0.1,) * seeds,
        )
        for layer in (0, 2, 4)
        for size in ((100,) if what == "layers" else (100, 200))
    ]
    found = sweep(what, points, baselines=[point(None, around(0.6)[:seeds], method="linear-probe")])
    figure = charts_explain.draw(found)
    axes = figure.axes[0]
    assert "digits, some-vit" in axes.get_title(loc="left")
    assert "accuracy" in axes.get_ylabel()
    assert axes.get_xlabel() or figure.axes[1].get_xlabel()
    assert all(len(row) == len(found.columns) for row in found.rows())
    assert len(found.rows()) == len(points) + 1
    if what == "layers":
        drawn = {line.get_label(): line for line in axes.lines}
        assert drawn["best by validation"].get_xdata()[0] == 4
        assert list(drawn["activation-prompt, test"].get_xdata()) == [0, 2, 4]
        assert any(str(label).startswith("linear-probe, test: 0.60") for label in drawn)
