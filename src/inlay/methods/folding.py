"""Methods that change what leaves a module, without a pass over what leaves it: the module computes with other
parameters instead.

A sum of a vector belongs into the bias that the module adds anyway, a product into its weight. This needs to know to
the letter what the module computes, and that nobody else acts in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from inlay.methods.channels import COMPUTED, Computation
from inlay.methods.tuner import ChannelLayer, ChildLayer


class FoldingLayer(ChannelLayer):
    """A `ChannelLayer` that computes its host itself, with its adapters folded into weight and bias.

    It shadows the host's `forward` where the host's class is exactly one of `folds`, no one has shadowed it before
    (Accelerate's hooks, norm tuning), and nothing acts on the host's output already: another child, or a user's hook.
    Elsewhere it acts on the output, by a hook; and so it does in a pass that `folded` declines, whose rows belong to
    different adapters, or in which a child that came later replaces the host.
    """

    folds: ClassVar[Mapping[type, Computation]] = COMPUTED

    def folded(self, host: Any, names: list[str], x: Tensor) -> Tensor | None:
        """The host's output with these adapters in it; None: let the host compute, and `act` on what it gives."""
        raise NotImplementedError

    def attach(self) -> None:
        self._handles = []
        alone = not self.host._forward_hooks and not self._others()
        self._routed = type(self.host) in self.folds and "forward" not in self.host.__dict__ and alone
        if self._routed:
            self.host.forward = self.route
        else:
            super().attach()

    def _others(self) -> list[ChildLayer]:
        return [child for child in self.host.children() if isinstance(child, ChildLayer) and child is not self]

    def share_host(self) -> None:
        """Children that come now act after this one, except for one that replaces the host: a hook is there for it."""
        if self._routed and not self._handles:
            self._handles.append(self.host.register_forward_hook(self.after_another))

    def after_another(self, host: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """The host's forward hook where `route` was passed over, or gave way."""
        return self.after(host, args, output) if self._replaced() else None

    def _replaced(self) -> bool:
        """Whether another child replaces the host in this pass, for some rows at least: this one then acts after it."""
        return bool(self._handles) and any(child.replaces_host() for child in self._others())

    def detach(self) -> None:
        super().detach()
        self._routed = False  # whoever has shadowed `route` since still calls it
        if self.host.__dict__.get("forward") == self.route:
            del self.host.forward

    def route(self, *args: Any, **kwargs: Any) -> Tensor:
        """The host's forward."""
        host = self._host[0]
        if not self._routed or self._replaced():
            return _own_forward(host, *args, **kwargs)
        if self._mixed is not None and self.row_names() is not None:
            return self.after(host, args, _own_forward(host, *args, **kwargs))
        names = self.running()
        found = self.folded(host, names, args[0] if args else next(iter(kwargs.values()))) if names else None
        if found is None:
            found = _own_forward(host, *args, **kwargs)
            for name in names:
                found = self.act(name, found)
        return found


def _own_forward(host: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    found: Tensor = type(host).forward(host, *args, **kwargs)
    return found
