"""The sentences claim what the intervals allow, and no more."""

from __future__ import annotations

import pytest

from inlay import Spec
from inlay.report.charts import explanations as charts_explain
from inlay.workflow.explain.runs import Curves, Point
from inlay.workflow.explain.words import overlap

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


def sweep(what: str, points: list[Point], **changes: object) -> Curves:
    given: dict[str, object] = {"metric": "accuracy", "greater_is_better": True, "depth": 4, "points": points}
    return Curves(what=what, spec=SPEC, **(given | changes))  # type: ignore[arg-type]


NEAR = [0.001, 0.0, -0.001]


def around(mean: float) -> list[float]:
    return [mean + shift for shift in NEAR]


def test_a_clear_winner_and_a_clear_half() -> None:
    points = [point(1, around(0.9)), point(2, around(0.8)), point(3, around(0.5)), point(4, around(0.4))]
    said = sweep("layers", points).sentence
    assert said.startswith("Layer 1 is best by validation (0.9000 ± 0.0025), with test accuracy 0.9000 ± 0.0025;")
    assert "it is distinguishable from every other" in said
    assert "Early blocks are better (early 0.8500 ± 0.0025, late 0.4500 ± 0.0025 accuracy on average)." in said
    late = sweep("layers", [point(5 - p.layer, list(p.test)) for p in points if p.layer][::-1]).sentence
    assert "Late blocks are better" in late


def test_the_pixels_and_the_middle_are_in_neither_half() -> None:
    """A bad layer 0 says nothing against early blocks, nor the middle one of five for or against late ones."""
    points = [point(layer, around(value)) for layer, value in enumerate([0.1, 0.7, 0.7, 0.2, 0.7, 0.7])]
    said = sweep("layers", points, depth=5).sentence
    assert "Early and late blocks are not distinguishable (early 0.7000 ± 0.0025, late 0.7000 ± 0.0025" in said
    assert "Only one half of the blocks was tried." in sweep("layers", [points[0], points[4]], depth=5).sentence


def test_what_overlaps_is_not_distinguishable() -> None:
    wide = [0.1, 0.0, -0.1]
    points = [point(layer, [0.7 + 0.01 * layer + shift for shift in wide]) for layer in (1, 2, 3, 4)]
    said = sweep("layers", points).sentence
    assert "Layer 4 is best by validation" in said
    assert "not distinguishable from layers 1, 2, 3." in said
    assert "Early and late blocks are not distinguishable" in said


def test_two_seeds_call_no_layers_different_and_have_no_band() -> None:
    from inlay.report.charts.explanations import layers

    points = [point(layer, [mean, mean + 0.001]) for layer, mean in ((1, 0.9), (2, 0.8), (3, 0.5), (4, 0.4))]
    found = sweep("layers", points)
    assert found.sentence.startswith("Layer 1 is best by validation (0.9005), with test accuracy 0.9005. Fewer than 3")
    assert "distinguishable" not in found.sentence
    assert "blocks are" not in found.sentence
    assert not [
        part for part in layers(found).axes[0].collections if type(part).__name__ == "FillBetweenPolyCollection"
    ]
    three = sweep("layers", [point(p.layer or 0, [*p.test, p.test[0] + 0.0005]) for p in points])
    assert "it is distinguishable from every other" in three.sentence
    bands = [part for part in layers(three).axes[0].collections if type(part).__name__ == "FillBetweenPolyCollection"]
    assert len(bands) == 1


def test_the_layer_is_chosen_on_validation_and_reported_on_test() -> None:
    points = [point(1, around(0.9), around(0.5)), point(3, around(0.6), around(0.8))]
    said = sweep("layers", points).sentence
    assert said.startswith("Layer 3 is best by validation (0.8000")
    assert "with test accuracy 0.6000" in said


def test_a_metric_that_should_be_small() -> None:
    points = [point(1, around(3.0)), point(4, around(2.0))]
    said = sweep("layers", points, metric="perplexity", greater_is_better=False).sentence
    assert said.startswith("Layer 4 is best")
    assert "Late blocks are better" in said


def test_one_layer_alone_does_not_stand_out() -> None:
    assert "is distinguishable from" not in sweep("layers", [point(1, around(0.9))]).sentence


def test_the_learning_rate_of_layers_is_told() -> None:
    points = [point(layer, around(0.5 + layer / 10), rate=rate) for layer, rate in ((1, 0.01), (3, 0.001), (4, 0.01))]
    same = sweep("layers", [point(p.layer, list(p.test)) for p in points]).sentence
    assert same.endswith(
        "Every layer ran with the same learning rate (0.01), which may suit some layers better than others: --rates "
        "chooses one for each."
    )
    found = sweep("layers", points, tried=[point(1, [0.5])])
    assert found.sentence.endswith(
        "Learning rates were selected for each layer on validation of seed 0: 0.001 at layer 3; 0.01 at layers 1, 4."
    )
    assert found.details()["rates_tried"][0]["layer"] == 1
    assert "learning rate chosen for each layer" in charts_explain.draw(found).axes[0].get_title(loc="left")


def test_one_seed_claims_nothing() -> None:
    assert "no difference can be tested" in sweep("layers", [point(1, [0.9]), point(4, [0.1])]).sentence
    assert "no difference can be tested" in sweep("samples", [point(None, [0.9])]).sentence


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
    assert said.endswith("it is distinguishable from every other.")


def sized(layer: int, norm: float, test: float) -> Point:
    """A run with this norm a position; its total norm goes the other way."""
    return point(layer, [test], norms=(100 - norm,), norms_per_position=(norm,))


def test_norm_and_accuracy_are_compared_within_a_layer() -> None:
    """In each layer larger is better, by the norm a position; thrown together, larger would be worse."""
    points = [sized(1, 1 + i, 0.5 + i / 10) for i in range(4)] + [sized(3, 10 + i, 0.1 + i / 10) for i in range(5)]
    said = sweep("prompt-norm", points).sentence
    assert "+1.00 for activation-prompt, layer 1 (4 runs); +1.00 for activation-prompt, layer 3 (5 runs)" in said
    assert "norm 4 a position, activation-prompt, layer 1, learning rate 0.01" in said
    assert "p =" not in said
    assert "tests nothing" in said


def test_few_runs_have_no_rank_correlation() -> None:
    few = sweep("prompt-norm", [sized(1, i, i / 10) for i in range(3)]).sentence
    assert "Rank correlation" not in few
    assert few.endswith("Too few or too equal runs to correlate the norm with accuracy: activation-prompt, layer 1.")
    equal = sweep("prompt-norm", [sized(1, i, 0.5) for i in range(6)]).sentence
    assert "Rank correlation" not in equal


def test_prompts_of_several_layers_are_drawn_by_their_norm_a_position() -> None:
    figure = charts_explain.draw(sweep("prompt-norm", [sized(1, 3.0, 0.5), sized(3, 5.0, 0.6)]))
    assert [float(drawn.get_offsets()[0, 0]) for drawn in figure.axes[0].collections] == [3.0, 5.0]
    assert "per position" in figure.axes[0].get_xlabel()


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
