"""What stands still in a model while a method trains: which modules compute in eval mode, and which stay as they are.

A frozen layer that recomputes its activations is in train mode when it is called, because Transformers checkpoints only
such layers, and in eval mode while it computes: `compute_in_eval_mode`. Who needs to know asks `stands_still`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_IN_EVAL_MODE = "_inlay_computes_in_eval_mode"
_unchanging: WeakKeyDictionary[nn.Module, object] = WeakKeyDictionary()


def stands_still(module: nn.Module) -> bool:
    """Whether a module, not what is in it, computes in eval mode, whatever mode it seems to be in."""
    return not module.training or getattr(module, _IN_EVAL_MODE, False)


def compute_in_eval_mode(layer: nn.Module) -> Callable[[], None]:
    """Let a layer be in eval mode while it computes, in the first pass and when it is recomputed; how to undo that."""
    modes: list[bool] = []

    def enter(module: nn.Module, args: Any) -> None:
        modes.append(module.training)
        module.training = False

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        module.training = modes.pop()

    handles = [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave, always_call=True)]
    setattr(layer, _IN_EVAL_MODE, True)

    def undo() -> None:
        for handle in handles:
            handle.remove()
        delattr(layer, _IN_EVAL_MODE)

    return undo


@contextmanager
def unchanging(model: nn.Module) -> Iterator[None]:
    """Inside, it is promised that the frozen modules of a model stay as they are: which there are, their weights and
    their modes. Who depends on that need not look again in every step, which takes time."""
    promise, modules = object(), list(model.modules())
    _unchanging.update(dict.fromkeys(modules, promise))
    try:
        yield
    finally:
        for module in modules:
            _unchanging.pop(module, None)


def promise_of(module: nn.Module) -> object | None:
    """The promise under which a module stands, a new one each time; None: anything may change."""
    return _unchanging.get(module)
