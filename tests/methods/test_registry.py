"""The registry: folders are methods, and every entry is complete."""

from __future__ import annotations

import pytest

from inlay.errors import InlayError
from inlay.methods.registry import all_methods, get


@pytest.mark.parametrize("method", all_methods().values(), ids=lambda method: method.name)
def test_entries_are_complete(method) -> None:
    assert method.summary.endswith(".")
    assert "http" in method.paper
    assert method.learning_rate in method.grid or min(method.grid) < method.learning_rate < max(method.grid)
    assert list(method.grid) == sorted(method.grid)
    if method.form == "peft":
        assert method.config_class().__name__.endswith("Config")
    else:
        with pytest.raises(InlayError, match="no config"):
            method.config_class()
    if method.tuner is not None:
        assert method.tuner_class().prefix == method.parameter_prefix
        assert method.peft_type.startswith("INLAY_")
    else:
        with pytest.raises(InlayError, match="no tuner"):
            method.tuner_class()


def test_names_that_are_not_methods_are_refused_with_the_nearest() -> None:
    with pytest.raises(InlayError, match=r"Did you mean 'lora'"):
        get("lorra")
