"""What inlay's own methods share: a tuner that attaches children, and the child.

A method attaches a child to the module it adapts and never puts a wrapper around it: the names of everything else
stay as they were, so that a LoRA can be added before or after, and each reloads without the other. The child hangs on
the innermost module (below a LoRA's wrapper, if there is one), and a saved key names that module as the plain model
does: `...query.inlay_bias_delta.weight`, whatever stood around `query` when it was saved.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from peft import PeftConfig, PeftModel
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_target_module_exists
from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND as ALL_LINEAR
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.pytorch_utils import Conv1D

from inlay.anatomy import in_backbone
from inlay.backbones.pooled import installed
from inlay.backbones.quantised import kind_of
from inlay.errors import InlayError, listed
from inlay.methods.channels import widths
from inlay.methods.config import InlayConfig
from inlay.methods.heads import newly_initialised
from inlay.methods.mixing import MixedRows, batch_of, check_names, for_every_sequence, mixed_pass, other_length
from inlay.methods.plain import base_of, plain_modules, plain_name
from inlay.methods.pooling_notes import agree_on_pooling
from inlay.methods.protocol import LayerHooks, TunerHooks
from inlay.methods.targets import in_layers

LOW_PRECISION = (torch.float16, torch.bfloat16)
# What PEFT trains whole for a task, wherever it finds it, after an adapter was put in.
TRAINED_WITH = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}


class ChildLayer(LayerHooks, MixedRows, nn.Module, BaseTunerLayer):
    """A tuner layer that is a child of the module it adapts, its host.

    `adapter_layer_names` are the containers of what adapters train, a `ModuleDict` each, the first of them `pieces`.
    The host is kept in a tuple, which hides it from `nn.Module`: parent and child would otherwise contain each other.
    """

    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        for container in self.adapter_layer_names:
            setattr(self, container, nn.ModuleDict())
        self._host = (host,)
        self._active_adapter: list[str] | str = []
        self.merged_adapters: list[str] = []
        self._unmerged: dict[str, Tensor] = {}  # what the host had before the first adapter was merged
        self._insists: RemovableHandle | None = None

    @property
    def host(self) -> nn.Module:
        """The module that this child adapts."""
        return self._host[0]

    @property
    def pieces(self) -> nn.ModuleDict:
        """The adapters' pieces by name."""
        # Not by getattr: this is asked for in every pass of every layer.
        found: Any = self._modules[self.adapter_layer_names[0]]
        return found

    def base_parameters(self) -> Iterator[nn.Parameter]:
        """The host's own parameters, and not those that adapters have hung on it."""
        for _, module in plain_modules(self.host):
            yield from (parameter for parameter in module._parameters.values() if parameter is not None)

    def get_base_layer(self) -> nn.Module:
        """The host: PEFT reads the device and the dtype of its weight."""
        return self.host

    @property
    def in_features(self) -> int | None:
        """How many channels enter the host."""
        return widths(self.host)[0]

    @property
    def out_features(self) -> int | None:
        """How many channels leave the host."""
        return widths(self.host)[1]

    def running(self) -> list[str]:
        """The adapters that take part in a forward pass of this layer."""
        if self._disable_adapters or self.merged_adapters:
            return []
        active, known = self._active_adapter, self.pieces._modules
        return [name for name in ([active] if isinstance(active, str) else active) if name in known]

    def insist(self) -> None:
        """See to it that the host is called. In eval mode an encoder layer of torch's computes from the weights of its
        modules, past their `forward`, unless one of them has a hook: here is one that does nothing."""
        self._insists = self.host.register_forward_pre_hook(_pass)

    def leave(self) -> None:
        """Take off everything that is not the host's own."""
        self.detach()
        if self._insists is not None:
            self._insists.remove()

    def share_host(self) -> None:
        """Another child is about to be attached to the same host."""

    def replaces_host(self) -> bool:
        """Whether this child computes in place of its host now, past whoever shadowed the host's forward before it."""
        return False

    def enable_adapters(self, enabled: bool) -> None:
        """A merged adapter lies in the host, where disabling would not reach it: it is taken out first."""
        if not enabled and self.merged:
            self.unmerge()
        super().enable_adapters(enabled)

    def merge_values(self, adapter_name: str, values: Mapping[str, Tensor], *, safe: bool) -> None:
        """Give the host these values of its parameters, in which an adapter is merged; if `safe`, finite ones only."""
        if safe and not all(torch.isfinite(value).all() for value in values.values()):
            raise InlayError(f"Adapter {adapter_name!r} holds values that are not finite: it was not merged.")
        for key, value in values.items():
            parameter = self.host.get_parameter(key)
            self._unmerged.setdefault(key, parameter.data)
            parameter.data = value.to(parameter.dtype)
        self.merged_adapters.append(adapter_name)

    def unmerge(self) -> None:
        """Give the host back what it had, to the bit."""
        for key, value in self._unmerged.items():
            parameter = self.host.get_parameter(key)
            parameter.data = value.to(parameter)  # moved or cast since, perhaps
        self._unmerged.clear()
        self.merged_adapters.clear()


def _pass(host: nn.Module, args: tuple[Any, ...]) -> None:
    """The hook that does nothing."""


class HookedLayer(ChildLayer):
    """A child that acts on what enters its host (`before`), on what leaves it (`after`), or on both."""

    def attach(self) -> None:
        kind = type(self)
        self._handles: list[RemovableHandle] = []
        if kind.before is not HookedLayer.before:
            self._handles.append(self.host.register_forward_pre_hook(self.before, with_kwargs=True))
        if kind.after is not HookedLayer.after:
            self._handles.append(self.host.register_forward_hook(self.after))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    def before(self, host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The host's forward pre-hook: new `(args, kwargs)`, or None to leave them."""
        raise NotImplementedError

    def after(self, host: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """The host's forward hook: a new output, or None to leave it."""
        raise NotImplementedError


class ChannelLayer(HookedLayer):
    """A child that changes what leaves its host, each row by itself; several adapters act one after the other."""

    mixes = True

    def act(self, adapter_name: str, output: Tensor) -> Tensor:
        """What an adapter makes of the host's output."""
        raise NotImplementedError

    def after(self, host: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """The host's forward hook."""
        names = self.row_names()
        if names is not None and not self.disable_adapters:
            return self.by_row(names, output, output, self.act, self.pieces)
        for name in self.running():
            output = self.act(name, output)
        return output


def check_free(model: nn.Module, adapter_name: str) -> None:
    """An error for the name of an adapter that the model has already."""
    existing = getattr(model, "peft_config", None) or {}
    if adapter_name in existing:
        raise InlayError(
            f"The model already has an adapter called {adapter_name!r} ({existing[adapter_name].peft_type.value}). "
            "Give this one another adapter_name, or unload() that one first."
        )


def on_first_tensor(
    change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with its first tensor changed: the features that enter a block, a stem or a projection."""
    for position, value in enumerate(args):
        if isinstance(value, Tensor):
            return (*args[:position], change(value), *args[position + 1 :]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            return args, {**kwargs, name: change(value)}
    raise InlayError("A module was called without a tensor: there is nothing to adapt.")


class InlayTuner(TunerHooks, BaseTuner):
    """A `BaseTuner` whose layers are children; a method says what it adapts and with which layer (`TunerHooks`)."""

    target_module_mapping: ClassVar[dict[str, list[str]]] = {}

    def __init__(self, model: nn.Module, peft_config: Any, adapter_name: str, **kwargs: Any) -> None:
        if isinstance(model, PeftModel):
            raise InlayError(
                f"{type(self).__name__} goes beside other adapters, not around them: PEFT could not load it again. "
                "Give get_peft_model the model.get_base_model(), and an adapter_name of its own."
            )
        check_free(model, adapter_name)
        super().__init__(model, peft_config, adapter_name, **kwargs)

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """The config that was given is filled in, and is the adapter's."""
        config = self.peft_config[adapter_name]
        config.belong_to(self, adapter_name)
        in_use = {
            module: name
            for module in model.modules()
            if isinstance(module, ModulesToSaveWrapper)
            for name in module.active_adapters[:1]
        }
        with config.filling_in(), warnings.catch_warnings():
            # They were left out when the names were looked up.
            warnings.filterwarnings("ignore", message="You have passed exclude_modules")
            super().inject_adapter(model, adapter_name, *args, **kwargs)
        if adapter_name in self.active_adapters:
            self._go_on_with_heads(adapter_name, in_use)

    def _go_on_with_heads(self, adapter_name: str, in_use: dict[ModulesToSaveWrapper, str]) -> None:
        """Beside another adapter that has trained a head, begin from that head: PEFT would return to the untrained one,
        and leave the new adapter's frozen."""
        for wrapper, name in in_use.items():
            if name != adapter_name and adapter_name in wrapper.modules_to_save:
                heads = wrapper.modules_to_save
                heads[adapter_name].load_state_dict(heads[name].state_dict())
                heads[name].requires_grad_(False)
                wrapper.set_adapter(adapter_name, inference_mode=self.peft_config[adapter_name].inference_mode)

    def _prepare_adapter_config(self, peft_config: InlayConfig, model_config: dict[str, Any]) -> InlayConfig:
        if peft_config.resolved:
            agree_on_pooling(self.model, peft_config.pooling, "This adapter")
        else:
            peft_config.pooling = installed(self.model)
            if peft_config.newly_initialised is None:
                peft_config.newly_initialised = newly_initialised(self.model)
            wanted = [*(peft_config.modules_to_save or []), *peft_config.newly_initialised]
            peft_config.modules_to_save = list(dict.fromkeys(wanted)) or None
            peft_config.target_modules = self._targets(peft_config)
            peft_config.resolved = True
        self._refuse_training_whole(peft_config.modules_to_save or ())
        # A tuple: PEFT abbreviates long lists to endings of names, and ours are matched exactly.
        peft_config.target_modules = tuple(peft_config.target_modules or ())  # type: ignore[assignment]
        return peft_config

    def _refuse_training_whole(self, wanted: Sequence[str]) -> None:
        """PEFT would put a wrapper around a module that it trains whole, and lose what hangs on it when it is saved."""
        for name, host in plain_modules(self.model):
            parts = name.split(".")
            around = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
            whole = next((each for each in wanted if any(path.endswith(each) for path in around)), None)
            if whole is not None and any(isinstance(child, ChildLayer) for child in host.children()):
                raise InlayError(
                    f"modules_to_save={list(wanted)!r}: {name} is adapted by another adapter of the model, and cannot "
                    "be trained whole by this one. Leave it out, or put this adapter into a model of its own."
                )

    def _targets(self, config: InlayConfig) -> list[str]:
        # A head that another adapter trains runs as that adapter's copy: what hangs on the original would not act.
        others = [name for name, module in self.model.named_modules() if isinstance(module, AuxiliaryTrainingWrapper)]
        heads = tuple(f"{plain_name(name)}." for name in [*(config.modules_to_save or ()), *others])
        trained = tuple(f".{name}." for name in TRAINED_WITH.get(config.task_type or "", ()))
        names = [
            name
            for name in self.hosts(config)
            if not f"{name}.".startswith(heads) and not any(part in f".{name}." for part in trained)
        ]
        if not names:
            raise InlayError(self.refusal(self.model))
        if _all_linear(config):
            names = self._linear(names)
        found = [name for name in names if _selected(config, name)]
        if config.layers is not None:
            found = [name for name in found if in_layers(self.model, config.layers, name)]
        if not found:
            raise InlayError(
                f"target_modules={config.target_modules!r}, exclude_modules={config.exclude_modules!r} and "
                f"layers={config.layers!r} leave no module to adapt. Modules that could be: {listed(names, 8)}."
            )
        return found

    def _linear(self, names: list[str]) -> list[str]:
        """Those of the names that are linear layers and in no head, as PEFT's "all-linear" has it."""
        inside, modules = in_backbone(base_of(self.model)), dict(plain_modules(self.model))
        linear = [name for name in names if isinstance(modules[name], (nn.Linear, Conv1D)) and inside(name)]
        if not linear:
            raise InlayError(
                f"target_modules={ALL_LINEAR!r}: none of what this method adapts is a linear layer. Leave it out, or "
                f"name some of: {listed(names, 8)}."
            )
        return linear

    @staticmethod
    def _check_target_module_exists(peft_config: InlayConfig, key: str) -> bool:
        return plain_name(key) in (peft_config.target_modules or ())

    def _create_and_replace(
        self,
        peft_config: InlayConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        host = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        layer = getattr(host, self.child, None)
        if layer is None:
            layer = self.layer_class(plain_name(current_key))(host)
            for other in host.children():
                if isinstance(other, ChildLayer):
                    other.share_host()
            setattr(host, self.child, layer)
            layer.attach()
            if any(isinstance(around, nn.TransformerEncoderLayer) for around in _around(self.model, current_key)):
                layer.insist()
        layer.update_layer(adapter_name, self.settings_at(peft_config, plain_name(current_key)))

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """As PEFT does; asked not to, an adapter that was drawn in float32 gets the base model's precision too."""
        super()._cast_adapter_dtype(adapter_name, autocast_adapter_dtype)
        if autocast_adapter_dtype:
            return
        for layer in self._layers():
            own = next((weight.dtype for weight in layer.base_parameters() if weight.is_floating_point()), None)
            for container in layer.adapter_layer_names if own in LOW_PRECISION else ():
                pieces = getattr(layer, container)
                if adapter_name in pieces:
                    pieces[adapter_name].to(own)

    def _layers(self) -> list[ChildLayer]:
        """The layers of this method in the model."""
        return [module for module in self.model.modules() if isinstance(module, self.tuner_layer_cls)]

    def merge_adapter(self, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:
        """Put adapters into the base model's weights; `unmerge_adapter` takes them out."""
        self._refuse_unmergeable(adapter_names)
        super().merge_adapter(adapter_names, safe_merge)

    def _refuse_unmergeable(self, names: list[str] | None) -> None:
        """An error where a parameter to be merged into is quantised, or another module's too, which the adapter leaves
        alone."""
        names = list(names or self.active_adapters)
        holders: dict[nn.Parameter, list[str]] = {}
        for name, module in self.model.named_modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    holders.setdefault(parameter, []).append(plain_name(name) or type(self.model).__name__)
        for layer in self._layers():
            if not any(name in getattr(layer, container) for container in layer.adapter_layer_names for name in names):
                continue
            kind = kind_of(layer.host)
            if kind is not None and "weight" in layer.merges_into:
                raise InlayError(
                    f"The weight of this {type(layer.host).__name__} is quantised ({kind}): nothing merges into it "
                    "without another rounding. Save the adapter, load it on the full base model, and merge there."
                )
            for key in layer.merges_into:
                own = holders.get(getattr(layer.host, key, None), [])
                if len(own) > 1:
                    raise InlayError(
                        f"{' and '.join(own)} are one {key} in this model: merged into the one, an adapter would act "
                        f"in the other too. {self.instead_of_merging}"
                    )

    def _unload_and_optionally_merge(
        self,
        merge: bool = True,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> nn.Module:
        if merge:
            self._refuse_unmergeable(adapter_names)
        modules = dict(self.model.named_modules())
        for module in modules.values():
            if isinstance(module, self.tuner_layer_cls):
                if merge:
                    module.merge(safe_merge=safe_merge, adapter_names=adapter_names)
                elif module.merged:
                    module.unmerge()
                module.leave()
                delattr(module.host, self.child)
        if any(isinstance(m, BaseTunerLayer) and not isinstance(m, self.tuner_layer_cls) for m in modules.values()):
            # Another method stays behind: it keeps its config, and the heads.
            mine = [name for name, config in self.peft_config.items() if self._is_mine(config)]
            for name in mine:
                del self.peft_config[name]
            return self.model
        for name, module in modules.items():
            if isinstance(module, AuxiliaryTrainingWrapper):
                plain = module.unload_and_optionally_merge_module(merge, safe_merge, adapter_names)
                parent, _, last = name.rpartition(".")
                setattr(self.model.get_submodule(parent), last, plain)
        if hasattr(self.model, "peft_config"):
            del self.model.peft_config
        return self.model

    def _is_mine(self, config: PeftConfig) -> bool:
        return PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type] is type(self)

    def train(self, mode: bool = True) -> InlayTuner:
        """Batch norms of the frozen base stay in eval mode: in training they would move its statistics."""
        super().train(mode)
        for _, module in plain_modules(self.model):
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.eval()
        return self

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        given = kwargs.get("adapter_names")
        if given is None:
            yield
            return
        layers = self._layers()
        mine = [name for name, config in self.peft_config.items() if self._is_mine(config)]
        names = check_names(given, mine)
        if not all(layer.mixes for layer in layers):
            raise InlayError(
                f"adapter_names={given!r}: {type(self).__name__} does not mix adapters within a batch. Run one adapter "
                "at a time: model.set_adapter(name)."
            )
        if self.training or any(layer.merged for layer in layers):
            state = "the model trains" if self.training else "an adapter is merged"
            raise InlayError(f"adapter_names: rows cannot be mixed while {state}: eval() and unmerge_adapter() first.")
        rows = batch_of(self.model, args, kwargs)
        if rows is not None and len(rows) != len(names):
            raise other_length(len(names), len(rows))
        with mixed_pass(self.model, layers, for_every_sequence(names, kwargs)):
            yield

    @classmethod
    def _get_adapter_state_dict(cls, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        found = super()._get_adapter_state_dict(*args, **kwargs)
        return {key: value for key, value in found.items() if f".{cls.child}." in key}

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        host, child, rest = key.rpartition(f".{cls.child}.")
        if not child:
            return super()._remove_adapter_name_from_key(key, adapter_name)
        # By its place, second, and not from the end as PEFT does: a piece may have parts of its own behind its name.
        container, _, piece = rest.partition(".")
        return f"{host.replace('.base_layer', '')}.{container}.{piece.removeprefix(f'{adapter_name}.')}"


def _around(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """The modules that a module of this name lies in."""
    yield model
    for part in name.split(".")[:-1]:
        model = model.get_submodule(part)
        yield model


def _all_linear(config: InlayConfig) -> bool:
    return isinstance(config.target_modules, str) and config.target_modules.lower() == ALL_LINEAR


def _selected(config: InlayConfig, name: str) -> bool:
    wanted = SimpleNamespace(
        target_modules=".*" if config.target_modules is None or _all_linear(config) else config.target_modules,
        target_parameters=None,
        exclude_modules=config.exclude_modules,
        modules_to_save=config.modules_to_save,
    )
    return bool(check_target_module_exists(wanted, name))
