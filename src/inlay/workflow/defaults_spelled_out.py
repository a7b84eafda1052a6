"""A run whose defaults are spelled out is the run without: `--layers 3` where a method takes layer 3 by itself,
`--set r=8` where r is 8, `--image-size 224` where the model reads 224, `--label class` where no other column could be
meant.

Only what a run is found by is changed; its spec says what was typed. A run that an earlier inlay made from the same
words is still found by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from inlay import backbones
from inlay.errors import InlayError
from inlay.methods import registry
from inlay.records.spec import Spec
from inlay.tasks import Task

_NOTHING: Mapping[str, Any] = {"label": None, "image": None, "text": (), "kind": None}


def without_defaults(spec: Spec, tasks: Mapping[str, Task]) -> Spec:
    """The spec without what it would be without."""
    if not spec.tasks and spec.data is not None:
        (task,) = tasks.values()
        spec = spec.with_(**{name: _NOTHING[name] for name in task.spelled_out})
    if spec.image_size is not None and backbones.own_side(spec.model, spec.revision) == spec.image_size:
        spec = spec.with_(image_size=None)
    settings = {name: value for name, value in spec.settings.items() if not _is_default(spec, name, value)}
    return spec.with_(settings=settings) if len(settings) < len(spec.settings) else spec


def _is_default(spec: Spec, name: str, value: Any) -> bool:
    method = registry.get(spec.method)
    if method.config is None or value is None:
        return False
    if name == "layers":
        return value == _layers(spec)
    if name in method.settings:
        return bool(method.settings[name] == value)
    if method.defaults is not None:  # a function of the model gives others than the config's own
        return False
    for entry in fields(method.config_class()):
        if entry.name == name and entry.default is not MISSING:
            return bool(entry.default == value) and type(entry.default) is type(value)
    return False


def _layers(spec: Spec) -> list[int] | None:
    """The layers that the method takes by itself in this model, as far as its config alone tells."""
    from inlay.anatomy import anatomy
    from inlay.backbones.skeleton import load_skeleton
    from inlay.methods.protocol import ConfigHooks

    hooks = registry.get(spec.method).hooks
    if hooks.auto_layers.__func__ is ConfigHooks.auto_layers.__func__:  # type: ignore[attr-defined]
        return None
    try:
        return hooks.auto_layers(anatomy(load_skeleton(spec.model, spec.revision)))
    except InlayError:
        return None
