"""A prompt at the input of one module (activation prompts, section 3)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from inlay.methods.activation_prompt.templates import TEMPLATES, Place
from inlay.methods.tuner import HookedLayer, on_first_tensor


class PromptLayer(HookedLayer):
    """Prompts what enters its host, block `l` of the model or its stem (`l = 0`):

        z^(l) <- g(z^(l), delta^(l)),      for example  z^(l) + delta^(l),

    with the same `delta^(l)` for every input. The templates `g` are in templates.py. Nothing before the host enters the
    autograd graph, since nothing there is trained.
    """

    def __init__(self, host: nn.Module) -> None:
        super().__init__(host)
        setattr(self, self.adapter_layer_names[0], nn.ModuleDict())

    @property
    def prompts(self) -> nn.ModuleDict:
        """What is trained, by adapter; the name that it is saved under is the method's own."""
        return getattr(self, self.adapter_layer_names[0])

    def update_layer(self, adapter_name: str, config: Place) -> None:
        # Made in place: on the meta device nothing can be moved, only made.
        own = next((p for p in self.host.parameters() if p.is_floating_point()), None)
        where = {} if own is None else {"device": own.device, "dtype": own.dtype}
        self.prompts[adapter_name] = TEMPLATES[config.kind](config, **where)
        if config.last is not None and len(self._handles) == 1:
            self._handles.append(config.last.register_forward_hook(self.drop))

    def before(
        self, host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The host's forward pre-hook."""
        names = self.running()
        return on_first_tensor(lambda z: self.prompted(z, names), args, kwargs) if names else None

    def prompted(self, z: Tensor, names: list[str]) -> Tensor:
        """`g(z, delta)`, for one adapter after the other."""
        for name in names:
            z = self.prompts[name](z)
        return z

    def drop(self, last: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """The last block's forward hook: what comes after must not pool the prompt's tokens."""
        added = sum(self.prompts[name].tokens for name in self.running())
        if not added:
            return None
        if isinstance(output, tuple):
            return (output[0][:, :-added], *output[1:])
        return output[:, :-added]


class ActivationPromptLayer(PromptLayer):
    """The prompts of `activation-prompt` at one place."""

    adapter_layer_names = ("inlay_activation_delta",)
