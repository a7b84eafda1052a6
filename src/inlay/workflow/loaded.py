"""A finished run, loaded once and asked many times; and scored on labelled rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from inlay.errors import InlayError, unknown
from inlay.records.atomic import write_json
from inlay.records.store import Run, Store
from inlay.tasks import TaskSchema, kinds
from inlay.tasks.new_rows import is_path, read
from inlay.tasks.scored_rows import read_labelled
from inlay.workflow.notes import Say, or_log
from inlay.workflow.predict import LoadOptions, check_writable, join, restore
from inlay.workflow.settle import select_adapter
from inlay.workflow.tune import DEFAULT_OUT, select_metrics

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Evaluation:
    """How good a run is on labelled rows: its own metrics on `examples` of them, which came from `source`.

    `metric` is the one that the task is judged by. `test` are the metrics of the run's own test split, of
    `test_examples` rows, to set beside them.
    """

    run: str
    source: str
    examples: int
    metric: str
    metrics: dict[str, float]
    test: dict[str, float]
    test_examples: int
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The evaluation as JSON-ready data."""
        return dict(vars(self))


class LoadedRun:
    """A finished run's model in memory, for one of its tasks. `load` makes one."""

    def __init__(
        self,
        run: Run,
        *,
        task: str | None = None,
        model: str | None = None,
        trust_remote_code: bool = False,
        say: Say | None = None,
        labels: Sequence[str] | None = None,
        template: str | None = None,
    ) -> None:
        run.verify()
        known = run.record.get("tasks") or {run.record["task"]["schema"]["name"]: run.record["task"]}
        if task is None and len(known) > 1:
            raise InlayError(
                f"The run {run.id} has several tasks, {', '.join(known)}: choose one with task=, or name the one of "
                f"each row in a file of JSON lines, and give --adapter {run.adapter} and that file."
            )
        self.run, self.spec, self.task = run, run.spec, task or next(iter(known))
        if self.task not in known:
            raise unknown("task", self.task, known)
        self._known = known[self.task]
        own = self.schema = TaskSchema.from_json(self._known["schema"])
        self._say = or_log(say)
        if labels is not None or template is not None:
            self.schema = with_classes(own, labels, template, f"The run {run.id}")
            if own.temperature != self.schema.temperature:
                self._say(
                    "the run's probabilities are calibrated for its own classes and template: with others they are "
                    "those of the model's outputs as they are"
                )
        self._base, self._trust = model, trust_remote_code
        self._parts: tuple[Any, Any] | None = None
        self.left_out: dict[int, str] = {}
        if self.task in (failed := run.record.get("failed") or {}):
            self._say(f"{self.task} failed in training: {failed[self.task]}")

    def __repr__(self) -> str:
        return f"<LoadedRun {self.run.id}: {self.schema.kind}>"

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """The classes, in the order of the model's outputs; None where there are none."""
        return self.schema.label_names

    @property
    def model(self) -> Any:
        """The adapted model, a module of torch's; loaded when it is first needed."""
        return self._loaded()[0]

    @property
    def processor(self) -> Any:
        """The tokenizer or image processor."""
        return self._loaded()[1]

    def predict(
        self, rows: Any, *, probabilities: bool = False, top_k: int | None = None, skip_unreadable: bool = False
    ) -> list[dict[str, Any]]:
        """A dict for each row, in order: its own columns, and what the model says.

        `rows` is a list of mappings or, where one text is read, of texts; a mapping of columns; a DataFrame; or the
        path of a file or a folder of images. Images are paths, Pillow's, or arrays of NumPy's. Classes have `label` and
        `score`, and with `probabilities` those of all; a value is `value`, tags are `tags`, what a model writes is
        `text`. Where a column has such a name already, it keeps it, and what is predicted is called `predicted_<name>`.

        A `score` is the softmax of the model's outputs: as they were trained, which is often too sure of itself, or
        over the temperature that a run with `calibrate` chose on its validation rows (`schema.temperature`).

        `top_k` adds the so many likeliest classes, the likeliest first. With `skip_unreadable` rows and images that
        cannot be read are left out: `left_out` then has their positions, from 0, and the reasons.
        """
        if self.schema.pairs_images:
            raise InlayError(
                f"The run {self.run.id} compares images with texts, and has no classes: name some with --labels "
                "(labels=), as in cat,dog. `inlay embed` gives vectors of images and of texts."
            )
        self._check_classes(probabilities, top_k)
        self.left_out = {}
        inputs = read(self.schema, rows, self.left_out if skip_unreadable else None)
        if not inputs.rows:
            if is_path(rows):
                raise InlayError(f"There is nothing to predict in {str(rows)!r}: it has no rows.")
            return []
        answers = self.answer(inputs.given, inputs.rows, probabilities=probabilities, top_k=top_k)
        if self.left_out:
            self._say(f"left out {len(self.left_out):,} of {len(self.left_out) + len(answers):,} rows, unreadable:")
            for number, why in self.left_out.items():
                self._say(f"  row {number + 1}: {why}")
        return answers

    def _check_classes(self, probabilities: bool, top_k: int | None) -> None:
        if top_k is not None and top_k < 1:
            raise InlayError(f"top_k={top_k}: give how many of the likeliest classes, 1 or more.")
        for wanted, what, how in (
            (probabilities, "probabilities are", "--probabilities (probabilities=True)"),
            (top_k is not None, "the likeliest classes are", "--top-k (top_k=...)"),
        ):
            if wanted and not kinds.get(self.schema.kind).has_probabilities:
                raise InlayError(
                    f"{what} those of a row's classes, and {self.run.id} is of kind {self.schema.kind!r}. Leave {how} "
                    "out."
                )

    def answer(
        self,
        given: Sequence[Mapping[str, Any]],
        rows: Sequence[Any],
        *,
        probabilities: bool = False,
        top_k: int | None = None,
    ) -> list[dict[str, Any]]:
        """As `predict`, of `rows` as the task reads them; `given` are the same rows as they came."""
        from inlay.training import predict as infer

        predictions, encoded = infer(self.model, self.schema, rows, self.processor, self.spec)
        if cut := getattr(encoded, "cut", 0):
            length = self.schema.max_length
            too_long = f"longer than {length} tokens"
            if self.schema.writes_text:
                too_long += " with the room for an answer"
            self._say(f"{cut:,} of {len(rows):,} texts are {too_long} and were cut")
        answers = self.schema.decode(predictions, encoded, probabilities=probabilities or top_k is not None)
        if top_k is not None:
            answers = [_with_likeliest(answer, top_k, probabilities) for answer in answers]
        return [join(row, answer) for row, answer in zip(given, answers, strict=True)]

    def embed(self, rows: Any, *, batch_size: int | None = None) -> np.ndarray:
        """A vector of length 1 for each text, N x D, in order. `rows` are given as to `predict`; where the model
        compares images with texts, they are either."""
        from inlay.workflow.embed import make_vectors, read_things

        return make_vectors(self, read_things(self.schema, rows), batch_size, self._say)

    def evaluate(self, rows: Any, *, label: str | None = None) -> Evaluation:
        """The run's own metrics on labelled rows, which are given as to `predict`.

        `label` names their column of labels, where it cannot be told. A label that the run has not learnt is an error;
        rows without one are left out, and counted in the notes.
        """
        from inlay.training import evaluate

        task = read_labelled(self.schema, rows, label or select_adapter(self.spec, self.task).label)
        spec = self.spec.with_(max_length=self.schema.max_length or self.spec.max_length)
        notes = list(task.notes)
        metrics, _ = evaluate(self.model, task, "test", self.processor, spec, notes.append)
        for note in notes:
            self._say(note)
        record, known = self.run.record, self._known
        if self.schema.kind != known["schema"]["kind"]:  # pairs, asked for classes: scored by other metrics
            record, known = {"metric": self.schema.metrics[0], "metrics": {}}, {}
        return Evaluation(
            run=self.run.id,
            source=task.source,
            examples=len(task.test),
            metric=known.get("metric", record["metric"]),
            metrics=metrics,
            test=select_metrics(self.spec, record["metrics"].get("test", {}), self.task),
            test_examples=known.get("examples", {} if self.spec.tasks else record.get("examples", {})).get("test", 0),
            notes=notes,
        )

    def _loaded(self) -> tuple[Any, Any]:
        if self._parts is None:
            self._parts = restore(self.run, self.schema, self._base, task=self.task, trust_remote_code=self._trust)
        return self._parts


def with_classes(schema: TaskSchema, names: Sequence[str] | None, template: str | None, what: str) -> TaskSchema:
    """The schema of a model that compares images with texts, with other classes or another template for their captions;
    an error where `what` does not compare them.

    A temperature is kept only for the captions that it was chosen for, and class weights for the classes."""
    from inlay.tasks.image_text import check_template

    if not schema.has_captions:
        raise InlayError(
            f"{what} is of kind {schema.kind!r}, whose classes are those of its head: leave --labels and --template "
            f"out. They are of models that compare images with texts ({kinds.IMAGE_TEXT})."
        )
    given = tuple(names if names is not None else schema.label_names or ())
    if len(given) < 2 or len(set(given)) < len(given) or not all(name.strip() for name in given):
        raise InlayError(f"labels={','.join(given)!r}: give two or more different classes, as in cat,dog.")
    if template is not None:
        check_template(template)
    columns = {name: column for name, column in schema.columns.items() if name == "image"}
    made = replace(
        schema,
        kind=kinds.IMAGE_TEXT_CLASSES,
        fields=kinds.get(kinds.IMAGE_TEXT_CLASSES).fields,
        metrics=kinds.get(kinds.IMAGE_TEXT_CLASSES).metrics,
        label_names=given,
        columns=columns,
        template=template or (schema.template if schema.label_names else None),
        class_weights=schema.class_weights if given == schema.label_names else None,
    )
    return made if made.captions == schema.captions else replace(made, temperature=None)


def _with_likeliest(answer: dict[str, Any], count: int, probabilities: bool) -> dict[str, Any]:
    """An answer with its likeliest classes, the likeliest first, in place of all probabilities or before them."""
    shares = answer.pop("probabilities")
    best = sorted(shares.items(), key=lambda item: -item[1])[:count]
    more = {"probabilities": shares} if probabilities else {}
    return {**answer, "top_k": [{"label": label, "score": share} for label, share in best], **more}


def load(
    run: Run | Path | str,
    *,
    task: str | None = None,
    model: str | None = None,
    out: Path | str = DEFAULT_OUT,
    trust_remote_code: bool = False,
    say: Say | None = None,
    labels: Sequence[str] | None = None,
    template: str | None = None,
) -> LoadedRun:
    """A finished run, ready to answer: `inlay.load("runs/<id>").predict(["a text", "another"])`.

    `run` is a run, the path of its folder, or its name (or an unambiguous part of it) under `out`. Of a run of several
    tasks `task` names the one to answer for. `model` names the
    base model where it has moved since; it must hold the same weights. `trust_remote_code` lets code run that comes
    with the model: a run never allows it by itself. `say` receives a line for each thing a person should know; without
    it, the logger `inlay.notes` does. Where a model compares images with texts, `labels` are other classes than those
    of training, and `template` makes their captions.
    """
    how: LoadOptions = {"model": model, "out": out, "trust_remote_code": trust_remote_code, "say": say}
    how |= {"labels": labels, "template": template}
    found = open_run(run, task=task, **how)
    _ = found.model  # now, not when the first row waits
    return found


def open_run(run: Run | Path | str, *, task: str | None = None, **how: Unpack[LoadOptions]) -> LoadedRun:
    """As `load`, but the model is loaded when it is first needed: what is to be read is read, and checked, before."""
    found = find_run(run, how.pop("out", DEFAULT_OUT))
    return LoadedRun(found, task=task, **how)  # type: ignore[misc]


def find_run(run: Run | Path | str, out: Path | str = DEFAULT_OUT) -> Run:
    """A run, by itself, by its folder, or by its name (or an unambiguous part of it) under `out`."""
    return run if isinstance(run, Run) else Store(out).get(str(run))


def evaluate(
    run: Run | Path | str,
    data: Any,
    output: Path | str | None = None,
    *,
    task: str | None = None,
    label: str | None = None,
    **how: Unpack[LoadOptions],
) -> Evaluation:
    """The run's own metrics on labelled rows: a file like the one it was trained on, or rows of Python.

    `label` names the column of the labels where it is not the one of training; of a run of several tasks, `task` the
    one to score. With `output` the result is also written there, as JSON. For `run` and the rest (`model`, `out`,
    `trust_remote_code`, `say`) see `inlay.load`.
    """
    if output is not None:
        check_writable(Path(output))
    found = open_run(run, task=task, **how).evaluate(data, label=label)
    if output is not None:
        write_json(Path(output), found.to_json())
    return found
