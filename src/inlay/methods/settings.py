"""Settings of a method, checked before there is a model: a name that the method does not have, a value that cannot be.

What depends on the model (which modules there are, how many layers) is found when the method is put into it. PEFT's own
configs take any value and fail later, or train with it; what their annotations say is checked here.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from peft import PeftConfig

from inlay.errors import InlayError, first_line, unknown
from inlay.methods.config import in_words, is_a
from inlay.methods.patterns import check_patterns
from inlay.methods.registry import Method
from inlay.methods.targets import ALL_LINEAR

# Set by inlay, or by PEFT; never a setting of the user's.
RESERVED = {entry.name for entry in fields(PeftConfig)} | {"newly_initialised", "pooling", "resolved"}
# Of PEFT's configs: what counts something, and must be 1 at least; what is a share.
_COUNTS = {
    *("r", "num_virtual_tokens", "encoder_hidden_size", "encoder_num_layers", "token_dim", "num_layers"),
    *("num_attention_heads", "num_transformer_submodules", "qalora_group_size"),
}
_SHARES = {"lora_dropout", "vera_dropout", "encoder_dropout"}
# What people call settings, and what configs call them.
ALSO_CALLED = {
    "rank": ("r", "rank"),
    "lora_r": ("r",),
    "alpha": ("lora_alpha",),
    "dropout": ("lora_dropout", "dropout"),
    "tokens": ("num_virtual_tokens", "tokens"),
    "modules": ("target_modules",),
    "targets": ("target_modules",),
}
_ANY_NUMBER = {"lora_alpha"}  # annotated as a whole number, and none has to be


def check_settings(method: Method, settings: Mapping[str, Any]) -> None:
    """An error for settings that the method cannot have, whatever the model."""
    if not settings:
        return
    if method.config is None:
        raise InlayError(f"Method {method.name!r} has no settings; got {', '.join(sorted(settings))}.")
    config_class = method.config_class()
    names = {entry.name for entry in fields(config_class) if entry.init}
    allowed = (names - RESERVED) | ({"layers"} if method.takes("layers") else set())
    if settings.get("megatron_config"):
        raise InlayError("megatron_config is for models of Megatron, which inlay does not load: leave it out.")
    for name in settings:
        if name not in allowed:
            meant = [each for each in ALSO_CALLED.get(name.casefold(), ()) if each in allowed]
            if meant:
                raise InlayError(
                    f"Unknown setting of method {method.name!r} {name!r}. {name} is called {meant[0]!r} here. "
                    f"Known: {', '.join(sorted(allowed))}."
                )
            raise unknown(f"setting of method {method.name!r}", name, allowed)
    hints = {"layers": list[int] | None, **get_type_hints(config_class)}
    for name, value in settings.items():
        hint = int | float if name in _ANY_NUMBER else hints[name]
        if not is_a(value, hint):
            raise InlayError(f"{name}={value!r} will not do: give {in_words(hint)}.")
        if method.tuner is None and value is not None:
            _check_range(method, name, value)
    _check_patterns(method, settings)
    given = {**method.hooks.stand_ins, **method.settings, **settings}
    if given.get("target_modules") == ALL_LINEAR:
        del given["target_modules"]  # names, by the time PEFT sees it with a choice of layers, which it refuses here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is made again, with the model, and says then what it has to say
        make_config(method, {name: value for name, value in given.items() if name in names})


def make_config(method: Method, given: Mapping[str, Any], **more: Any) -> PeftConfig:
    """The method's config; an error where it refuses its values."""
    try:
        return method.config_class()(**given, **more)
    except InlayError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, re.error) as error:
        raise InlayError(f"Settings {dict(given)!r} do not fit method {method.name!r}: {first_line(error)}") from error


def _check_patterns(method: Method, settings: Mapping[str, Any]) -> None:
    """Regular expressions can be matched, in good time, and what they stand for is a rank or a scale."""
    check_patterns(settings, (), f"Method {method.name!r}")
    for name in ("rank_pattern", "alpha_pattern"):
        for pattern, value in (settings.get(name) or {}).items():
            if name == "rank_pattern" and (not is_a(value, int) or value < 1):
                raise InlayError(f"{name} has {value!r} for {pattern!r}: a rank is a whole number from 1.")
            if not is_a(value, float):
                raise InlayError(f"{name} has {value!r} for {pattern!r}: give a number.")


def _check_range(method: Method, name: str, value: Any) -> None:
    if name in _COUNTS and value < 1:
        raise InlayError(f"{name}={value!r} leaves {method.name} nothing to train: give a whole number from 1.")
    if name in _SHARES and not 0 <= value < 1:
        raise InlayError(f"{name}={value!r} will not do: give a share from 0 to less than 1.")
