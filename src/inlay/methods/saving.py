"""Save what a method trained, and put it back into a freshly loaded base model.

`peft` is an adapter in PEFT's format; `head` the new head's parameters; `full` a whole checkpoint. Beside each lies a
small JSON file that says which method it is, which base model it belongs to and what the weights' file hashes to.
Only safetensors and JSON are read, and everything is checked before the model is trusted: one clear error each.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.mapping_func import MODEL_TYPE_TO_PEFT_MODEL_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from peft.utils.save_and_load import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils import logging

from inlay.backbones.locate import remember_folder
from inlay.backbones.losses import follow_prompt
from inlay.backbones.new_parts import DIGESTS
from inlay.backbones.new_parts import fingerprint as fingerprint_of
from inlay.backbones.pooled import installed, undone_on_error
from inlay.backbones.pooling import written
from inlay.backbones.quantised import keep_gradients, quantisation
from inlay.errors import InlayError, first_line, listed
from inlay.methods import registry, vetting
from inlay.methods.allowance import Allowance, TooLarge
from inlay.methods.card import About, write_card
from inlay.methods.folder import CARD, CONFIG, DEFAULT, AdapterFolder, adapter_place, read_json, sort_sets
from inlay.methods.plain import WRAPPED, base_of
from inlay.methods.pooling_notes import agree_on_pooling
from inlay.methods.protocol import hooks_of
from inlay.methods.register import register
from inlay.methods.registry import Method

NEW = "_inlay_newly_initialised"


def save(
    model: nn.Module,
    method: Method | str,
    folder: str | Path,
    *,
    adapter_name: str = "default",
    base_model_name: str | None = None,
    fingerprint: str | None = None,
    about: About | None = None,
    processor: Any = None,
) -> None:
    """Write what the method trained into `folder`. `fingerprint` is that of the frozen base, as its loader found it.

    `about` is what the adapter's card says; where it is not given, an adapter has the card that PEFT makes. A tokenizer
    or an image processor (`processor`) is written beside it.
    """
    method = registry.get(method)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {} if about is None else {"about": about.to_json()}
    card_of_user = (folder / CARD).exists()
    saved = AdapterFolder(adapter_place(folder, adapter_name) if method.form == "peft" else folder, method)
    if method.form == "peft":
        _save_adapter(model, folder, adapter_name, base_model_name)
    elif method.form == "head":
        trained = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters() if p.requires_grad}
        save_file(trained, saved.weights, metadata={"format": "pt"})
        facts["parameters"] = sorted(trained)
    else:
        with _no_progress_bar():
            model.save_pretrained(folder)
        write_pooling(model, folder)
    if processor is not None and not type(processor).__module__.startswith("inlay."):  # which Transformers can load
        chats = None if about is None or about.schema is None else about.schema.get("chat_template")
        facts["preprocessing"] = _save_processor(processor, saved.place, chats)
        if about is not None:
            about = replace(about, preprocessing=True)
            facts["about"] = about.to_json()
    facts |= {
        "base_model": base_model_name if about is None else about.base,
        "fingerprint": fingerprint,
        "newly_initialised": list(getattr(model, NEW, ())),
    }
    saved.write_note(facts, installed(model))
    if about is not None and about.folder is not None and fingerprint is not None:
        remember_folder(fingerprint, about.folder)
    if about is not None and not (card_of_user and saved.place == folder):
        write_card(saved.place, method, {DEFAULT: about})


def write_pooling(model: Any, folder: Path) -> None:
    """Write sentence-transformers' files beside a checkpoint whose pooling is not that of its architecture."""
    if (pooling := installed(model)) is None:
        return
    for file, content in written(pooling, model.config.hidden_size).items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def restore(
    model: nn.Module,
    method: Method | str,
    folder: str | Path,
    *,
    adapter_name: str = "default",
    fingerprint: str | None = None,
    mixed: bool = False,
) -> nn.Module:
    """`model`, a freshly loaded base with a head of the same shape, with what `save` wrote into `folder`; in eval mode.

    Where the folder holds several adapters, the one called `adapter_name` is taken; a single one goes by any name.
    `fingerprint` is the base's, where its loader has computed it already; otherwise it is computed here. `mixed`: so
    that others of the method can be restored beside it, each with a head of its own size, and share its batches.
    """
    method = registry.get(method)
    saved = AdapterFolder.find(Path(folder), method, adapter_name)
    note, place = saved.read_note(), saved.place
    if not note:
        vetting.say_unvouched(saved.note)
    keep_gradients(base_of(model))
    with undone_on_error(base_of(model)):
        if note:
            agree_on_pooling(model, note.get("pooling"), str(place))
        if method.form == "full":
            restored = _restore_full(model, place, note)
        else:
            _check_base(model, note, place, fingerprint)
            vetting.check_size([saved.weights], model)
            tensors = vetting.read_tensors(saved.weights, note)
            if method.form == "peft":
                mixed = mixed or is_mixed(model)
                restored = _restore_adapter(model, saved, tensors, adapter_name, vouched=bool(note), mixed=mixed)
            else:
                restored = _restore_head(model, place, tensors, note["parameters"])
    follow_prompt(restored, base_of(restored))
    setattr(restored, NEW, note.get("newly_initialised", []))
    return restored.eval()


def about(method: Method | str, folder: str | Path, adapter_name: str) -> About | None:
    """What the card of a saved adapter says of it; None where nobody has written that down."""
    method = registry.get(method)
    found = AdapterFolder.find(Path(folder), method, adapter_name).read_note().get("about")
    return None if found is None else About.from_json(found)


def read(method: Method | str, folder: str | Path, adapter_name: str) -> tuple[PeftConfig, dict[str, Tensor]]:
    """The settings and the tensors of an adapter that `save` wrote, checked, without a model."""
    register()
    method = registry.get(method)
    saved = AdapterFolder.find(Path(folder), method, adapter_name)
    note, path = saved.read_note(), saved.place / CONFIG["peft"]
    settings = read_json(path)
    vetting.check_type(path, settings)
    if not is_of(method, settings):
        raise InlayError(f"{saved.place} does not hold an adapter of method {method.name!r}.")
    try:
        config = PeftConfig.from_pretrained(str(saved.place))
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise InlayError(f"{path} is not the config of an adapter: {first_line(error)}") from error
    return config, vetting.read_tensors(saved.weights, note)


def is_of(method: Method, settings: Mapping[str, Any]) -> bool:
    """Whether these are the saved settings of an adapter of the method."""
    register()
    return PEFT_TYPE_TO_CONFIG_MAPPING.get(str(settings.get("peft_type"))) is method.config_class()


def use_head(model: nn.Module, adapter_name: str) -> None:
    """Let an adapter's own head and other new parts be the ones in use, where several adapters have them."""
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper) and adapter_name in module.modules_to_save:
            trains = any(parameter.requires_grad for parameter in module.modules_to_save.parameters())
            module.modules_to_save.requires_grad_(False)  # PEFT leaves the other heads trainable
            module.set_adapter(adapter_name, inference_mode=not trains)


def mend_prompt(model: Any) -> Any:
    """Let PEFT's `disable_adapter` work around a model that does not generate: for prompts it looks for this name."""
    base = base_of(model)
    if model.active_peft_config.is_prompt_learning and not hasattr(base, "prepare_inputs_for_generation"):
        base.prepare_inputs_for_generation = None
    return model


def _save_processor(processor: Any, place: Path, chat_template: str | None) -> list[str]:
    """Write it, with the chat template of training where there is one; the names of its files."""
    before = {path.name for path in place.iterdir()}
    own = getattr(processor, "chat_template", None)
    if chat_template is not None:
        processor.chat_template = chat_template
    try:
        processor.save_pretrained(place)
    finally:
        if chat_template is not None:
            processor.chat_template = own
    return sorted({path.name for path in place.iterdir() if path.is_file()} - before)


def _save_adapter(model: Any, folder: Path, adapter_name: str, base_model_name: str | None) -> None:
    if base_model_name is not None:
        model.peft_config[adapter_name].base_model_name_or_path = base_model_name
    card = folder / CARD
    if not card.exists():  # PEFT adds to a card that is there, and otherwise writes a form of empty headings
        card.write_text(f"---\nlibrary_name: peft\n---\n\n# An adapter for {base_model_name or 'a base model'}\n")
    # "auto" would ask the hub whether the vocabulary was resized; nothing here resizes it.
    model.save_pretrained(folder, selected_adapters=[adapter_name], save_embedding_layers=False)
    sort_sets(adapter_place(folder, adapter_name) / CONFIG["peft"])


def _check_base(model: nn.Module, note: Mapping[str, Any], place: Path, fingerprint: str | None) -> None:
    wanted = note.get("fingerprint")
    # With an adapter in it already the base was checked when that one came, and its names are no longer the same.
    if wanted is None or any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        return
    if fingerprint is None and quantisation(model) is not None and not hasattr(model, DIGESTS):
        vetting.NOTES.warning(
            "The base model was quantised by others, and what it was before is not known: whether %s belongs to it is "
            "not checked. inlay.load_backbone(..., quantize=) knows.",
            place,
        )
        return
    found = fingerprint or fingerprint_of(model, note.get("newly_initialised", ()))
    if found != wanted:
        raise InlayError(
            f"{place} belongs to another base model: it was trained on {note.get('base_model') or 'one'} with "
            f"fingerprint {wanted[:12]}, and this one has {found[:12]}. Load the same weights, in the same precision."
        )


def _restore_head(model: nn.Module, place: Path, tensors: dict[str, Tensor], names: list[str]) -> nn.Module:
    parameters = dict(model.named_parameters())
    absent = [name for name in names if name not in parameters]
    if absent:
        raise InlayError(f"{place} holds {listed(absent, 3)}, for which the model has no place: another architecture?")
    compare(tensors, {name: parameters[name] for name in names}, place)
    model.requires_grad_(False)
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)
            parameters[name].requires_grad_(True)
    return model


def is_mixed(model: Any) -> bool:
    """Whether adapters of this model share its batches, by a tuner that was PEFT's."""
    from inlay.methods.mixture.lora import MixedTuner

    return isinstance(getattr(model, "base_model", None), MixedTuner)


def _restore_adapter(
    model: nn.Module,
    saved: AdapterFolder,
    tensors: dict[str, Tensor],
    adapter_name: str,
    *,
    vouched: bool,
    mixed: bool,
) -> nn.Module:
    register()
    method, place, path = saved.method, saved.place, saved.place / CONFIG["peft"]
    settings = read_json(path)
    vetting.check_type(path, settings)
    kind = settings.get("peft_type")
    if not isinstance(kind, str) or kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
        raise InlayError(f"{path} has peft_type={kind!r}, which is no method known here.")
    if PEFT_TYPE_TO_CONFIG_MAPPING[kind] is not method.config_class():
        raise InlayError(f"{place} holds an adapter of type {kind}, not of method {method.name!r}.")
    vetting.check_settings(path, settings, tensors, base_of(model), vouched)
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    try:
        config = PeftConfig.from_pretrained(str(place))
        config.inference_mode = True
        hooks_of(config).settle(base_of(model), tensors)
        with Allowance.of(base_of(model), held):
            if mixed and method.mixer is not None:
                adapted = _put_beside(model, method, config, tensors, adapter_name)
            else:
                adapted = _put_in(model, config, adapter_name)
    except InlayError:
        raise
    except TooLarge as error:
        raise InlayError(f"The settings in {path} do not belong to the weights beside them: {error}.") from error
    except Exception as error:  # whatever PEFT's many methods make of settings that nobody checked
        raise InlayError(f"The adapter in {place} does not fit {type(model).__name__}: {error}") from error
    expected = get_peft_model_state_dict(adapted, adapter_name=adapter_name, save_embedding_layers=False)
    compare(tensors, expected, place)
    set_peft_model_state_dict(adapted, tensors, adapter_name=adapter_name)
    use_head(adapted, adapter_name)
    return adapted


def _put_in(model: nn.Module, config: PeftConfig, adapter_name: str) -> Any:
    """The base model with an adapter, whatever others there are."""
    wrapper = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type, PeftModel)
    return mend_prompt(wrapper(base_of(model), config, adapter_name))


def _put_beside(
    model: Any, method: Method, config: PeftConfig, tensors: Mapping[str, Tensor], adapter_name: str
) -> Any:
    """The base model with an adapter beside those that share its batches, and a head as large as the saved one."""
    from inlay.methods.mixture.heads import outputs_in

    if is_mixed(model):
        model.add_adapter(adapter_name, config)
        model.set_adapter(adapter_name, inference_mode=True)
    else:
        model = method.mixed(_put_in(model, config, adapter_name))
    heads = {name.removeprefix(WRAPPED): tensor for name, tensor in tensors.items()}
    model.base_model.size_head(adapter_name, outputs_in(model, heads), 0)
    return model


def _restore_full(model: Any, place: Path, note: Mapping[str, Any]) -> nn.Module:
    files = sorted(place.glob("*.safetensors"))
    vetting.check_size(files, model)
    expected = model.state_dict()
    for path in files:
        vetting.check_kinds(vetting.read_tensors(path, note), expected, place)
    try:
        with _no_progress_bar():
            # By the config of the model that is there: the one beside the weights says how much memory to fill.
            loaded, report = type(model).from_pretrained(
                place,
                config=copy.deepcopy(model.config),
                dtype=model.dtype,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:
        raise InlayError(f"{place} cannot be loaded as {type(model).__name__}: {error}") from error
    state = loaded.state_dict()
    lacking = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    held = {name: tensor for name, tensor in state.items() if name not in lacking}
    compare(held, model.state_dict(), place)
    model.load_state_dict(held)
    return model


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], place: Path) -> None:
    """An error where tensors of an adapter are missing, left over, or of another shape than the model needs."""
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        raise InlayError(f"{place} lacks {listed(missing, 3)}: it is incomplete or belongs to another architecture.")
    if extra:
        raise InlayError(f"{place} holds {listed(extra, 3)}, for which the model has no place: another architecture?")
    for name, tensor in expected.items():
        if tensor.shape != found[name].shape:
            raise InlayError(
                f"{place}: {name} has shape {tuple(found[name].shape)}, the model needs {tuple(tensor.shape)}. "
                "The base model or the number of labels is another; from_pretrained takes the latter as num_labels."
            )
    vetting.check_kinds(found, expected, place)
