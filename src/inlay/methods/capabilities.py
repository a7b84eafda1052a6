"""Which method works on which architecture, as the probes found it; read without importing torch.

`capabilities.json` is written by `make probe` (scripts/probe_methods.py) and never by hand; the test matrix fails
when it disagrees with what the probes find.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError
from inlay.records.spec import QUANTISATIONS

if TYPE_CHECKING:
    from inlay.methods.registry import Method

FILE = "capabilities.json"


@cache
def capabilities() -> Mapping[str, Mapping[str, Any]]:
    """`methods`: by method and family, the tasks it works for; `tasks`: by family, the tasks that were probed;
    `modalities`, `kinds` and `model_types`: of each family, the last as Transformers has it; `trained`: by method,
    the parameters of BERT-base that it trains beside a new head; `quantised`: by method and quantisation, the families
    on whose quantised models it works, of the few that were tried."""
    return json.loads((files("inlay.methods") / FILE).read_text(encoding="utf-8"))


def methods_for(model_type: str, task: str | None = None) -> list[str]:
    """The methods that work on a Transformers model type, for a task or any; empty when the type was not probed."""
    known = capabilities()
    families = [family for family, kind in known["model_types"].items() if kind == model_type]
    return [
        method
        for method, by_family in known["methods"].items()
        if any(task in by_family.get(family, ()) if task else by_family.get(family) for family in families)
    ]


def share(method: Method, modality: str) -> str:
    """How many of the probed architectures of a modality a method works on."""
    known = capabilities()
    families = [family for family, kind in known["modalities"].items() if kind == modality]
    works = [family for family in families if known["methods"].get(method.name, {}).get(family)]
    if not works:
        return "-"
    return "all" if len(works) == len(families) else f"{len(works)} of {len(families)}"


def quantised_share(method: Method) -> str:
    """The quantisations of a base model on which a method works, in words."""
    works = capabilities()["quantised"].get(method.name, {})
    there = [kind for kind in QUANTISATIONS if works.get(kind)]
    return "all" if len(there) == len(QUANTISATIONS) else ", ".join(there) or "-"


def refuse_quantised(method: str, kind: str | None) -> None:
    """An error where the probes found that a method does not work on a base model that is quantised."""
    works = capabilities().get("quantised", {})
    if kind is None or method not in works or works[method].get(kind):
        return
    able = [name for name, found in works.items() if found.get(kind)]
    raise InlayError(
        f"{method} does not work on a base model whose weights are quantised ({kind}). These do: {', '.join(able)}. Or "
        "leave the quantisation out."
    )


def trained_count(method: Method) -> str:
    """What a method trains of BERT-base, in words."""
    count = capabilities()["trained"].get(method.name)
    if count is None:
        return "does not apply"
    if method.form == "head":
        return "the head"
    if count < 1e3:
        return str(count)
    return f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count / 1e3:.0f}k"


def misfits(
    methods: Iterable[str], model_type: str, task: str | None, build: Callable[[], tuple[str | None, str] | None]
) -> list[str]:
    """Those of the methods that the probes found not to work on a Transformers model type for a task.

    A type that was not probed is judged by the probed ones of its `build` (kind and modality), which is asked for then:
    decoders read a padded text's class from its padding behind PEFT's prompts, all of them alike. A task that was not
    probed leaves nothing out, nor does one that was probed on a single other type, which may lack what this one has.
    """
    known = capabilities()
    families = [family for family, kind in known["model_types"].items() if kind == model_type]
    own = bool(families)
    if not own:
        alike = build()
        families = [f for f, kind in known["kinds"].items() if (kind, known["modalities"][f]) == alike]
    probed = [family for family in families if task in known["tasks"].get(family, ())]
    if not own and len(probed) < 2:
        return []
    works = known["methods"]
    return [
        name for name in methods if probed and name in works and not any(task in works[name].get(f, ()) for f in probed)
    ]


def refuse_unfit(method: str, model: Any, task: str | None) -> None:
    """An error where the probes found that a method does not work on a model for a task; see `misfits`."""
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    if misfits([method], model_type, task, lambda: _build(model)):
        raise InlayError(
            f"{method} does not work on {type(model).__name__} ({model_type}, {task}). "
            f"{alternatives(model, method, task)}"
        )


def _build(model: Any) -> tuple[str, str] | None:
    """The kind and modality of a model; None where its anatomy is unknown."""
    from inlay.anatomy import anatomy

    try:
        parts = anatomy(model)
    except InlayError:
        return None
    return parts.kind, parts.modality


def alternatives(model: Any, without: str, task: str | None = None) -> str:
    """A sentence that names the methods that do work on a model's architecture."""
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    names = [name for name in methods_for(model_type, task) if name != without]
    return f"These work on it: {', '.join(names)}." if names else "`inlay methods` says which method works where."
