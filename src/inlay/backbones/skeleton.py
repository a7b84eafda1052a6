"""A model without its weights: what its modules are called and how large they are, from its config alone."""

from __future__ import annotations

from typing import Any

from inlay.backbones.locate import find
from inlay.console import quiet
from inlay.errors import InlayError, first_line


def count_parameters(name: str, revision: str | None = None) -> int:
    """The parameters of the model called `name` without a head, tied ones once; 0 where that cannot be found out
    without its own code."""
    try:
        return sum(parameter.numel() for parameter in load_skeleton(name, revision).parameters())
    except InlayError:
        return 0


def load_skeleton(
    name: str, revision: str | None = None, auto_class: str = "AutoModel", num_labels: int | None = None
) -> Any:
    """The model called `name`, on the device `meta`. No code of its own is run."""
    import torch
    import transformers

    place = find(name, revision)
    try:
        config = transformers.AutoConfig.from_pretrained(place.path, trust_remote_code=False, **place.arguments)
        if num_labels is not None:
            config.num_labels = num_labels
        with torch.device("meta"), quiet():
            return getattr(transformers, auto_class).from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError, TypeError, RuntimeError) as error:
        raise InlayError(f"{name!r} cannot be built from its config.json: {first_line(error)}") from error
