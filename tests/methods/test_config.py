"""What a config refuses before a model is touched: values of the wrong type, which the command line can hand over."""

from __future__ import annotations

from typing import Any

import pytest

import inlay
from inlay.errors import InlayError


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        ("ActivationPromptConfig", {"per_position": "no"}, "per_position='no' will not do: give true or false"),
        ("ActivationPromptConfig", {"length": "many"}, "length='many' will not do: give a whole number"),
        ("VisualPromptConfig", {"kind": "pad", "width": "abc"}, "width='abc' will not do: give a whole number"),
        ("VPTConfig", {"deep": 1}, "deep=1 will not do: give true or false"),
        ("AdaptFormerConfig", {"scale": "big"}, "scale='big' will not do: give a number"),
        ("AdaptFormerConfig", {"bottleneck": True}, "bottleneck=True will not do: give a whole number"),
    ],
)
def test_refuses_a_value_of_another_type(config: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InlayError) as caught:
        getattr(inlay, config)(**settings)
    assert words in str(caught.value)


def test_takes_whole_numbers_for_numbers_and_tuples_for_lists() -> None:
    assert inlay.AdaptFormerConfig(scale=1).scale == 1
    assert inlay.ActivationPromptConfig(layers=(3,)).layers == [3]
    assert inlay.NormTuningConfig(layers=(1, 2)).layers == (1, 2)
