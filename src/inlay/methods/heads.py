"""Which parts of a model its checkpoint did not have: the head, a pooler, whatever else must be trained and saved.

Transformers marks every parameter it loads with `_is_hf_initialized`. What lacks the mark was initialised at random:
unless it is trained and saved with the adapter, it is another one after every load. PEFT's own defaults look for
`classifier` and `score` only: they lose BERT's fresh pooler and the heads of T5 and ModernBERT, and know no image task.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from inlay.backbones.quantised import kind_of_weight
from inlay.errors import InlayError
from inlay.methods.plain import base_of, plain_modules, plain_name, plain_parameters

LOADED = "_is_hf_initialized"
# Read in pretraining only, and often left out of checkpoints.
UNUSED = ("mask_token",)
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def newly_initialised(model: nn.Module, loading_info: Mapping[str, Any] | None = None) -> list[str]:
    """The names of the modules that hold parameters the checkpoint did not have, each as high up as it is all new.

    `loading_info` is what `from_pretrained(..., output_loading_info=True)` returns beside the model; without it the
    marks on the parameters are read. A model made from a config has none: then it is the head, as the anatomy has it.
    """
    parameters = {
        name: parameter
        for name, parameter in plain_parameters(model).items()
        # What is quantised was loaded, whatever marks the quantiser has left on it.
        if name.rpartition(".")[2] not in UNUSED and kind_of_weight(parameter) is None
    }
    if loading_info is not None:
        mismatched = {key if isinstance(key, str) else key[0] for key in loading_info.get("mismatched_keys", ())}
        missing = mismatched.union(loading_info.get("missing_keys", ()))
        new = [name for name in parameters if name in missing]
    else:
        new = [name for name, parameter in parameters.items() if not getattr(parameter, LOADED, False)]
        if len(new) == len(parameters):
            from inlay.anatomy import head_modules

            if getattr(base_of(model), "name_or_path", ""):
                warnings.warn(
                    "The marks of what was loaded are gone from this model (copying it loses them): only its head is "
                    "taken to be new. Name other new parts, such as a pooler, in newly_initialised.",
                    stacklevel=2,
                )
            return [plain_name(name) for name in head_modules(base_of(model))]
    modules = dict(plain_modules(model))
    found = dict.fromkeys(_module_to_keep(name, new, parameters, modules) for name in new)
    body = getattr(base_of(model), "base_model_prefix", "")
    if body and body in found:
        raise InlayError(
            f"Nothing of the body of {type(base_of(model)).__name__} was in the checkpoint: it would be trained whole. "
            "Check that the checkpoint belongs to this architecture."
        )
    return list(found)


def _module_to_keep(
    parameter: str, new: list[str], parameters: Mapping[str, nn.Parameter], modules: Mapping[str, nn.Module]
) -> str:
    """The highest module around a new parameter in which all is new, or the leaf that holds it."""
    fresh = set(new)
    parts = parameter.split(".")[:-1]
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        within = [other for other in parameters if other.startswith(f"{name}.")]
        if fresh.issuperset(within) and not isinstance(modules[name], CONTAINERS):
            return name
    owner = ".".join(parts)
    if owner and not any(other.startswith(f"{owner}.") for other in modules):
        return owner
    raise InlayError(
        f"The checkpoint lacks {parameter}, which sits beside parts that it has; an adapter keeps whole modules only. "
        "Use a checkpoint that has it, or train everything: method full."
    )
