"""A layer of ours inside a model's attention, by way of Transformers' attention interface.

An attention module of Transformers projects queries, keys and values, looks up the function named by its config's
`_attn_implementation` and calls it. What a method does between the projections and the softmax can be done nowhere
else: not by a hook on the projections, whose output is at once reshaped to the number of tokens that came in. So a
layer switches its host's config from, say, `sdpa` to `inlay_e2vpt_sdpa`. The function of that name looks for the
layer on the module, under `inlay_e2vpt`: where there is none, or none of its adapters runs, it is `sdpa`; otherwise
the layer decides what `sdpa` gets, and what becomes of what it gives. The mask function of `sdpa` goes by the
new name too, since masks are looked up by the same string.

Methods stack: `inlay_e2vpt_inlay_ntk_sdpa` asks one layer, then the other, then `sdpa`. Either may leave first. A layer
that computes the attention itself, and so asks nobody behind it, stands innermost whenever it came. Saved configs know
nothing of this: Transformers does not write which implementation runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from inlay.errors import InlayError
from inlay.methods.tuner import ChildLayer

Attend = Callable[..., tuple[Tensor, Tensor | None]]
INTERFACE = "ALL_ATTENTION_FUNCTIONS"

# By the name of an implementation of ours: the child that it asks first, and the implementation behind it.
_OURS: dict[str, tuple[str, str]] = {}


def with_child(implementation: str, child: str, innermost: bool = False) -> str:
    """The name of the implementation that asks the layer under `child` too, registered if it was not.

    That layer is asked first, or, where it is to be `innermost`, after all others.
    """
    if child in children(implementation):
        return implementation
    if innermost and implementation in _OURS:
        first, behind = _OURS[implementation]
        return with_child(with_child(behind, child, innermost), first)
    name = f"{child}_{implementation}"
    if name not in _OURS:
        _OURS[name] = (child, implementation)
        AttentionInterface.register(name, partial(_attention, child, partial(_behind, implementation)))
        if implementation in ALL_MASK_ATTENTION_FUNCTIONS:
            ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    return name


def without_child(implementation: str, child: str) -> str:
    """The name of the implementation that does the same and does not ask the layer under `child`."""
    if implementation not in _OURS:
        return implementation
    first, behind = _OURS[implementation]
    rest = without_child(behind, child)
    return rest if first == child else with_child(rest, first)


def children(implementation: str) -> list[str]:
    """The children that an implementation asks, the first first; none for one of Transformers' own."""
    found = []
    while implementation in _OURS:
        child, implementation = _OURS[implementation]
        found.append(child)
    return found


def behind_all(implementation: str) -> str:
    """The implementation of Transformers' own that runs when every child was asked."""
    while implementation in _OURS:
        implementation = _OURS[implementation][1]
    return implementation


def on_interface(module: nn.Module) -> bool:
    """Whether an attention module looks its function up: MPNet's, DeBERTa's and timm's do not."""
    return _namespace(module) is not None and getattr(module, "config", None) is not None


class AttentionLayer(ChildLayer):
    """A child of an attention module that takes part in its attention; `child` is the attribute it hangs under.

    `innermost` is for a layer that computes the attention itself: there can be one on a host.
    """

    child: ClassVar[str]
    innermost: ClassVar[bool] = False
    implementation: str

    def attach(self) -> None:
        if not on_interface(self.host):
            raise InlayError(
                f"{type(self.host).__name__} does not look its attention function up in Transformers' attention "
                f"interface: {type(self).__name__} cannot take part in it."
            )
        self._seen: str | None = None
        self._ensure(self.host, ())
        self._handle = self.host.register_forward_pre_hook(self._ensure)

    def detach(self) -> None:
        self._handle.remove()
        config = self.host.config
        config._attn_implementation_internal = without_child(config._attn_implementation, self.child)

    def attend(
        self, previous: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The attention of the host, of (batch, heads, tokens, channels); called only while an adapter runs.

        `self.implementation` names what runs behind all layers of ours.
        `previous(self.host, query, key, value, mask, **kwargs)` is what would have been called without this layer. It
        gives the output, as (batch, tokens, heads, channels), and the weights where the implementation has them.
        """
        raise NotImplementedError

    def _ensure(self, host: nn.Module, args: tuple[Any, ...]) -> None:
        """Also before every call: someone may have chosen another implementation since (`set_attn_implementation`)."""
        current = _implementation(host.config)
        if current == self._seen:
            return
        if self.child not in children(current):
            current = with_child(current, self.child, self.innermost)
            host.config._attn_implementation_internal = current
        self._seen, self.implementation = current, behind_all(current)


def _implementation(config: Any) -> Any:
    """What `config._attn_implementation` is; read past the config's own way, which asks twice for every attribute."""
    if torch.compiler.is_compiling():
        return config._attn_implementation
    try:
        return object.__getattribute__(config, "_attn_implementation_internal")
    except AttributeError:
        return config._attn_implementation


def _attention(
    child: str,
    previous: Attend,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    layer: Any = module._modules.get(child)
    if layer is None or not layer.running():
        return previous(module, query, key, value, attention_mask, **kwargs)
    return layer.attend(previous, query, key, value, attention_mask, **kwargs)


def _behind(implementation: str, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    return _function(module, implementation)(module, *args, **kwargs)


def _function(module: nn.Module, implementation: str) -> Attend:
    """What the module itself would have looked up; `eager` is a function of the architecture's own file."""
    namespace = _namespace(module)
    assert namespace is not None
    return namespace[INTERFACE].get_interface(implementation, namespace.get("eager_attention_forward"))


def _namespace(module: nn.Module) -> dict[str, Any] | None:
    for kind in type(module).__mro__:
        namespace = vars(sys.modules[kind.__module__])
        if INTERFACE in namespace:
            return namespace
    return None
