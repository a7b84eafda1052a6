"""Write a model with its adapter as an ONNX file, for programs without Python: folded into the weights where the method
can be, as it is where the tracer takes it.

The file is run by onnxruntime on batches of several sizes before it counts: it gives what the model gives, or there is
none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from inlay.console import quiet
from inlay.errors import InlayError, first_line
from inlay.methods.merging import fold
from inlay.methods.plain import base_of
from inlay.records.atomic import write_folder
from inlay.tasks import kinds
from inlay.tasks.schema import TaskSchema
from inlay.tasks.templates import SEPARATOR
from inlay.workflow.adapted import EXAMPLES, Adapted, find_source, load_adapted, make_example
from inlay.workflow.notes import Say, or_log

FILE, FACTS, OUTPUT = "model.onnx", "onnx.json", "logits"
WRITTEN = ("class", "labels", "shares", "value", "tags")  # what the head's outputs say by themselves
CLOSE = 1e-4  # of the largest output, or of 1 where all are smaller
# Batches that the file is checked on beside the one it was traced with: others in number and in length.
OTHERS = (("one text alone",), ("a text", "a second one that is somewhat longer than the first", "and a third text"))


def export_onnx(
    adapter: Path | str, target: Path, *, task: str | None = None, model: str | None = None, say: Say | None = None
) -> Path:
    """Write the model of a run, or of an adapter's folder, into the new folder `target`: model.onnx, onnx.json (labels,
    inputs, template, scale), the tokenizer or image processor, and the model's config.

    Batch and length are free. It is written whole or not at all, and only if onnxruntime gives the same to 1e-4.
    """
    say = or_log(say)
    _check_installed()
    adapted = load_adapted(find_source(adapter, task), model=model, say=say)
    _check_kind(adapted)
    example = _make_batch(adapted, EXAMPLES)
    whole = _Logits(_plain(adapted, example, say), list(example))

    def fill(place: Path) -> None:
        _trace(whole, example, place / FILE, adapted)
        apart = max(_compare(whole, batch, place / FILE) for batch in _batches(adapted, example))
        if not apart <= CLOSE:
            raise InlayError(
                f"The ONNX file of this {adapted.method.name} gives other outputs than the model (they differ by "
                f"{apart:.2g} of the largest; {CLOSE:g} is allowed), so nothing was written. `inlay merge` writes a "
                "checkpoint of Transformers."
            )
        with quiet():
            adapted.processor.save_pretrained(place)
            base_of(whole.model).config.save_pretrained(place)
        facts = _describe(adapted, whole.names, apart)
        (place / FACTS).write_text(json.dumps(facts, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")
        say(f"checked by onnxruntime: outputs differ by at most {apart:.1g} of the largest")

    write_folder(target, fill)
    return target


class _Logits(nn.Module):
    """A model as a function of tensors in a fixed order."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model.eval(), names

    def forward(self, *inputs: Tensor) -> Tensor:
        found: Tensor = self.model(**dict(zip(self.names, inputs, strict=True))).logits.float()
        return found


def _check_installed() -> None:
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InlayError(f"ONNX needs {error.name}, which is not installed: pip install 'inlay[onnx]'.") from None


def _check_kind(adapted: Adapted) -> None:
    """An error for a model whose inputs no plain tokenizer or image processor makes, and for one that writes."""
    writable = (name for name, kind in kinds.TABLE.items() if kind.predicts in WRITTEN and not kind.has_captions)
    able = [name for name in writable if name != kinds.SPANS]
    if adapted.kind not in able:
        raise InlayError(
            f"This adapter is of kind {adapted.kind!r}, which is not written as ONNX; {', '.join(able)} are. `inlay "
            "merge` writes a checkpoint, and `inlay serve` serves it."
        )
    if adapted.schema is not None and adapted.schema.prompt_tokens:
        raise InlayError(
            f"{adapted.method.name} has places for prompts in the text, which inlay alone prepares: it is not written "
            "as ONNX. `inlay serve` serves it."
        )


def _plain(adapted: Adapted, example: Mapping[str, Any], say: Say) -> nn.Module:
    method = adapted.method
    if method.form == "peft" and not method.mergeable:
        say(f"{method.name} stays beside the weights in the file: {method.unmergeable}")
        return adapted.model.eval()
    with quiet():
        return fold(adapted.model, method, example, torch.float32).eval()


def _trace(whole: _Logits, example: Mapping[str, Tensor], path: Path, adapted: Adapted) -> None:
    free = torch.export.Dim.DYNAMIC
    shapes = tuple({0: free} if adapted.modality == "image" else {0: free, 1: free} for _ in whole.names)
    try:
        with _silent(), torch.no_grad():
            program = torch.onnx.export(
                whole,
                tuple(example[name] for name in whole.names),
                dynamo=True,
                dynamic_shapes=(shapes,),
                input_names=whole.names,
                output_names=[OUTPUT],
                verbose=False,
            )
        assert program is not None
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()  # where in which source it came from, with paths of this machine
        program.save(str(path))
    except Exception as error:  # whatever the tracer of this version raises: none of it is for users
        cause = error.__cause__ or error
        raise InlayError(
            f"{type(base_of(whole.model)).__name__} with {adapted.method.name} could not be traced for ONNX "
            f"({type(cause).__name__}: {first_line(cause)}). `inlay merge` and `inlay serve` need no trace; "
            "docs/onnx.md lists the architectures that were traced."
        ) from error


@contextmanager
def _silent() -> Iterator[None]:
    """Without the tracer's own logs and warnings, which speak to whoever writes models."""
    import logging
    import warnings

    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    before = [each.level for each in loggers]
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        for each in loggers:
            each.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for each, level in zip(loggers, before, strict=True):
                each.setLevel(level)


def _batches(adapted: Adapted, example: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    yield dict(example)
    for texts in (*OTHERS, EXAMPLES * 2):
        yield _make_batch(adapted, texts)


def _make_batch(adapted: Adapted, texts: Sequence[str]) -> dict[str, Tensor]:
    """All that the tokenizer or image processor makes of these texts, in pairs where the task reads pairs."""
    if adapted.modality == "image":
        return make_example(adapted, texts)
    paired = adapted.schema is not None and f"{{{SEPARATOR}}}" in adapted.schema.full_template
    seconds = [[text[::-1] for text in texts]] if paired else []
    length = adapted.schema.max_length if adapted.schema is not None else None
    cut: dict[str, Any] = {"truncation": True, "max_length": length}
    return dict(adapted.processor(list(texts), *seconds, padding=True, return_tensors="pt", **cut))


@torch.no_grad()
def _compare(whole: _Logits, batch: Mapping[str, Tensor], path: Path) -> float:
    """How far apart the outputs are, as a share of the largest."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        (found,) = session.run([OUTPUT], {name: batch[name].numpy() for name in whole.names})
    except Exception as error:  # onnxruntime's own classes, which it does not name
        raise InlayError(f"onnxruntime does not run the file ({first_line(error)}), so nothing was written.") from error
    wanted = whole(*(batch[name] for name in whole.names)).numpy()
    if found.shape != wanted.shape or not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(found - wanted).max() / max(1.0, np.abs(wanted).max()))


def _describe(adapted: Adapted, names: list[str], apart: float) -> dict[str, Any]:
    """What a program needs beside the file."""
    import onnxruntime

    schema: TaskSchema | None = adapted.schema
    config: Any = base_of(adapted.model).config
    labels = [config.id2label[i] for i in sorted(config.id2label)] if kinds.get(adapted.kind).has_classes else None
    facts: dict[str, Any] = {
        "kind": adapted.kind,
        "method": adapted.method.name,
        "inputs": names,
        "output": OUTPUT,
        "labels": labels,
        "checked": {"onnxruntime": onnxruntime.__version__, "largest_difference": apart},
    }
    if schema is not None and adapted.modality == "text":
        facts |= {"template": schema.full_template, "max_length": schema.max_length}
    if schema is not None and schema.predicts == "value":
        facts["value"] = {"scale": schema.deviation, "shift": schema.mean}
    if schema is not None and schema.temperature is not None:
        facts["temperature"] = schema.temperature
    thresholds = getattr(schema, "thresholds", None)
    if thresholds:
        facts["thresholds"] = list(thresholds)
    return facts
