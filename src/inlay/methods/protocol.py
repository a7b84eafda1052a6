"""What a method may declare and override: the facts of the registry, and the hooks of its config, tuner and layers.

This is the whole protocol. A method's folder declares a `Method`; its config class inherits `ConfigHooks`, its tuner
`TunerHooks` and its layers `LayerHooks` (by way of `InlayConfig`, `InlayTuner` and `ChildLayer`). Every fact and every
hook has a default, so a method writes down only what is special about it, and other rooms ask without knowing the
method. PEFT's own configs inherit none of this: `Method.hooks` and `hooks_of` stand in for them.

Nothing heavy is imported here: `inlay methods` reads the facts without torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from inlay.errors import InlayError

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import Tensor, nn

    from inlay.anatomy import Anatomy
    from inlay.tasks.schema import TaskSchema

Form = Literal["peft", "head", "full"]
Family = Literal["head", "prompt", "prefix", "adapter", "low-rank", "scale and shift", "whole model", "other"]
Passes = Callable[[], "Iterable[tuple[Tensor, Callable[[], object]]]"]
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Size:
    """Training defaults for language models of fewer than `below` parameters (None: of any number), and where they are
    from. `few_epochs` are those for few examples."""

    below: float | None
    learning_rate: float
    epochs: float
    few_epochs: float
    source: str


@dataclass(frozen=True)
class Writing:
    """What a method does on tasks in which the model writes text: settings, where none of them is given, and training
    by the model's size, the smallest first; without sizes, as on all other tasks. `source` is where the settings are
    from, and `before` are the settings that give what these tasks had before.

    `suits` is the import path of a function of the settings that were given and of the model, without its weights: it
    gives those of `settings` that go with them, and why others do not, as a clause (None: no reason to tell).
    """

    settings: Mapping[str, Any]
    source: str
    before: Mapping[str, Any]
    sizes: tuple[Size, ...] = ()
    suits: str | None = None

    def of_size(self, parameters: int) -> Size:
        """The training defaults for a model of so many parameters, where there are any."""
        return next(size for size in self.sizes if size.below is None or parameters < size.below)


@dataclass(frozen=True)
class Method:
    """One way to adapt a frozen model. Plain data: `inlay methods` prints it without importing torch.

    `family` is what is trained, by which a report groups methods: a new head alone; prompts in what a layer reads;
    prefixes of keys and values in attention; bottleneck adapters; low-rank products; scales and shifts (of biases and
    norms too); the whole model.

    Files and classes:

    - `form`: how what it trained is saved. `peft`, an adapter in PEFT's format; `head`, the new head alone; `full`, a
      whole checkpoint.
    - `config`, `tuner`: import paths, `module:Class`. A method that PEFT itself has leaves `tuner` and `peft_type`
      empty.
    - `peft_type`, `parameter_prefix`: the name of the adapter type (ours start with `INLAY_`), and how the names of its
      parameters begin.
    - `settings`: arguments of the config where they differ from the config's own defaults.
    - `defaults`: import path of a function of the model that gives the settings which depend on it: what to target.

    Training:

    - `learning_rate`: the default; `rates` has others for the kinds of model (`inlay.anatomy.Kind`) that want them, and
      `grid` those that `--learning-rates auto` tries.
    - `auto`: what it is a candidate for where a user leaves the method to a short comparison (`--method auto`): to
      classify or score texts or images, or to write.
    - `writing`: what is different where a language model learns to write (`inlay.workflow.writing`).

    What it can do:

    - `identity_at_start`: whether the untrained model computes what the base model does, to the bit.
    - `mergeable`: whether it can be merged into the base model's weights; `unmergeable`: why not, as a clause.
    - `mixes_tasks`: whether several tasks train and answer in one batch, an adapter each. Its tuner then has the hooks
      of `TunerHooks` for it, and its config's `shared_settings` say what all tasks have in common.
    - `mixer`: import path of a function of the adapted model that gives it such a tuner, where its own is PEFT's;
      `alone`: of a function of a config that says why its task cannot share a pass with others.
    - `compresses_prompts`: whether it can stand for a prompt (`inlay compress`). Of a method of ours, the config then
      has the settings `prompt_ids`, `prompt_length` and `seed`, and perhaps `size`, in tokens; its tuner has the hooks
      of `TunerHooks` for it. One of PEFT's is distilled from the base model on.
    - `prompt_forms`: other forms in which a prompt that it compressed can be written (`inlay compress --to`), by name:
      the settings of its config for that, and the import path of a function of the trained model, the folder and the
      base model's name.
    - `prompts_in_text`: whether it puts prompt tokens into the text, at places of a template.
    - `first_layer`: the first layer that `layers` may name; 0 where it can act on the pixels.
    - `prompt_parameter`: the parameter that holds its trained prompt, where the norm of that means something by itself
      (`inlay explain prompt-norm`).
    - `exports`: the other forms in which an adapter can be written (`inlay export --to`), by the name of the method
      that reads it: import paths of functions of the config, the tensors, the folder, and a function that gives the
      inputs and outputs of a module of the base model by its name.
    """

    name: str
    summary: str
    paper: str
    family: Family = "other"
    form: Form = "peft"
    config: str | None = None
    tuner: str | None = None
    peft_type: str | None = None
    parameter_prefix: str | None = None
    settings: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    defaults: str | None = None
    learning_rate: float = 1e-3
    rates: Mapping[str, float] = field(default_factory=lambda: _NOTHING)
    grid: tuple[float, ...] = (3e-4, 1e-3, 3e-3)
    writing: Writing | None = None
    auto: tuple[Literal["text", "image", "writing"], ...] = ()
    identity_at_start: bool = True
    mergeable: bool = False
    unmergeable: str = "no weight of the base model can hold what it trains"
    mixes_tasks: bool = False
    mixer: str | None = None
    alone: str | None = None
    compresses_prompts: bool = False
    prompt_forms: Mapping[str, tuple[Mapping[str, Any], str]] = field(default_factory=lambda: _NOTHING)
    prompts_in_text: bool = False
    first_layer: int = 1
    prompt_parameter: str | None = None
    exports: Mapping[str, str] = field(default_factory=lambda: _NOTHING)

    def config_class(self) -> type[PeftConfig]:
        """The PEFT config class, imported now."""
        if self.config is None:
            raise InlayError(f"Method {self.name!r} has no config: it is saved as {self.form!r}.")
        return load(self.config)

    def tuner_class(self) -> type:
        """The tuner class, imported now."""
        if self.tuner is None:
            raise InlayError(f"Method {self.name!r} has no tuner of inlay's own.")
        return load(self.tuner)

    @property
    def hooks(self) -> type[ConfigHooks]:
        """The hooks of its config class, imported now; the defaults for a method of PEFT's or without a config."""
        found = None if self.config is None else self.config_class()
        return found if found is not None and issubclass(found, ConfigHooks) else ConfigHooks

    def takes(self, setting: str) -> bool:
        """Whether the method's config has a setting of this name; imports it.

        PEFT's own methods have no `layers`: where inlay chooses their target modules, it narrows them by it.
        """
        if self.config is None or (setting == "layers" and not self.hooks.chooses_layers):
            return False
        names = {entry.name for entry in fields(self.config_class()) if entry.init}
        return setting in names or (setting == "layers" and self.defaults is not None and "target_modules" in names)

    def mixed(self, model: nn.Module) -> nn.Module:
        """An adapted model, so that tasks can share its batches."""
        return model if self.mixer is None else load(self.mixer)(model)

    def why_alone(self, settings: Mapping[str, Any]) -> str | None:
        """Why tasks cannot be trained together with these settings; None where they can."""
        if not self.mixes_tasks:
            return "it trains one task at a time"
        return None if self.alone is None else load(self.alone)(SimpleNamespace(**settings))

    def learning_rate_for(self, kind: str | None) -> float:
        """The default learning rate on a kind of model; None: of a kind that is not known."""
        return self.rates.get(kind or "", self.learning_rate)


def load(path: str) -> Any:
    """The object behind an import path `module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


class ConfigHooks:
    """What the config of a method may say beyond its settings."""

    chooses_layers: ClassVar[bool] = True
    """Whether the setting `layers` can be given."""
    goes_by_blocks: ClassVar[bool] = False
    """Whether it acts at blocks by their numbers, and no modules are named; of a model that compares images with texts,
    at those that read images."""
    stand_ins: ClassVar[Mapping[str, Any]] = _NOTHING
    """Values for what `for_task` fills in and other settings need: settings are checked before there is a task."""
    shared_settings: ClassVar[tuple[str, ...]] = ()
    """The settings in which all tasks of one model must agree, where a method mixes tasks."""

    @classmethod
    def auto_layers(cls, parts: Anatomy) -> list[int] | None:
        """The layers that it takes by itself in a model with these parts; None where it takes all, or has none."""
        return None

    @classmethod
    def for_task(
        cls, settings: Mapping[str, Any], schema: TaskSchema | None, processor: Any, model: nn.Module
    ) -> tuple[dict[str, Any], TaskSchema | None, list[str]]:
        """The settings with what a task, its tokenizer or image processor and the model say; the task's schema, which
        may get places for prompts; and notes for a person. A task of one's own may have no schema."""
        if schema is not None and schema.prompt_tokens:
            schema = replace(schema, prompt_tokens=0)  # the places are another method's
        return dict(settings), schema, []

    @classmethod
    def for_prompt(cls, settings: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
        """The settings of an adapter that replaces a prompt, where a method compresses prompts: the given ones, with
        the method's defaults for it. The caller adds the prompt and the seed."""
        return dict(settings)

    def settle(self, base: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Before a saved adapter is put into `base`: fill in what only that model and the saved tensors can say."""

    distillation_rate: ClassVar[float] = 3e-3
    """The learning rate with which it is distilled from a prompt: a step, relative to each part's size."""

    @property
    def num_virtual_tokens(self) -> int:
        """How many of the model's positions the method takes from the text."""
        return 0

    @property
    def prepends_tokens(self) -> bool:
        """Whether a causal language model sees the method's tokens before the first of the text, and so predicts it."""
        return False

    @property
    def recomputable(self) -> bool:
        """Whether activations may be recomputed in the backward pass (gradient checkpointing)."""
        return True

    @property
    def packable(self) -> bool:
        """Whether several texts may share a row: the method acts on a token wherever it stands, and nothing of it
        belongs to a row."""
        return not (self.num_virtual_tokens or self.prepends_tokens or self.appends_tokens)

    @property
    def appends_tokens(self) -> bool:
        """Whether the method's tokens follow the model's own, where they cannot be told from them."""
        return False


class PeftHooks(ConfigHooks):
    """The hooks of one of PEFT's own configs."""

    def __init__(self, config: PeftConfig | None) -> None:
        self._config = config

    @property
    def num_virtual_tokens(self) -> int:
        return getattr(self._config, "num_virtual_tokens", None) or 0

    @property
    def prepends_tokens(self) -> bool:
        config = self._config
        return config is not None and config.is_prompt_learning and config.peft_type != "PREFIX_TUNING"

    @property
    def recomputable(self) -> bool:
        return self._config is None or self._config.peft_type != "PREFIX_TUNING"


def hooks_of(config: PeftConfig | None) -> ConfigHooks:
    """The hooks of an adapter's config, one of ours or of PEFT's; the defaults where there is no adapter."""
    return config if isinstance(config, ConfigHooks) else PeftHooks(config)


class LayerHooks:
    """What the layer of a method may say and do; `inlay.methods.tuner.ChildLayer` has the rest."""

    mixes: ClassVar[bool] = False
    """Whether rows of one batch may belong to different adapters."""
    merges_into: ClassVar[tuple[str, ...]] = ()
    """The host's parameters that merging changes."""
    loss_parts: dict[str, Tensor] | None = None
    """The parts of the last loss by name, to be logged; None where the method adds nothing to the loss."""

    @property
    def recalled(self) -> tuple[int, int] | None:
        """How many examples the layer remembered and how many it computed so far; None where it remembers nothing."""
        return None

    def attach(self) -> None:
        """Make the host's forward pass go through this layer."""
        raise NotImplementedError

    def detach(self) -> None:
        """Undo `attach`."""
        raise NotImplementedError

    def update_layer(self, adapter_name: str, config: Any) -> None:
        """Make room for an adapter."""
        raise NotImplementedError

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put the adapters into the host's weights: only where a method can."""
        raise InlayError(
            f"{type(self).__name__}: this method cannot be merged into the base model's weights. Keep the adapter "
            "beside it, or take it off with unload()."
        )


class TunerHooks:
    """What the tuner of a method says: which modules it adapts, and with which layer."""

    child: ClassVar[str]
    """The attribute of a host under which the layer hangs."""
    prefix: str
    """`child` and an underscore: how the names of the layer's containers begin."""
    tuner_layer_cls: Any
    """The class of the layer; a tuple of classes where hosts have different ones (`layer_class`)."""
    instead_of_merging: ClassVar[str] = "Run it unmerged, or name fewer modules in target_modules."
    """What a user whose weights are tied can do, as a sentence."""
    model: nn.Module

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """Whether the method can adapt this module: for methods that go by the type of a module."""
        raise NotImplementedError

    def hosts(self, config: Any) -> list[str]:
        """Plain names of the modules the method could adapt; one that goes by a module's place overrides this."""
        from inlay.methods.plain import plain_modules

        return [name for name, module in plain_modules(self.model) if name and self.fits(module)]

    def layer_class(self, name: str) -> type:
        """The class of the layer on the host of this plain name."""
        return self.tuner_layer_cls

    def settings_at(self, config: Any, name: str) -> Any:
        """What the layer on the host of this plain name is told: the config, or what a method makes of it there."""
        return config

    @classmethod
    def refusal(cls, model: nn.Module) -> str:
        """Why the method cannot adapt this model, and what would."""
        raise NotImplementedError

    def counted_parameters(self) -> dict[str, int]:
        """The method's parameters, heads aside: `shared`, what all adapters have in common, and `trained`."""
        own = [value for name, value in self.model.named_parameters() if self.prefix in name]
        return {"shared": 0, "trained": sum(value.numel() for value in own if value.requires_grad)}

    # ---- for a method that mixes tasks

    def outputs_of(self, task: str) -> int | None:
        """How many outputs a task's own head has; None: as many as the base model's, or it has none."""
        raise NotImplementedError

    def size_head(self, task: str, outputs: int | None, seed: int) -> None:
        """Give a task that was just added a head of so many outputs, drawn from the seed where that is another number
        than the base model's."""
        raise NotImplementedError

    # ---- for a method that compresses prompts

    def start_from(self, prompt: Any, adapter_name: str = "default") -> None:
        """Let an adapter start as it would act in place of a prompt that was read (`inlay.methods.prompts.Prompt`)."""
        raise NotImplementedError

    def kept(self, adapter_name: str = "default") -> Any:
        """What an adapter has in place of a prompt's keys and values, of every block in their order
        (`inlay.methods.prompts.KeysValuesBiases`): a long prompt is then read in chunks. None where it has no such."""
        return None

    def can_fit(self) -> bool:
        """Whether `fit_passes` applies to the adapters as they are set."""
        return False

    fit_batch: ClassVar[int | None] = None
    """How many texts a batch of `fit_passes` has; None: as many as there are in a step of training. With a number, the
    prompt's keys do not come with the text's: they are taken from the prompt."""

    fit_leads: ClassVar[bool] = False
    """Whether the texts of `fit_passes` begin with the tokens that every text begins with where no prompt is before it,
    `prompt.lead` of them: they are there when the adapter stands for the prompt, and are not real."""

    def fit_work(self, batches: int) -> int:
        """How often `fit_passes` ticks, where each call of `passes` gives so many batches."""
        return batches

    def fit_passes(self, passes: Passes, prompt: Any, tick: Callable[[], None]) -> None:
        """Fit the adapter to what the prompted model does, without gradients. Each call of `passes` gives every batch
        once: which of its tokens are real, and a function that runs the prompted model on it."""
        raise NotImplementedError


def layers_of(model: nn.Module) -> Iterator[LayerHooks]:
    """The layers of methods of ours in a model, whatever stands around it."""
    return (module for module in model.modules() if isinstance(module, LayerHooks))
