"""Put a method into a model: one door for every form of method, ours and PEFT's.

The new parts of the model (a head, a pooler) are trained with it and later saved with it, whatever the architecture:
see heads.py. What comes back is a `PeftModel`, or for the forms `head` and `full` the model itself, with just the right
parameters trainable. `save` and `restore` are in saving.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from peft import PeftConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from inlay.anatomy import tower_modules
from inlay.backbones.losses import follow_prompt
from inlay.backbones.quantised import keep_gradients, quantisation
from inlay.errors import InlayError, unknown
from inlay.methods import registry
from inlay.methods.capabilities import alternatives, refuse_quantised, refuse_unfit
from inlay.methods.config import InlayConfig
from inlay.methods.heads import newly_initialised as find_new
from inlay.methods.patterns import check_patterns
from inlay.methods.plain import base_of, plain_modules, plain_parameters
from inlay.methods.register import register
from inlay.methods.registry import Method
from inlay.methods.saving import NEW, mend_prompt, restore, save, use_head
from inlay.methods.settings import check_settings, make_config
from inlay.methods.targets import ALL_LINEAR, all_linear, chooses, narrow_targets
from inlay.methods.tuner import InlayTuner, check_free
from inlay.tasks import kinds

__all__ = ["attach", "check_adapter_name", "restore", "save", "task_type", "trained_parameters"]

_BY_CLASS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForImageClassification": None,
}
_PROBED = {
    head.task_type: head.probed_as
    for head in (kinds.SEQUENCE, kinds.TOKEN, kinds.LANGUAGE, kinds.TWO_PARTS, kinds.VECTOR, kinds.READER)
}


def attach(
    model: nn.Module,
    method: Method | str,
    *,
    settings: Mapping[str, Any] | None = None,
    adapter_name: str = "default",
    newly_initialised: Sequence[str] | None = None,
    task_kind: str | None = None,
    force: bool = False,
) -> nn.Module:
    """The model with the method in it, ready to be trained; `model` itself is changed.

    `settings` are arguments of the method's config and override its defaults. `newly_initialised` names the modules
    that loading did not find in the checkpoint; where it is not given they are found. A model that has an adapter
    already gets another one beside it, under another `adapter_name`; the head in use is then the last one's.
    `force` tries also what the probes found not to work.
    """
    method = registry.get(method)
    settings = dict(settings or {})
    keep_gradients(base_of(model))
    if not force:
        refuse_quantised(method.name, quantisation(base_of(model)))
    if newly_initialised is None:
        newly_initialised = () if method.form == "full" else find_new(model)
    new = list(newly_initialised)
    if method.form == "peft":
        adapted = _attach_adapter(model, method, settings, adapter_name, new, task_type(model, task_kind), force)
    else:
        check_settings(method, settings)
        adapted = _attach_head(model, method, new) if method.form == "head" else model.requires_grad_(True)
    follow_prompt(adapted, base_of(adapted))
    setattr(adapted, NEW, new)
    return adapted


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What training will change, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def task_type(model: nn.Module, task_kind: str | None = None) -> str | None:
    """PEFT's task type, from the model's class where its name says it, else from the kind of task."""
    name = type(base_of(model)).__name__
    for ending, found in _BY_CLASS.items():
        if name.endswith(ending):
            return found
    return kinds.get(task_kind).head.task_type if task_kind is not None else None


def _attach_head(model: nn.Module, method: Method, new: list[str]) -> nn.Module:
    if not new:
        raise InlayError(
            f"{method.name} trains a new head, and {type(model).__name__} came with all its weights. "
            f"{alternatives(model, method.name)}"
        )
    model.requires_grad_(False)
    for name in new:
        model.get_submodule(name).requires_grad_(True)
    return model


def _attach_adapter(
    model: nn.Module,
    method: Method,
    settings: dict[str, Any],
    adapter_name: str,
    new: list[str],
    kind: str | None,
    force: bool,
) -> nn.Module:
    register()
    if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
        raise InlayError(f"A prompt stands around the model: put {method.name} into it first, and the prompt last.")
    # Side by side in one base, not one PEFT model around another: PEFT would not find the saved heads again.
    model = base_of(model)
    if not force:
        refuse_unfit(method.name, model, _probed_as(model, kind))
    check_adapter_name(model, adapter_name)
    config = _config(model, method, settings, new, kind)
    _check_saved(model, settings.get("modules_to_save") or ())
    _refuse_wrapping_twice(model, method, config)
    try:
        adapted = mend_prompt(get_peft_model(model, config, adapter_name=adapter_name))
    except InlayError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError, ImportError, re.error) as error:
        raise InlayError(
            f"{method.name} cannot be put into {type(model).__name__}: {error} {alternatives(model, method.name)}"
        ) from error
    _check_kept(adapted, config.modules_to_save or (), adapter_name)
    use_head(adapted, adapter_name)
    if getattr(model, "is_gradient_checkpointing", False) and hasattr(model, "disable_input_require_grads"):
        # PEFT makes the embeddings require gradients, which pulls the whole trunk into the graph and breaks Swin.
        # Checkpointing that is not re-entrant, Transformers' default, has no need of it.
        model.disable_input_require_grads()
    return adapted


def _check_saved(model: nn.Module, names: Sequence[str]) -> None:
    """PEFT passes over a module to save that the model does not have."""
    there = [name for name, _ in plain_modules(model) if name]
    for wanted in names:
        if not any(f".{name}".endswith(f".{wanted}") for name in there):
            last = {name.rpartition(".")[2] for name in there}
            raise unknown("module of modules_to_save", wanted, {part for part in last if not part.isdigit()})


def _refuse_wrapping_twice(model: nn.Module, method: Method, config: Any) -> None:
    """PEFT's methods wrap modules: the outer wrapper would rename the inner one's weights, and neither could reload."""
    tuner = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type]
    if config.is_prompt_learning or issubclass(tuner, InlayTuner):
        return
    for name, module in model.named_modules():
        wraps = isinstance(module, BaseTunerLayer) and hasattr(module, "base_layer")
        if wraps and not isinstance(module, tuner.tuner_layer_cls) and check_target_module_exists(config, name):
            raise InlayError(
                f"{method.name} and {type(module).__name__} would both wrap {name}, and could not be loaded again. "
                "Give them different target_modules, or stack one of inlay's own methods."
            )


def _check_kept(adapted: nn.Module, names: Sequence[str], adapter_name: str) -> None:
    """PEFT finds modules to save by the end of their names: `head` also takes `mlp_head`, and would train it.

    What another adapter keeps is that adapter's affair.
    """
    for found, module in adapted.named_modules():
        if not isinstance(module, AuxiliaryTrainingWrapper):
            continue
        wanted = any(f".{found}".endswith(f".{name}") for name in names)
        mine = adapter_name in getattr(module, "modules_to_save", (adapter_name,))
        if mine and not wanted:
            raise InlayError(
                f"PEFT would train {found} too, because its name ends like one of {', '.join(set(names))}."
            )


def _probed_as(model: nn.Module, kind: str | None) -> str | None:
    """What the probes call the task of a model."""
    if tower_modules(base_of(model)):
        return kinds.TOWERS.probed_as
    sees = type(base_of(model)).__name__.endswith("ForImageClassification")
    return _PROBED.get(kind or "", "classification" if sees else None)


def _config(model: nn.Module, method: Method, settings: dict[str, Any], new: list[str], kind: str | None) -> PeftConfig:
    config_class = method.config_class()
    check_settings(method, settings)
    given = dict(method.settings)
    if settings.get("target_modules", "") is None:
        del settings["target_modules"]  # the default, spelled out
    if method.defaults is not None and "target_modules" not in settings:
        given |= narrow_targets(model, method, registry.load(method.defaults)(model), settings)
    elif settings.get("target_modules") == ALL_LINEAR and chooses(settings):
        given |= narrow_targets(model, method, {"target_modules": all_linear(model)}, settings)
        del settings["target_modules"]
    given |= settings
    takes_layers = "layers" in {field.name for field in dataclasses.fields(config_class)}
    if not takes_layers and given.pop("layers", None) is not None and "target_modules" in settings:
        raise InlayError(
            f"layers={settings['layers']!r} narrows what {method.name} targets by default, and target_modules="
            f"{settings['target_modules']!r} says what it targets. Give one of them."
        )
    given["modules_to_save"] = list(dict.fromkeys([*(given.get("modules_to_save") or ()), *new])) or None
    if issubclass(config_class, InlayConfig):
        given["newly_initialised"] = new
    # As it is checked when the adapter is loaded: nothing is trained that could not be.
    check_patterns(given, [name for name, _ in base_of(model).named_modules()], f"Method {method.name!r}")
    config = make_config(method, given, task_type=kind)
    if config.is_prompt_learning and kind is None:
        raise InlayError(
            f"{method.name} needs a model for a task on text, such as a ForSequenceClassification; got "
            f"{type(base_of(model)).__name__}."
        )
    return config


def check_adapter_name(model: nn.Module, adapter_name: str) -> None:
    """An error for a name that an adapter of this model cannot have."""
    check_free(model, adapter_name)
    # PEFT tells adapters apart by parts of parameters' names: one called like a module would take its weights along.
    taken = {part for name in plain_parameters(model) for part in name.split(".")}
    if adapter_name in taken or not adapter_name.isidentifier():
        raise InlayError(f"adapter_name={adapter_name!r} will not do: take a word that names no part of the model.")
