"""inlay: small trained pieces set into large frozen models.

The public names are looked up when they are first used, so that `import inlay` takes no time. Our methods become PEFT's
own as soon as PEFT is imported, before or after this package.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from inlay.methods.register import extend_transformers, register, when_imported

__version__ = "0.2.0"

PUBLIC = {
    "AdapterPool": "inlay.methods.mixture.pool",
    "InlayError": "inlay.errors",
    "LossParts": "inlay.methods.loss_parts",
    "Spec": "inlay.records.spec",
    "anatomy": "inlay.anatomy",
    "compare": "inlay.workflow.compare",
    "compress": "inlay.workflow.compress",
    "embed": "inlay.workflow.embed",
    "evaluate": "inlay.workflow.loaded",
    "lean_loss": "inlay.training.lean_loss",
    "load": "inlay.workflow.loaded",
    "load_backbone": "inlay.backbones.loading",
    "merge": "inlay.workflow.merge",
    "pull": "inlay.workflow.pull",
    "push": "inlay.workflow.push",
    "mix": "inlay.methods.mixture.lora",
    "predict": "inlay.workflow.predict",
    "rounded_once": "inlay.training.precision",
    "tune": "inlay.workflow.tune",
    "unmix": "inlay.methods.mixture.lora",
}


class _Package(ModuleType):
    """Keeps `inlay.anatomy` the function: importing the module of that name would otherwise put itself in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in PUBLIC and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
# At once where they are already: our modules are imported then, after the line above.
when_imported("peft", register)
when_imported("transformers.integrations.peft", extend_transformers)


def __getattr__(name: str) -> Any:
    if name in PUBLIC:
        value = getattr(importlib.import_module(PUBLIC[name]), name)
    elif name in (paths := _configs()):
        # PEFT first: once it is here the methods are registered, and their modules are whole.
        importlib.import_module("peft")
        value = getattr(importlib.import_module(paths[name]), name)
    else:
        raise AttributeError(f"module 'inlay' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({"__version__", *PUBLIC, *_configs()})


def _configs() -> dict[str, str]:
    """The config classes of inlay's own methods: name and module."""
    from inlay.methods.registry import all_methods

    paths = (method.config for method in all_methods().values() if method.config and method.tuner)
    return {name: module for module, _, name in (path.partition(":") for path in paths)}
