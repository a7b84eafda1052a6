"""`--layers` of tune and compare, and what a method is told of the model it goes into: image size, learning rate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zoo
from inlay import Spec
from inlay.cli.options import settings
from inlay.errors import InlayError
from inlay.methods.registry import get
from inlay.records.store import Store
from inlay.workflow.settle import with_method_defaults

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def inlay(typed, photos: Path):
    """Run a command on the photos; its exit status, output and errors."""
    given = ("--data", photos, "--max-steps", "2", "--batch-size", "8")
    return lambda verb, *arguments: typed(verb, *given, *arguments)


def adapter(folder: Path) -> dict:
    (run,) = Store(folder).list()
    return json.loads((run.adapter / "adapter_config.json").read_text())


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("3", {"layers": [3]}), ("1,3", {"layers": [1, 3]}), (" 3, 1,1", {"layers": [1, 3]}), ("auto", {}), (None, {})],
)
def test_what_it_may_be(given: str | None, wanted: dict) -> None:
    assert settings(["kind=add"], given) == {"kind": "add", **wanted}


@pytest.mark.parametrize("given", ["last", "1-3", "", "1.5", "-1"])
def test_what_it_may_not_be(given: str) -> None:
    with pytest.raises(InlayError, match=r"--layers takes numbers counted from 1"):
        settings(None, given)
    with pytest.raises(InlayError, match="not both"):
        settings(["layers=[1]"], "2")


def test_tune_prompts_the_layer_asked_for(inlay, image_model: Path, tmp_path: Path) -> None:
    given = ("--model", image_model, "--method", "activation-prompt")
    status, _, err = inlay("tune", *given, "--layers", "0,2", "--out", "runs")
    assert status == 0, err
    assert "activation-prompt is made for images of 32 x 32 pixels, as the image processor gives them" in err
    saved = adapter(tmp_path / "runs")
    assert saved["layers"] == [0, 2]
    assert saved["shapes"] == {"vit.embeddings": [3, 32, 32], "vit.layers.1": [17, 16]}
    status, _, err = inlay("tune", *given, "--layers", "4", "--out", "other")
    assert status == 2
    assert "has no layer 4. Give layers from 0 (the pixels) to 3" in err


def test_lora_on_the_last_layers_leaves_a_trunk_to_keep(inlay, image_model: Path, tmp_path: Path) -> None:
    given = ("--model", image_model, "--method", "lora", "--max-steps", "8")
    for chosen, out in ((("--layers", "3"), "a"), (("--set", "layers_to_transform=[2]"), "b")):
        status, _, err = inlay("tune", *given, *chosen, "--trunk-cache", "on", "--out", out)
        assert status == 0, err
        assert "trunk cached: 2 of 3 blocks" in err
        assert all(name.startswith("vit.layers.2.") for name in adapter(tmp_path / out)["target_modules"])


def test_tune_refuses_layers_where_there_are_none(inlay, image_model: Path, tmp_path: Path) -> None:
    status, _, err = inlay("tune", "--model", image_model, "--method", "linear-probe", "--layers", "3")
    assert status == 2
    assert "'linear-probe' has no layers to choose" in err
    assert "activation-prompt" in err
    assert not (tmp_path / "runs").exists()


def test_compare_gives_layers_to_the_methods_that_have_them(inlay, image_model: Path, tmp_path: Path) -> None:
    methods = "linear-probe,norm,activation-prompt"
    status, out, err = inlay(
        "compare", "--model", image_model, "--methods", methods, "--layers", "1", "--seeds", "1", "--out", "runs"
    )
    assert status == 0, err
    assert "layers=[1] is ignored by linear-probe" in err
    made = {run.spec.method: run.spec.settings for run in Store(tmp_path / "runs").list()}
    assert made == {"linear-probe": {}, "norm": {"layers": [1]}, "activation-prompt": {"layers": [1]}}
    assert all(name in out for name in made)


def test_the_size_of_the_images_is_the_processors(inlay, tmp_path: Path) -> None:
    """A ResNet's config knows none, and a ConvNeXt's may be another one than the processor gives."""
    import transformers as hf

    folder = tmp_path / "model"
    zoo.tiny("convnext", "base")[0].save_pretrained(folder)
    hf.ConvNextImageProcessorPil(size={"shortest_edge": 64}, crop_pct=1.0).save_pretrained(folder)
    status, _, err = inlay("tune", "--model", folder, "--method", "activation-prompt", "--layers", "1", "--out", "runs")
    assert status == 0, err
    saved = adapter(tmp_path / "runs")
    assert saved["image_size"] == [64, 64]
    assert list(saved["shapes"].values()) == [[8, 16, 16]]


def test_the_learning_rate_follows_the_kind_of_model(image_model: Path, photos: Path, tmp_path: Path) -> None:
    resnet = tmp_path / "resnet"
    zoo.tiny("resnet", "base")[0].save_pretrained(resnet)
    method = get("activation-prompt")
    rates = {}
    for model in (image_model, resnet):
        spec = Spec(model=str(model), data=str(photos), method=method.name)
        rates[model] = with_method_defaults(spec).learning_rate
        assert with_method_defaults(spec.with_(learning_rate=0.5)).learning_rate == 0.5
        assert with_method_defaults(spec.with_(method="norm")).learning_rate == get("norm").learning_rate
    assert rates == {image_model: 0.003, resnet: 0.001}
    assert method.learning_rate_for(None) == method.learning_rate_for("encoder") == 0.003
