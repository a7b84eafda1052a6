"""Which modules train and which stand still.

A frozen model is a fixed function: its dropout does nothing, its batch norms keep their statistics, attention drops no
weights. So everything that the base model brought along is in eval mode while a method trains, and what the method
added (adapters with their own dropout, copies of heads) or loading left uninitialised (a head) is in train mode, with
the dropout that stands outside the body, in front of the head. What loading left uninitialised and the method does not
train (BERT's pooler, where a method has a head of its own) stands still like the rest. A batch norm moves its
statistics only inside such a new head. `full` trains everything, statistics included.

Transformers checkpoints activations of a `GradientCheckpointingLayer` only while the layer itself is in train mode,
and some layers pass that same flag to a functional dropout. So a checkpointed layer is in train mode when it is called
and in eval mode while it computes, in the first pass and in the recomputation alike: see `inlay.frozen`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase as BatchNorm
from transformers.modeling_layers import GradientCheckpointingLayer

from inlay.errors import InlayError
from inlay.frozen import compute_in_eval_mode
from inlay.methods.protocol import hooks_of


class Modes:
    """The modes of a model's modules: made before a method is attached, told of the adapted model after.

    `new` names the modules that loading left uninitialised; `whole` says that everything trains.
    """

    def __init__(self, base: nn.Module, *, new: Iterable[str], whole: bool) -> None:
        self._base = base
        self._left_uninitialised = [base.get_submodule(name) for name in new]
        self._new = {inner for module in self._left_uninitialised for inner in module.modules()}
        body = getattr(base, getattr(base, "base_model_prefix", ""), base)
        inside = set(body.modules())
        before_the_head = {module for module in base.modules() if module not in inside and not _has_parameters(module)}
        self._frozen = set() if whole else set(base.modules()) - self._new - before_the_head
        self._whole = whole
        self.checkpoints = False
        self._checkpointed: list[nn.Module] = []
        self._used_cache = getattr(getattr(base, "config", None), "use_cache", None)
        self._undo: list[Callable[[], None]] = []
        self.model = base

    def adapt(self, model: nn.Module) -> None:
        """Take note of what the method attached: `model` is the base model with it, or around it."""
        self.model = model
        if self._whole:
            return
        wrappers = [m for m in model.modules() if isinstance(getattr(m, "modules_to_save", None), nn.ModuleDict)]
        replaced = {inner for wrapper in wrappers for inner in wrapper.original_module.modules()}
        copies = {inner for wrapper in wrappers for inner in wrapper.modules_to_save.modules()}
        untrained = {
            inner
            for module in self._left_uninitialised
            if _has_parameters(module) and not any(parameter.requires_grad for parameter in module.parameters())
            for inner in module.modules()
        }
        self._new = (self._new - replaced - untrained) | copies
        norms = {module for module in model.modules() if isinstance(module, BatchNorm)}
        self._frozen |= replaced | untrained | (norms - self._new)

    def train(self) -> None:
        """Set every module's mode for training."""
        self.model.train()
        for module in self._frozen:
            module.training = False
        for module in self._checkpointed:
            module.training = True

    def why_not_checkpoint(self) -> str | None:
        """Why activations cannot be recomputed, and what to do, in words; None where they can."""
        if not getattr(self._base, "supports_gradient_checkpointing", False):
            return (
                f"{type(self._base).__name__} does not support gradient checkpointing. Leave it out, and use a smaller "
                "batch or more gradient accumulation to save memory."
            )
        if not all(hooks_of(config).recomputable for config in getattr(self.model, "peft_config", {}).values()):
            return (
                "Gradient checkpointing drops the keys and values that prefix tuning passes to the layers. Leave it "
                "out, or choose another method."
            )
        return None

    def checkpoint(self) -> None:
        """Recompute activations in the backward pass instead of keeping them."""
        if (why := self.why_not_checkpoint()) is not None:
            raise InlayError(why)
        self.checkpoints = True
        self._base.gradient_checkpointing_enable({"use_reentrant": False})
        # Transformers makes the embeddings' output require a gradient, which only the reentrant kind needs: here it
        # would pull the frozen trunk below the first trained piece into the graph.
        self._base.disable_input_require_grads()
        # A recomputed layer would put its keys into the cache a second time. Models switch the cache off when they
        # checkpoint, but only in train mode.
        self._base.config.use_cache = False
        self._checkpointed = [module for module in self._base.modules() if _checkpoints(module)]
        for module in self._checkpointed:
            if isinstance(module, GradientCheckpointingLayer) and module in self._frozen:
                self._undo.append(compute_in_eval_mode(module))

    def trained_tensors(self) -> dict[str, Tensor]:
        """All that training changes: the trained parameters, and the statistics of batch norms that move."""
        tensors: dict[str, Tensor] = {
            name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad
        }
        return tensors | self.statistics()

    def statistics(self) -> dict[str, Tensor]:
        """The statistics of batch norms that move: every forward pass in train mode changes them."""
        return {
            f"{name}.{key}": buffer
            for name, module in self.model.named_modules()
            if isinstance(module, BatchNorm) and module not in self._frozen
            for key, buffer in module.named_buffers(recurse=False)
        }

    def close(self) -> None:
        """Remove the hooks and leave the model as it is used after training: in eval mode."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        if self._checkpointed:
            self._base.gradient_checkpointing_disable()
            self._checkpointed.clear()
        if self._used_cache is not None:  # the Trainer switches it off
            self._base.config.use_cache = self._used_cache
        self.model.eval()


def _checkpoints(module: nn.Module) -> bool:
    """Whether a module checkpoints: by itself, or by calling the function in its own loop over layers of another kind.
    Many a stack still has the flag from the time before its layers did it."""
    if not getattr(module, "gradient_checkpointing", False):
        return False
    return isinstance(module, GradientCheckpointingLayer) or not any(
        isinstance(inner, GradientCheckpointingLayer) for inner in module.modules()
    )


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
