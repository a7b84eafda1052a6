"""How many parameters there are and how many train, by the true tensors; bytes of what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

SHADOWED = "original_module"  # PEFT keeps the untrained original beside the copy that it trains and uses


def parameters(model: nn.Module) -> dict[str, Any]:
    """Trained and total parameters of an adapted model; a tied tensor counts once, a head that a trained copy has
    replaced does not count."""
    used = {id(parameter): parameter for name, parameter in model.named_parameters() if SHADOWED not in name.split(".")}
    total = sum(parameter.numel() for parameter in used.values())
    trained = sum(parameter.numel() for parameter in used.values() if parameter.requires_grad)
    return {"trained": trained, "total": total, "share": trained / total if total else 0.0}


def saved_bytes(folder: Path) -> int:
    """Bytes on disk of everything saved in `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
