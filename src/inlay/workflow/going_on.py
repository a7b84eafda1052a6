"""Runs that begin with an adapter of an earlier one: what they must have in common, and what they take over."""

from __future__ import annotations

from pathlib import Path

from inlay.errors import InlayError
from inlay.methods import registry
from inlay.methods.folder import WEIGHTS
from inlay.records.atomic import file_digest
from inlay.records.spec import Spec


def with_init_adapter(spec: Spec) -> Spec:
    """The spec with the folder of the adapter that it begins with, and that run's settings where it gives none."""
    if spec.init_adapter is None:
        return spec
    from inlay import backbones
    from inlay.workflow.adapted import find_source

    source = find_source(spec.init_adapter)
    method = registry.get(spec.method)
    if source.method.name != method.name:
        raise InlayError(
            f"init_adapter={spec.init_adapter!r} is an adapter of {source.method.name!r}, and this run is of "
            f"{method.name!r}: give --method {source.method.name}."
        )
    if method.form != "peft":
        raise InlayError(
            f"init_adapter={spec.init_adapter!r}: {method.name} makes no adapter. "
            + (f"Begin with its checkpoint: --model {source.folder}." if method.form == "full" else "Leave it out.")
        )
    run = source.run
    if run is None:
        return spec.with_(init_adapter=str(source.folder))
    try:
        there = backbones.version(run.spec.model, run.spec.revision)
    except InlayError:  # the base model has moved since
        there = None
    if there is not None and there != backbones.version(spec.model, spec.revision):
        raise InlayError(
            f"init_adapter={spec.init_adapter!r} was trained on {run.spec.model!r}, and this run is on {spec.model!r}, "
            f"which has other weights: give --model {run.spec.model}."
        )
    return spec.with_(init_adapter=str(source.folder), settings={**run.spec.settings, **spec.settings})


def contents_of(spec: Spec) -> dict[str, str]:
    """What stands for the adapter's path in the digest of a run: its weights."""
    if spec.init_adapter is None:
        return {}
    return {"init_adapter": file_digest(Path(spec.init_adapter) / WEIGHTS["peft"])}
