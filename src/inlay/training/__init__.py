"""The Trainer glue: see fitting.py. Imported lazily, since it brings torch and Transformers along."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inlay.training.evaluation import evaluate, predict
    from inlay.training.fitting import FitOptions, FitResult, fit
    from inlay.training.progress import Interrupted

__all__ = ["FitOptions", "FitResult", "Interrupted", "evaluate", "fit", "predict"]

_PLACES = {
    "FitOptions": "fitting",
    "FitResult": "fitting",
    "Interrupted": "progress",
    "evaluate": "evaluation",
    "fit": "fitting",
    "predict": "evaluation",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"inlay.training.{_PLACES[name]}"), name)
