"""The tuner of Multi-LoRA: tasks that share every `A`, all of them trainable, mixed in one batch.

PEFT adds an adapter by walking over the whole model, adapters included, several times: the 64th takes six times as long
as the 2nd. Here what a config's words mean in a model is looked up once, and a further task goes straight to the layers
that it adapts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, get_pattern_key
from torch import nn

from inlay.anatomy import anatomy
from inlay.errors import InlayError, unknown
from inlay.methods.capabilities import alternatives
from inlay.methods.channels import width_in, width_out
from inlay.methods.mixing import BASE
from inlay.methods.mixture.heads import TaskHead, resize
from inlay.methods.mixture.hooks import ModelHooks, base_labels, check_rows, copies_of
from inlay.methods.mixture.rows import ROUTING, Routing, TaskRows
from inlay.methods.multi_lora.config import SLICES, MultiLoraConfig
from inlay.methods.multi_lora.layer import LayerSettings, MultiLoraLayer, fits
from inlay.methods.multi_lora.shared import checksum_of
from inlay.methods.plain import INNER, plain_name, plain_parameters
from inlay.methods.protocol import load
from inlay.methods.registry import get
from inlay.methods.tuner import InlayTuner


class MultiLoraModel(InlayTuner):
    """`get_peft_model(model, MultiLoraConfig(), adapter_name="rte")` makes one of these."""

    prefix = "inlay_multi_lora_"
    child = "inlay_multi_lora"
    tuner_layer_cls = MultiLoraLayer

    # ---- what is adapted

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        return fits(module)

    def hosts(self, config: MultiLoraConfig) -> list[str]:
        """What the user names, among all that fits; else queries and values, as LoRA's own experiments have it."""
        if config.target_modules is not None:
            return super().hosts(config)
        try:
            defaults: Any = get("lora").defaults
            return list(load(defaults)(self.model)["target_modules"])
        except InlayError as error:
            raise InlayError(f"{error}\nOr name what multi-lora is to adapt: target_modules.") from error

    @classmethod
    def refusal(cls, model: nn.Module) -> str:
        return (
            f"multi-lora adapts linear layers, embeddings and convolutions, and {type(model).__name__} has none. "
            f"{alternatives(model, 'multi-lora')}"
        )

    def settings_at(self, config: MultiLoraConfig, name: str) -> LayerSettings:
        """The rank and alpha that the patterns give this module, and what is adapted of a fused projection."""
        rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern.keys(), name), config.r)
        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), name), config.lora_alpha)
        thirds = tuple(i for i, part in enumerate(SLICES) if part in config.fused) if self._fused(name) else None
        return LayerSettings(
            routing=self.routing,
            name=name,
            rank=rank,
            alpha=alpha,
            dropout=config.lora_dropout,
            seed=config.seed,
            init=config.init,
            thirds=thirds if thirds != (0, 1, 2) else None,
            trains=not config.inference_mode,
        )

    def _fused(self, name: str) -> bool:
        """Whether a module makes queries, keys and values together, each a third of its output."""
        if self.routing.fused is None:
            try:
                blocks = anatomy(self.model).blocks
            except InlayError:  # an architecture that nobody has described: nothing is known to be fused
                blocks = ()
            found = [block.attention for block in blocks if block.attention is not None and block.attention.fused]
            self.routing.fused = {plain_name(attention.query.name) for attention in found}
        if name not in self.routing.fused:
            return False
        host = self.model.get_submodule(name)
        host = host.get_base_layer() if isinstance(host, BaseTunerLayer) else host
        return width_out(host) == 3 * width_in(host)

    @property
    def routing(self) -> Routing:
        """What the layers, the heads and every tuner on this base model share."""
        return Routing.of(self.model)

    # ---- adding, renaming and deleting tasks

    @property
    def tasks(self) -> list[str]:
        """The names of the tasks, in the order in which they were added."""
        return [name for name, config in self.peft_config.items() if self._is_mine(config)]

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Make room for a task; straight in the layers that tasks before it have, where it adapts no others."""
        self._check_name(adapter_name)
        config = self.peft_config[adapter_name]
        config.belong_to(self, adapter_name)
        loaded = config.was_saved
        if not self.active_adapters:  # all others were deleted
            self.active_adapter = adapter_name
        try:
            with config.filling_in():
                if not self._add_task(adapter_name, loaded):
                    super().inject_adapter(model, adapter_name, *args, **kwargs)
                    self._take_note(model, config)
                    for head in self._heads(config):  # PEFT freezes the head of a task that is not the active one
                        head.modules_to_save[adapter_name].requires_grad_(not config.inference_mode)
                self._check_shared(adapter_name, config, loaded)
                seed = config.seed if config.head_seed is None else config.head_seed
                resize(self._heads(config), self.model, adapter_name, config.num_labels, seed)
        except Exception:
            self._forget(adapter_name)
            raise

    def _check_name(self, name: str) -> None:
        """An error for a name that no task can have: PEFT tells adapters apart by parts of parameters' names."""
        routing = self.routing
        if routing.taken is None:
            parts = {part for parameter in plain_parameters(self.model) for part in parameter.split(".")}
            own = {self.child, *MultiLoraLayer.adapter_layer_names, "modules_to_save", *INNER, BASE}
            routing.taken = frozenset(parts | own | set(dir(nn.ModuleDict())))
        if name in routing.taken or not re.fullmatch(r"[\w-]+", name):
            raise InlayError(
                f"adapter_name={name!r} will not do: take a word of letters, digits, hyphens and underscores that "
                "names no part of the model."
            )

    def _prepare_adapter_config(self, peft_config: MultiLoraConfig, model_config: dict[str, Any]) -> MultiLoraConfig:
        if peft_config.resolved:
            # PEFT adds its own names for a head to the list that it is given, every time.
            peft_config.modules_to_save = list(dict.fromkeys(peft_config.modules_to_save or ())) or None
            return super()._prepare_adapter_config(peft_config, model_config)
        words = _words(peft_config)
        if words in self.routing.selections:
            for name, value in self.routing.selections[words].items():
                setattr(peft_config, name, deepcopy(value))
            return peft_config
        prepared = super()._prepare_adapter_config(peft_config, model_config)
        self.routing.selections[words] = {name: deepcopy(getattr(prepared, name)) for name in LOOKED_UP}
        return prepared

    def _add_task(self, name: str, loaded: bool) -> bool:
        """Add a task to layers and heads that are there; False where it needs others, or is the first."""
        routing = self.routing
        config = self.peft_config[name]
        if not routing.layers or not (config.resolved or _words(config) in routing.selections):
            return False
        config = self._prepare_adapter_config(config, {})
        targets, new = config.target_modules or (), set(config.modules_to_save or ())
        if not routing.layers.keys() >= set(targets) or not routing.looked_up >= new:
            return False
        if not all(routing.layers[target].factors for target in targets):  # no A is left where no task is
            return False
        settings = {target: self.settings_at(config, target) for target in targets}
        for target, each in settings.items():
            routing.layers[target].check(name, each)
        self._check_shared(name, config, loaded)
        for target, each in settings.items():
            routing.layers[target].update_layer(name, each)
        for head in self._heads(config):
            head.update(name)
            head.modules_to_save[name].requires_grad_(not config.inference_mode)
        if name in self.active_adapters:
            self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)
        return True

    def _take_note(self, model: nn.Module, config: MultiLoraConfig) -> None:
        """After PEFT has put in the first task, or one with layers of its own: what there is now."""
        routing = self.routing
        if not routing.handles:
            ModelHooks(self.model, routing, self.outputs_of)
        for name, module in model.named_modules():
            if isinstance(module, ModulesToSaveWrapper):
                routing.heads[plain_name(name)] = TaskHead.adopt(module, routing)
        routing.looked_up.update(config.modules_to_save or ())

    def outputs_of(self, task: str) -> int | None:
        found: int | None = self.peft_config[task].num_labels
        return found

    def size_head(self, task: str, outputs: int | None, seed: int) -> None:
        config = self.peft_config[task]
        config.num_labels = outputs
        config.head_seed = seed if config.head_seed is None else config.head_seed
        resize(self._heads(config), self.model, task, outputs, config.head_seed)

    def _heads(self, config: MultiLoraConfig) -> list[TaskHead]:
        """The heads and other new parts that a task has one of its own of; PEFT matches them by the ends of names."""
        endings = tuple(config.modules_to_save or ())
        return [head for name, head in self.routing.heads.items() if name.endswith(endings)]

    def _check_shared(self, name: str, config: MultiLoraConfig, loaded: bool) -> None:
        """Write down which `A`s a task goes with; see that those of a saved one are what it was trained with."""
        layers = {target: self.routing.layers[target] for target in config.target_modules or ()}
        config.places = {target: layer.place() for target, layer in layers.items()}
        if not all(layer.digest for layer in layers.values()):  # on the meta device nothing is drawn
            return
        checksum = checksum_of((target, layer.digest) for target, layer in layers.items())
        if loaded and config.checksum is None:
            raise InlayError(
                f"Task {name!r} comes with settings that were saved, and without the checksum of its A's: they were "
                "edited, and nothing says that seed "
                f"{config.seed} gives the A's that it was trained with. Use the files as they were saved."
            )
        if config.checksum is not None and config.checksum != checksum:
            raise InlayError(
                f"Task {name!r} was trained with other A's than seed {config.seed} gives here (checksum "
                f"{config.checksum[:12]}, here {checksum[:12]}): its settings were edited, the model is another, or "
                "this version of torch draws other numbers. Use what it was trained with."
            )
        config.checksum = checksum

    def _forget(self, name: str) -> None:
        """Take out what a task that could not be added has left."""
        for module in self.model.modules():
            if isinstance(module, MultiLoraLayer):
                module.inlay_multi_lora_b.pop(name) if name in module.inlay_multi_lora_b else None
            elif isinstance(module, ModulesToSaveWrapper) and name in module.modules_to_save:
                module.delete_adapter(name, None if name in module.active_adapters else list(module.active_adapters))

    def _go_on_with_heads(self, adapter_name: str, in_use: dict[ModulesToSaveWrapper, str]) -> None:
        """Every task begins with a head of its own; beside another method, with the head which that has trained."""
        others = {head: name for head, name in in_use.items() if name not in self.tasks}
        super()._go_on_with_heads(adapter_name, others)

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """As PEFT does, but for the layers that there are, without looking through the model for them."""
        for layer in self.routing.layers.values() if autocast_adapter_dtype else ():
            if adapter_name in layer.inlay_multi_lora_b:
                piece = layer.inlay_multi_lora_b[adapter_name]
                if piece.weight.dtype in (torch.float16, torch.bfloat16):
                    piece.float()

    def delete_adapter(self, adapter_name: str) -> None:
        """Take a task out; with the last of a layer its `A` goes too, and the next task may draw another."""
        super().delete_adapter(adapter_name)
        for layer in self.routing.layers.values():
            if not layer.factors:
                layer.let_go()

    def rename_task(self, old: str, new: str) -> None:
        """Give a task another name."""
        if old not in self.tasks:
            raise unknown("task", old, self.tasks)
        if new in self.peft_config:
            raise InlayError(f"There is a task called {new!r} already.")
        self._check_name(new)
        configs = {new if name == old else name: config for name, config in self.peft_config.items()}
        self.peft_config.clear()
        self.peft_config.update(configs)
        for layer in self.routing.layers.values():
            _rename(layer.inlay_multi_lora_b, old, new)
            layer._active_adapter = _renamed(layer._active_adapter, old, new)
            layer.merged_adapters = [new if name == old else name for name in layer.merged_adapters]
        for head in self.routing.heads.values():
            _rename(head.modules_to_save, old, new)
            head._adapters = {new if name == old else name for name in head._adapters}
            head._active_adapter = _renamed(head._active_adapter, old, new)
        self.active_adapter = _renamed(self.active_adapters, old, new)

    def counted_parameters(self) -> dict[str, int]:
        """`shared`: the `A`s, once for all tasks; `trained`: the `B`s of all tasks. Heads are not counted."""
        layers = [layer for layer in self.routing.layers.values() if layer.factors]
        shared = sum(layer.inlay_multi_lora_a.numel() for layer in layers)
        return {"shared": shared, "trained": sum(p.numel() for layer in layers for p in layer.pieces.parameters())}

    # ---- forward passes

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        routing, names = self.routing, kwargs.get("adapter_names")
        if names is not None:
            rows = routing.rows_of(names, self.tasks)
            if check_rows(self.model, args, kwargs, rows):  # as `generate` is called: it repeats them itself
                rows.copies = copies_of(self.model, kwargs)
        elif len(self.active_adapters) == 1 and self._needs_rows(self.active_adapters[0]):
            rows = TaskRows(self.active_adapters)
        else:
            yield
            return
        with routing.remembering(rows):
            yield

    def _needs_rows(self, task: str) -> bool:
        """Whether a pass of the active task alone must say so: for a head of another size, of which the base model
        cannot compute the loss, and for layers that are recomputed when another task may be active."""
        if task not in self.tasks:
            return False
        if self.peft_config[task].num_labels not in (None, base_labels(self.model)):
            return True
        return not torch.compiler.is_compiling() and self.routing.recomputing

    # ---- merging

    instead_of_merging = "Run it unmerged, or export it as a LoRA (inlay export --to lora), which is exact."

    def _unload_and_optionally_merge(
        self,
        merge: bool = True,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> nn.Module:
        routing = self.routing
        active = self.active_adapters[0] if self.active_adapters else None
        labels = self.peft_config[active].num_labels if active in self.tasks else None
        found = super()._unload_and_optionally_merge(merge, progressbar, safe_merge, adapter_names)
        if labels is not None and routing.heads and labels != base_labels(self.model):
            # The task's head is the model's own now, and computes its loss by these.
            self.model.config.num_labels = self.model.num_labels = labels
            self.model.config.problem_type = None
        for handle in routing.handles:
            handle.remove()
        for head in routing.heads.values():  # those that another method keeps
            head.__class__ = ModulesToSaveWrapper
            del head.routing
        delattr(self.model, ROUTING)
        return found


LOOKED_UP = ("target_modules", "modules_to_save", "newly_initialised", "resolved")


def _words(config: MultiLoraConfig) -> str:
    """What a user said of where a task goes, as a key."""
    said = (config.target_modules, config.exclude_modules, config.layers, config.modules_to_save)
    return json.dumps([*(sorted(each) if isinstance(each, set) else each for each in said), config.newly_initialised])


def _rename(modules: nn.ModuleDict, old: str, new: str) -> None:
    if old in modules:
        modules[new] = modules.pop(old)


def _renamed(active: Any, old: str, new: str) -> Any:
    if isinstance(active, str):
        return new if active == old else active
    return [new if name == old else name for name in active]


def rename_task(model: Any, old: str, new: str) -> None:
    """Give a task of a PEFT model another name."""
    model.base_model.rename_task(old, new)
    model.active_adapter = _renamed(model.active_adapter, old, new)
