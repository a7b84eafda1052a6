"""What stands in LoRA's place: a config of ours for every LoRA that PEFT's tests are parametrised with.

PEFT's tests start an adapter that does something with `init_weights=False`; ours have no such setting, and start as the
base model. A stand-in has it: its adapter is stirred when it has been put in. It is saved without that setting, and so
loads as the config that users have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from peft import LNTuningConfig, LoraConfig, PeftConfig

from inlay.methods import registry
from inlay.methods.config import InlayConfig

CONTROL = "lora"
KEPT = ("target_modules", "exclude_modules", "modules_to_save", "task_type", "inference_mode")
IDENTITY = ("init_weights", "init_lora_weights")
STIRRED = 0.1


def methods() -> list[str]:
    """The methods that can stand in LoRA's place, and LoRA itself, by which the harness is checked."""
    return [CONTROL, *(name for name, method in registry.all_methods().items() if method.tuner is not None)]


class StandIn:
    """The config class of one method as PEFT's tests are given it."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.control = method == CONTROL
        # Norms stand where PEFT tunes norms: LoRA's rows name linear layers.
        self.takes: tuple[type[PeftConfig], ...] = (LNTuningConfig, LoraConfig) if method == "norm" else (LoraConfig,)
        self.plain: type[PeftConfig] = LoraConfig if self.control else registry.get(method).config_class()
        self.config: type[PeftConfig] = LoraConfig if self.control else _stirred(registry.get(method))

    def is_ours(self, value: Any) -> bool:
        """Whether a parameter of a test is this stand-in, or made of it."""
        return any(_is(value, kind) for kind in (self.config, self.plain))

    def rows(
        self, names: Iterable[str], values: Iterable[Any], more: Mapping[str, Any], plain: bool
    ) -> list[Any] | None:
        """The values of a parametrisation with ours in the place of LoRA's, each once; None where there is none.

        `more` are settings beside LoRA's; `plain`: with the method's own config, and no stand-in for it.
        """
        values, self._more, self._kind = list(values), more, self.plain if plain else self.config
        for kind in self.takes:
            found = [row for row in values if any(_is(cell, kind) for cell in _cells(row))]
            if found:
                return found if self.control else _each_once(self._row(list(names), row, kind) for row in found)
        return None

    def _row(self, names: list[str], row: Any, kind: type[PeftConfig]) -> Any:
        if not isinstance(row, (tuple, list)):
            return self._cell("", row, kind)
        return tuple(self._cell(name, cell, kind) for name, cell in zip(names, row, strict=True))

    def _cell(self, name: str, cell: Any, kind: type[PeftConfig]) -> Any:
        if cell is kind:
            return self._kind
        if type(cell) is kind:
            return self._kind(**self.settings(vars(cell)))
        if isinstance(cell, Mapping) and "kwargs" in name:
            return self.settings(cell)
        return self.method if name == "tuner_method" else cell

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What of LoRA's settings any method has, and whether the adapter is to do something from the start."""
        kept = {name: given[name] for name in KEPT if given.get(name) is not None}
        if any(given.get(name) is False for name in IDENTITY):
            kept["init_weights"] = False
        return kept | self._more

    def stir_what_is_put_in(self) -> None:
        """From now on an adapter whose config says `init_weights=False` does something from the start."""
        if self.control:
            return
        kind: Any = registry.get(self.method).tuner_class()
        original = kind.inject_adapter

        def inject_adapter(tuner: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
            original(tuner, model, adapter_name, *args, **kwargs)
            if getattr(tuner.peft_config[adapter_name], "init_weights", True):
                return
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    own = f".{adapter_name}." in f"{name}." and tuner.prefix in name
                    if own and not parameter.is_meta and parameter.is_floating_point():
                        parameter.add_(torch.randn_like(parameter), alpha=STIRRED)

        kind.inject_adapter = inject_adapter


def _stirred(method: registry.Method) -> type[PeftConfig]:
    base = method.config_class()
    assert issubclass(base, InlayConfig)
    fixed = dict(method.settings)

    def to_dict(self: Any) -> dict[str, Any]:
        data = super(made, self).to_dict()
        del data["init_weights"]
        return data

    def __post_init__(self: Any) -> None:
        for name, value in fixed.items():
            setattr(self, name, value)
        super(made, self).__post_init__()

    fields = [("init_weights", bool, dataclasses.field(default=True))]
    made = dataclasses.make_dataclass(
        base.__name__, fields, bases=(base,), namespace={"to_dict": to_dict, "__post_init__": __post_init__}
    )
    made.__module__, made.__qualname__ = __name__, base.__name__
    globals()[base.__name__] = made  # so that it can be pickled
    return made


def _cells(row: Any) -> tuple[Any, ...]:
    return tuple(row) if isinstance(row, (tuple, list)) else (row,)


def _is(cell: Any, kind: type) -> bool:
    return cell is kind or type(cell) is kind


def _each_once(rows: Iterable[Any]) -> list[Any]:
    """Less the rows that differed in LoRA's own settings alone."""
    found: dict[str, Any] = {}
    for row in rows:
        told = [cell for cell in _cells(row) if not isinstance(cell, str) or len(_cells(row)) == 1]
        models = [cell for cell in _cells(row)[1:] if isinstance(cell, str)]
        found.setdefault(repr((told, models)), row)
    return list(found.values())
