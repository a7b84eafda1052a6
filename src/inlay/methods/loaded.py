"""A parameter that checks what is loaded into it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from inlay.errors import InlayError


class LoadedParameter(nn.Module):
    """One parameter; what is loaded into it must fit and be finite."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self) -> Tensor:
        return self.weight

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        found = state_dict.get(f"{prefix}weight")
        if found is not None and found.shape != self.weight.shape:
            raise InlayError(
                f"{prefix}weight has shape {list(found.shape)}, and this model needs {list(self.weight.shape)}: the "
                "adapter was trained on a model with heads of another size or number. Load it into that one."
            )
        if found is not None and not found.is_meta and not torch.isfinite(found).all():
            raise InlayError(f"{prefix}weight holds values that are not finite. Train the adapter again.")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
