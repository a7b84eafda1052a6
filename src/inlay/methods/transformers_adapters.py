"""Transformers' own adapter interface, for our methods: `model.load_adapter`, which `from_pretrained` and `pipeline` of
an adapter's folder call too.

Transformers renames the keys of a saved adapter by patterns that fit LoRA. A piece of ours hangs one level deeper,
under its child, and maybe within a LoRA's wrapper: none of its keys would find its place, and the base model would
answer alone. So our adapters are loaded the way PEFT loads them, and strictly: a tensor that is missing, left over or
of another shape is an error, and the adapter is taken out again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.methods.folder import WEIGHTS, read_json
from inlay.methods.pooling_notes import HUB, agree_on_pooling, agreeing_with_note
from inlay.methods.protocol import hooks_of
from inlay.methods.register import PREFIX, wrap_once

if TYPE_CHECKING:
    from torch import Tensor


def extend(mixin: Any) -> None:
    """Let `load_adapter` of Transformers' models know our methods; everything else goes its way."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def load_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = signature(original).bind(self, *args, **kwargs).arguments
            ours = _is_ours(given)
            with agreeing_with_note(
                self, None if ours else _source(given), _hub(given)
            ):  # a config of ours says it itself
                return _load(self, given) if ours else original(self, *args, **kwargs)

        return load_adapter

    wrap_once(mixin, "load_adapter", around)


def _is_ours(given: Mapping[str, Any]) -> bool:
    from transformers.utils import find_adapter_config_file

    config = given.get("peft_config")
    kind = getattr(config, "peft_type", None)
    if config is None:
        file = find_adapter_config_file(_source(given), **_hub(given))
        kind = read_json(Path(file)).get("peft_type") if file else None
    return str(getattr(kind, "value", kind)).startswith(PREFIX)


def _source(given: Mapping[str, Any]) -> str | None:
    """The folder or the repository of the adapter."""
    found = given.get("peft_model_id") or getattr(given.get("load_config"), "pretrained_model_name_or_path", None)
    return None if found is None else str(found)


def _hub(given: Mapping[str, Any]) -> dict[str, Any]:
    """How to fetch it, where it is a repository."""
    found = dict(getattr(given.get("load_config"), "download_kwargs", None) or {})
    found |= (given.get("kwargs") or {}).get("download_kwargs") or {}
    found |= given.get("adapter_kwargs") or {}
    if given.get("local_files_only"):
        found["local_files_only"] = True
    return {name: found[name] for name in HUB if name in found}


def _load(model: Any, given: Mapping[str, Any]) -> Any:
    from peft.utils.other import ModulesToSaveWrapper
    from peft.utils.save_and_load import get_peft_model_state_dict, set_peft_model_state_dict
    from transformers.utils.loading_report import LoadStateDictInfo

    from inlay.errors import InlayError
    from inlay.methods.plain import WRAPPED
    from inlay.methods.saving import compare

    if given.get("hotswap") is True:
        raise InlayError("hotswap=True: only a LoRA can be exchanged in place. Load this adapter under another name.")
    source, name = _source(given), given.get("adapter_name") or "default"
    config, weights = _read(model, given)
    if getattr(config, "resolved", False):
        agree_on_pooling(model, config.pooling, source or "The adapter that was given")
    config.inference_mode = not given.get("is_trainable", False)
    _inject(model, config, weights, name)
    # A model that PEFT does not stand around has its own names, and a file those that it has in a PEFT model.
    weights = {key.removeprefix(WRAPPED): value for key, value in weights.items()}
    try:
        expected = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
        compare(weights, expected, Path(source or "The adapter that was given"))
        set_peft_model_state_dict(model, weights, adapter_name=name)
    except Exception:
        model.delete_adapter(name)
        raise
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper) and name in module.modules_to_save:
            # PEFT does not, where an adapter that was taken out again has left its wrapper.
            module.set_adapter(name, inference_mode=config.inference_mode)
    if config.inference_mode:
        model.eval()
    return LoadStateDictInfo(set(), set(), set(), [], {}, set())


def _read(model: Any, given: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """The adapter's settings and tensors: as they were given, or of its files, looked at before they are obeyed."""
    from peft import PeftConfig
    from transformers.utils import cached_file, find_adapter_config_file

    from inlay.methods import vetting

    config, weights, hub = given.get("peft_config"), given.get("adapter_state_dict"), _hub(given)
    if weights is None:
        weights = vetting.read_tensors(Path(cached_file(_source(given), WEIGHTS["peft"], **hub)), {})
    if config is None:
        file = Path(find_adapter_config_file(_source(given), **hub))
        vetting.check_settings(file, read_json(file), weights, model)
        config = PeftConfig.from_pretrained(str(file.parent))
    return config, weights


def _inject(model: Any, config: Any, weights: Mapping[str, Tensor], name: str) -> None:
    """Make room for the adapter, as much as its tensors account for."""
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    from inlay.errors import InlayError
    from inlay.methods.allowance import Allowance, TooLarge

    hooks_of(config).settle(model, weights)
    held = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    try:
        with Allowance.of(model, held):
            tuner = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type](model, config, adapter_name=name)
    except TooLarge as error:
        raise InlayError(f"The adapter's settings do not belong to its weights: {error}.") from error
    model._hf_peft_config_loaded = True
    tuner._cast_adapter_dtype(name)
