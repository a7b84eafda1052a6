"""The explanations from a user's pictures and texts to a folder: what is run, what is measured, what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import zoo
from inlay import InlayError, Spec, tune
from inlay.records.store import Store
from inlay.report.charts import drawing as charts
from inlay.report.charts import explanations as charts_explain
from inlay.workflow.explain import models as explain_models
from inlay.workflow.explain import norms as explain_norms
from inlay.workflow.explain import runs as explain_runs
from inlay.workflow.explain.explanation import folder_of


@pytest.fixture
def spec(image_model: Path, photos: Path) -> Spec:
    """Two updates of a tiny ViT on thirty pictures."""
    return Spec(model=str(image_model), data=str(photos), method="norm", max_steps=2, batch_size=8, learning_rate=0.05)


@pytest.fixture
def resnet(tmp_path: Path) -> str:
    """A tiny ResNet on disk."""
    zoo.tiny("resnet", "base")[0].save_pretrained(tmp_path / "my-resnet")
    processor = {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 32}, "crop_pct": 1.0}
    (tmp_path / "my-resnet" / "preprocessor_config.json").write_text(json.dumps(processor))
    return str(tmp_path / "my-resnet")


def test_layers_are_ordinary_runs_that_are_found_again(spec: Spec, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    found = explain_runs.layers(spec, [3, 1], seeds=2, out=out, baselines=(), progress=False)
    assert [point.layer for point in found.points] == [1, 3]
    assert found.depth == 3
    runs = Store(out).list()
    assert sorted(str(run.spec.settings.get("layers")) for run in runs) == ["[1]"] * 2 + ["[3]"] * 2
    made = next(run for run in runs if run.spec.settings.get("layers") == [3] and run.spec.seed == 1)
    assert found.points[1].test[1] == made.metrics["test"]["accuracy"]
    assert found.points[1].validation[1] == made.metrics["validation"]["accuracy"]
    assert found.points[1].trained == made.portrait["parameters"]["trained"]
    assert "Layer" in found.sentence
    before = {run.id: (run.folder / "record.json").stat().st_mtime_ns for run in runs}
    again = explain_runs.layers(spec, [1, 3], seeds=2, out=out, baselines=(), progress=False)
    assert again.points == found.points
    assert {run.id: (run.folder / "record.json").stat().st_mtime_ns for run in Store(out).list()} == before


def test_a_layer_that_the_method_chose_itself_is_not_trained_again(spec: Spec, tmp_path: Path) -> None:
    """A comparison runs an activation prompt at its own layer, 3; that run is layer 3's, and no other layer's."""
    given = spec.with_(method="activation-prompt")
    own = tune(given, tmp_path, progress=False)
    found = explain_runs.layers(given, [2, 3], seeds=1, out=tmp_path, baselines=(), progress=False)
    assert [point.runs == (own.id,) for point in found.points] == [False, True]
    assert len(Store(tmp_path).list()) == 2
    other = given.with_(max_steps=3)
    explain_runs.layers(other, [3], seeds=1, out=tmp_path, baselines=(), progress=False)
    assert len(Store(tmp_path).list()) == 3, "another spec is another run"


def test_a_layer_gets_its_rate_by_the_first_seed(spec: Spec, tmp_path: Path) -> None:
    given = spec.with_(learning_rate=None)
    found = explain_runs.layers(given, [3], [5, 6], tmp_path, baselines=(), rates=[1e-4, 0.5], progress=False)
    assert [(point.layer, point.rate, point.seeds) for point in found.tried] == [(3, 1e-4, (5,)), (3, 0.5, (5,))]
    tried = {point.rate: point.validation[0] for point in found.tried}
    (point,) = found.points
    assert point.seeds == (5, 6)
    assert point.validation[0] == tried[point.rate] == max(tried.values())
    # Both rates with one seed, and the chosen one with the other.
    assert len(Store(tmp_path).list()) == 3
    assert "selected for each layer on validation of seed 5" in found.sentence
    assert [row[found.columns.index("learning_rate")] for row in found.rows()] == [point.rate]


def test_the_best_rate_is_one_of_validation() -> None:
    """A layer's own, and not of test; where a metric should be small, the smallest."""

    def point(layer: int, rate: float, validation: float) -> explain_runs.Point:
        return explain_runs.Point("norm", layer, 9, rate, (0,), (1 - validation,), (validation,), 1, (), (), ("run",))

    points = [point(1, 0.1, 0.4), point(1, 0.2, 0.9), point(2, 0.1, 0.8), point(2, 0.2, 0.3)]
    spec = Spec(model="m", method="norm", task="digits")
    for greater, expected in ((True, [(1, 0.2), (2, 0.1)]), (False, [(1, 0.1), (2, 0.2)])):
        found = explain_runs.Curves("layers", spec, "metric", greater, 2, points)
        assert [(cell.layer, cell.rate) for cell in explain_runs.best_rates(found)] == expected


def test_a_baseline_has_its_own_rate_and_settings(spec: Spec, tmp_path: Path) -> None:
    given = spec.with_(settings={"exclude_modules": ["layernorm_after"]})
    found = explain_runs.layers(given, [2], seeds=1, out=tmp_path, baselines=["bias"], progress=False)
    assert [point.method for point in found.baselines] == ["bias"]
    mine, other = (next(r for r in Store(tmp_path).list() if r.spec.method == name) for name in ("norm", "bias"))
    assert mine.spec.learning_rate == 0.05
    assert mine.spec.settings == {"exclude_modules": ["layernorm_after"], "layers": [2]}
    assert other.spec.learning_rate != 0.05
    assert other.spec.settings == {}
    assert "give --seeds 3" in found.sentence


def test_activation_prompts_begin_at_the_pixels_and_have_a_norm(spec: Spec, tmp_path: Path) -> None:
    given = spec.with_(method="activation-prompt")
    assert explain_runs.check_layers("activation-prompt", None, 3, images=True) == [0, 1, 2, 3]
    assert explain_runs.check_layers("activation-prompt", None, 3, images=False) == [1, 2, 3]
    found = explain_runs.layers(given, [0, 2], seeds=1, out=tmp_path, baselines=(), progress=False)
    for point in found.points:
        run = Store(tmp_path).get(point.runs[0])
        (prompt,) = [v for k, v in load_file(run.adapter / "adapter_model.safetensors").items() if "inlay_" in k]
        positions = 32 * 32 if point.layer == 0 else 17
        assert point.norm == pytest.approx(float(prompt.double().norm()))
        assert point.norm_per_position == pytest.approx(float(prompt.double().norm()) / positions**0.5)
        assert point.norm > 0


def test_samples_of_methods_and_of_layers(spec: Spec, tmp_path: Path) -> None:
    found = explain_runs.samples(
        spec, ["linear-probe", "activation-prompt"], [8, 4], [3], seeds=1, out=tmp_path, progress=False
    )
    seen = [(point.label, point.examples) for point in found.points]
    assert seen == [(label, size) for label in ("linear-probe", "activation-prompt, layer 3") for size in (4, 8)]
    assert found.points[0].norm is None
    assert found.points[-1].norm is not None
    assert "With 8 training examples" in found.sentence
    # Every method got the learning rate that was asked for.
    assert {run.spec.learning_rate for run in Store(tmp_path).list()} == {0.05}


def test_prompt_norm_over_rates(spec: Spec, tmp_path: Path) -> None:
    given = spec.with_(method="activation-prompt", learning_rate=None)
    found = explain_runs.prompt_norm(given, [1], [1e-3, 1e-1], seeds=1, out=tmp_path, progress=False)
    small, large = found.points
    assert (small.rate, large.rate) == (1e-3, 1e-1)
    assert small.norm < large.norm
    assert "norm" in found.sentence
    with pytest.raises(InlayError, match=r"'norm' trains no prompt.*activation-prompt"):
        explain_runs.prompt_norm(spec, out=tmp_path, progress=False)


def test_a_run_that_fails_does_not_stop_the_others(spec: Spec, tmp_path: Path) -> None:
    found = explain_runs.layers(spec, [1], seeds=1, out=tmp_path, baselines=["prefix"], progress=False)
    assert len(found.points) == 1
    assert list(found.failures) == ["prefix, seed 0"]


@pytest.mark.parametrize(
    ("method", "layers", "complaint"),
    [
        ("norm", [4], "no layer 4 for 'norm' in this model: give 1 to 3"),
        ("norm", [0], "no layer 0 for 'norm'"),
        ("activation-prompt", [9], r"give 0 to 3 \(0 is the pixels\)"),
        ("full", [1], r"'full' cannot be put at a single layer. Methods that can: .*norm"),
        ("norm", [], "No layer was given"),
    ],
)
def test_layers_that_are_not_there(spec: Spec, method: str, layers: list[int], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(InlayError, match=complaint):
        explain_runs.layers(spec.with_(method=method), layers, out=tmp_path, progress=False)


def test_positions_of_a_prompt() -> None:
    assert explain_norms.positions_of((3, 32, 32)) == 1024
    assert explain_norms.positions_of((17, 16)) == 17
    assert explain_norms.positions_of((16,)) == 1
    assert explain_norms.positions_of((3, 700), framed=True) == 700


# ----------------------------------------------------------------------------------------------------- only looking


def test_cka_of_a_model_with_itself_and_with_another(spec: Spec, resnet: str, tmp_path: Path) -> None:
    same = explain_models.cka(spec, split="train", examples=16, progress=False)
    table = np.array(same.values)
    assert table.shape == (4, 4)
    assert np.allclose(np.diagonal(table), 1)
    assert np.allclose(table, table.T)
    assert same.features == "flat"
    # The same model given by name again is loaded again, and is the same.
    twice = explain_models.cka(spec, str(spec.model) + "/", split="train", examples=16, progress=False)
    assert np.allclose(twice.values, table)
    other = explain_models.cka(spec, resnet, split="train", examples=16, features="mean", progress=False)
    assert np.array(other.values).shape == (4, 5)
    assert np.isfinite(other.values).all()
    back = explain_models.cka(
        spec.with_(model=resnet), spec.model, split="train", examples=16, features="mean", progress=False
    )
    assert np.allclose(np.array(back.values).T, other.values)
    assert "my-resnet" in other.sentence
    with pytest.raises(InlayError, match="no class token"):
        explain_models.cka(spec, resnet, split="train", examples=16, features="cls", progress=False)


def test_cka_is_what_the_features_say(spec: Spec) -> None:
    """Against features taken by hand, in one minibatch."""
    from inlay.explain.cka import MinibatchCKA
    from inlay.explain.features import gram
    from inlay.training.batches import Placement

    given = spec.with_(batch_size=16)
    found = explain_models.cka(given, split="train", examples=16, features="mean", progress=False)
    task = explain_models.draw_examples(given, "train", 16, smallest=4)
    one = explain_models.load_subject(given.model, task, given)
    (batch,) = explain_models.batch_examples(one, task, "train", given, Placement.of(given))
    with torch.no_grad():
        states = one.model.vit(batch["pixel_values"], output_hidden_states=True).hidden_states
    grams = torch.stack([gram(state.mean(1)) for state in states])
    table = MinibatchCKA()
    table.update(grams, grams)
    assert np.allclose(table.value().numpy(), found.values, atol=1e-6)


def test_what_a_run_changed(spec: Spec, tmp_path: Path) -> None:
    run = tune(
        spec.with_(method="activation-prompt", settings={"layers": [2]}, learning_rate=5.0), tmp_path, progress=False
    )
    found = explain_models.cka(spec, other_adapter=run.id, runs=tmp_path, split="train", examples=16, progress=False)
    changed = np.diagonal(np.array(found.values))
    assert np.allclose(changed[:2], 1, atol=1e-12)  # nothing before the prompt is changed: the stem and block 1
    assert changed[2] < 1 - 1e-7
    assert run.id in found.second
    reach = explain_models.attention_distance(
        spec, adapter=run.id, runs=tmp_path, split="train", examples=4, progress=False
    )
    plain = explain_models.attention_distance(spec, split="train", examples=4, progress=False)
    assert reach.weighted[0] == pytest.approx(plain.weighted[0])
    assert reach.weighted[1] != pytest.approx(plain.weighted[1], abs=1e-9)


def test_attention_distance_of_pictures_and_texts(spec: Spec, review_spec: Spec, resnet: str) -> None:
    found = explain_models.attention_distance(spec, split="train", examples=10, progress=False)
    assert found.unit == "pixels"
    assert np.array(found.weighted).shape == (3, 2)
    assert len(found.rows()) == 6
    assert found.columns == ("layer", "head", "weighted_pixels", "argmax_pixels", "argmax_tokens")
    # In minibatches of another size the same: it is a mean over examples.
    again = explain_models.attention_distance(spec.with_(batch_size=3), split="train", examples=10, progress=False)
    assert np.allclose(again.weighted, found.weighted, rtol=1e-5)
    texts = explain_models.attention_distance(review_spec, split="train", examples=10, progress=False)
    assert texts.unit == "tokens"
    assert texts.uniform is None
    assert texts.largest == texts.steps
    with pytest.raises(InlayError, match=r"no attention.*cka"):
        explain_models.attention_distance(spec.with_(model=resnet), split="train", progress=False)


def test_texts_are_compared_by_their_mean(review_spec: Spec) -> None:
    found = explain_models.cka(review_spec, split="train", examples=20, progress=False)
    assert found.features == "mean"
    assert np.allclose(np.diagonal(np.array(found.values)), 1)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"examples": 3}, "examples=3 is too few: 4"),
        ({"split": "tset"}, "Unknown split 'tset'"),
        ({"features": "mena"}, "Unknown way to reduce features 'mena'"),
    ],
)
def test_what_cka_refuses(spec: Spec, changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(InlayError, match=complaint):
        explain_models.cka(spec, progress=False, **({"split": "train"} | changes))  # type: ignore[arg-type]


def test_minibatches_that_are_too_small_and_models_that_do_not_fit(spec: Spec, review_spec: Spec) -> None:
    with pytest.raises(InlayError, match="batch_size=3 parts 10 examples into 4"):
        explain_models.cka(spec.with_(batch_size=3), split="train", examples=10, progress=False)
    with pytest.raises(InlayError, match=r"reads images and .* reads texts"):
        explain_models.cka(spec, review_spec.model, split="train", progress=False)
    with pytest.raises(InlayError, match="reads texts, and the data are images"):
        explain_models.attention_distance(spec.with_(model=review_spec.model), split="train", progress=False)


# ------------------------------------------------------------------------------------------------------- the folder


def test_every_kind_is_drawn_and_kept_whole(spec: Spec, tmp_path: Path) -> None:
    found = explain_models.attention_distance(spec, split="train", examples=4, progress=False)
    folder = folder_of(found.what, spec, tmp_path / "explain")
    assert folder == tmp_path / "explain" / "attention-distance-photos-my-vit"
    charts_explain.write(found, folder, ["inlay", "explain"])
    assert sorted(path.suffix for path in folder.iterdir()) == [".csv", ".json", ".png", ".svg"]
    with (folder / "attention-distance.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[3]["weighted_pixels"]) == found.weighted[1][1]
    about = json.loads((folder / "attention-distance.json").read_text())
    assert about["command"] == ["inlay", "explain"]
    assert about["spec"]["model"] == spec.model
    assert about["versions"]["torch"] == torch.__version__
    pictures = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".png", ".svg")}
    charts_explain.write(found, folder)  # again: the same pictures, to the bit
    assert {name: (folder / name).read_bytes() for name in pictures} == pictures


def test_files_of_others_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "cka").mkdir()
    (tmp_path / "cka" / "thesis.tex").write_text("mine")
    with pytest.raises(InlayError, match=r"holds other files \(thesis.tex\)"):
        charts.check_folder(tmp_path / "cka", "cka")
    assert (tmp_path / "cka" / "thesis.tex").read_text() == "mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(InlayError, match="is a file"):
        charts.check_folder(tmp_path / "file", "cka")


def test_a_disk_that_refuses_leaves_the_earlier_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = charts.blank()
    charts.keep(tmp_path / "x", "x", figure, ("a",), [(1,), (None,)], {"n": 1})
    before = {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()}

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(charts, "write_json", full)
    with pytest.raises(InlayError, match="No room to write"):
        charts.keep(tmp_path / "x", "x", figure, ("a",), [(2,)], {"n": 2})
    assert {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
