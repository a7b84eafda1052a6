"""Score a model as it is, without training, where it can be asked: one that compares images with texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inlay.errors import InlayError
from inlay.records.atomic import write_json
from inlay.records.spec import Spec
from inlay.tasks import Task, kinds
from inlay.workflow.loaded import Evaluation
from inlay.workflow.notes import Say, or_log
from inlay.workflow.predict import check_writable


def evaluate_model(
    model: str, data: Path | str, output: Path | str | None = None, *, say: Say | None = None, **given: Any
) -> Evaluation:
    """How good a model that compares images with texts is on images with classes or texts, by itself.

    All rows are scored; of data that are divided, the test rows. `given` are fields of a `Spec`: kind, text, image,
    label, template, revision, precision, batch_size, trust_remote_code. With `output` the result is also written there,
    as JSON.
    """
    from inlay import backbones
    from inlay.training import evaluate

    say = or_log(say)
    if output is not None:
        check_writable(Path(output))
    spec = Spec(model=model, method="full", data=str(data), **given)
    if spec.kind is None or not kinds.get(spec.kind).has_captions:
        raise InlayError(
            f"kind={spec.kind!r}: a model without training answers only where it compares images with texts. Give "
            f"--kind {kinds.IMAGE_TEXT}, or --run, a run that was trained."
        )
    task = read_task(spec)
    backbone = backbones.load_for(spec, task)
    notes = [*task.notes, *backbone.notes]
    metrics, _ = evaluate(backbone.model, task, "test", backbone.processor, spec, notes.append)
    for note in notes:
        say(note)
    found = Evaluation(model, task.source, len(task.test), task.metrics[0], metrics, {}, 0, notes)
    if output is not None:
        write_json(Path(output), found.to_json())
    return found


def read_task(spec: Spec) -> Task:
    """The rows to score, as the test split of a task that has no other."""
    from inlay.tasks.image_text import check_template
    from inlay.tasks.rows import number_labels
    from inlay.tasks.task import dataset
    from inlay.tasks.user_data import load

    found = load(spec)
    schema = found.schema if spec.template is None else found.schema.with_template(spec.template)
    split = "test" if "test" in found.splits else next(iter(found.splits))
    notes: Sequence[str] = found.notes
    if len(found.splits) > 1:
        notes = [*notes, f"the data are divided ({', '.join(found.splits)}): only the {split} rows are scored"]
    if schema.pairs_images and spec.template is not None:
        raise InlayError("A template makes texts of classes, and each image has a text already; leave --template out.")
    if not schema.pairs_images:
        check_template(schema.full_template)
        if len(schema.label_names or ()) < 2:
            raise InlayError(f"{found.source} has one class ({schema.label_names}): there is nothing to tell apart.")
    rows = number_labels(schema, found.splits[split], schema.name)
    empty = dataset([], schema.kind, schema.fields)
    made = dataset(rows, schema.kind, schema.fields)
    return Task(schema, empty, empty, made, source=found.source, digest="", notes=tuple(notes))
