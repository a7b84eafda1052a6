"""Methods in a model with a tower for images and one for texts: which tower each adapts, and what is asked for."""

from __future__ import annotations

from typing import Any

import pytest

import image_text
from inlay.backbones import towers
from inlay.errors import InlayError
from inlay.methods.attach import attach, trained_parameters
from inlay.methods.capabilities import capabilities
from inlay.methods.registry import all_methods, get
from inlay.methods.targets import in_tower
from zoo import tiny

FITS = [name for name, works in capabilities()["methods"].items() if "image-text" in works.get("clip", ())]
OF_IMAGES = ("activation-prompt", "e2vpt", "gate-vpt", "visual-prompt", "vpt-deep", "vpt-shallow")
REFUSED = ("idpg", "infoprompt", "warp", "p-tuning", "prefix", "prompt", "linear-probe")


def trained_in(family: str, method: str, tower: str, **settings: Any) -> set[str]:
    """The towers in which a method trains anything, by their letters."""
    model = image_text.build(family)
    towers.install(model)
    adapted = attach(model, method, settings=in_tower(model, get(method), settings, tower), newly_initialised=())
    names = [name for name in trained_parameters(adapted) if "logit" not in name]
    return {"image" if "vision_model" in name or "visual_projection" in name else "text" for name in names}


def test_what_fits_was_probed() -> None:
    assert set(FITS) == set(all_methods()) - set(REFUSED)


@pytest.mark.filterwarnings("ignore:Unsupported layer type")
@pytest.mark.parametrize("family", ["clip", "siglip"])
@pytest.mark.parametrize("method", FITS)
def test_method_stays_in_the_tower_that_is_asked_for(method: str, family: str) -> None:
    if method == "full":
        assert trained_in(family, method, "both") == {"image", "text"}
        with pytest.raises(InlayError, match=r"towers='text': the method 'full' does not choose"):
            trained_in(family, method, "text")
        return
    assert trained_in(family, method, "image") == {"image"}
    if method in OF_IMAGES:
        assert trained_in(family, method, "both") == {"image"}
        with pytest.raises(InlayError, match=r"towers='text'.*acts in the tower of images"):
            trained_in(family, method, "text")
    else:
        assert trained_in(family, method, "both") == {"image", "text"}
        assert trained_in(family, method, "text") == {"text"}


@pytest.mark.parametrize("method", REFUSED)
def test_method_that_does_not_fit_is_refused(method: str) -> None:
    model = tiny("clip", "image-text")[0]
    with pytest.raises(InlayError, match=r"CLIPModel.* These work on it: .*lora"):
        attach(model, method)


def test_towers_where_there_are_none_and_both_ways_of_leaving_out() -> None:
    with pytest.raises(InlayError, match=r"towers='image': BertForSequenceClassification has no two towers"):
        in_tower(tiny("bert")[0], get("lora"), {}, "image")
    with pytest.raises(InlayError, match=r"towers='image' leaves out the other tower, and exclude_modules='x'"):
        in_tower(tiny("clip", "image-text")[0], get("lora"), {"exclude_modules": "x"}, "image")
    assert trained_in("clip", "lora", "both", layers=[4]) == {"text"}  # layers go on counting in the tower of texts
