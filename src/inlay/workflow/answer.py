"""Let the tasks of one adapter folder answer requests, rows of different tasks in one pass.

The folder is what `inlay tune --tasks` leaves, or `inlay export --to tasks`: an adapter for each task, and `tasks.json`
with what predicting needs; or a run of one task by a method that mixes tasks.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError, misspelt, unknown
from inlay.records.atomic import write_text
from inlay.tasks import kinds
from inlay.workflow.answer_files import locate_base, locate_tasks, read_facts
from inlay.workflow.notes import Say, or_log
from inlay.workflow.predict import check_trust, check_writable, format_lines, join, restore_adapters

if TYPE_CHECKING:
    from inlay.tasks import TaskSchema

TASK = "task"  # the field of a request that names its task
FAILED = "failed_in_training"  # the field of an answer that says what is the matter with its task
Waiting = tuple[
    str, int, dict[str, Any]
]  # a row's task, its number among that task's rows, and the row as it was encoded


@dataclass(frozen=True)
class Request:
    """A row to answer, as it came and as its task reads it."""

    task: str
    given: dict[str, Any]
    row: dict[str, Any]


class Tasks:
    """Several tasks on one base model, ready to answer."""

    def __init__(
        self,
        folder: Path | str,
        *,
        model: str | None = None,
        only: Sequence[str] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        from inlay.tasks import TaskSchema

        self.folder = locate_tasks(Path(folder))
        facts = read_facts(self.folder)
        check_trust(facts["trust_remote_code"], trust_remote_code, str(self.folder))
        found = {name: TaskSchema.from_json(schema) for name, schema in facts["tasks"].items()}
        for name in only or ():
            if name not in found:
                raise unknown("task", name, found)
        self.schemas: dict[str, TaskSchema] = {n: s for n, s in found.items() if only is None or n in only}
        self.failed = {name: why for name, why in facts["failed"].items() if name in self.schemas}
        self.spec = settings_of(facts, next(iter(found))).with_(trust_remote_code=trust_remote_code)
        base = model or locate_base(self.folder, facts)
        first = next(iter(found.values()))
        spec, names = self.spec.with_(model=base), list(self.schemas)
        self.model, backbone = restore_adapters(spec, first, self.folder, names, mixed=True)
        self.processor, self.fingerprint = backbone.processor, backbone.fingerprint

    @cached_property
    def place(self) -> Any:
        """Where the model runs; it is put there once, since going through the pieces of many tasks takes long."""
        from inlay.training.batches import Placement

        place = Placement.of(self.spec)
        self.model.to(place.device).eval()
        return place

    def request(self, given: Any, number: int = 1, source: str = "requests") -> Request:
        """A request as its task reads it; an error that names the request where it cannot be read."""
        task = pick_task(given, self.schemas, number, source)
        return Request(task, dict(given), self.schemas[task].row(given, source, number))

    def answer(self, requests: Sequence[Request], *, probabilities: bool = False) -> list[dict[str, Any]]:
        """An answer to each request, in order: its own fields and what its task says of it; of a task that could not be
        trained to the end, that too. `probabilities` adds those of all classes, where there are classes."""
        places: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            places.setdefault(request.task, []).append(i)
        rows = {task: [requests[i].row for i in own] for task, own in places.items()}
        writes = any(self.schemas[task].writes_text for task in places)
        found: list[dict[str, Any]] = [{} for _ in requests]
        for task, answers in (self._written(rows) if writes else self._mixed(rows, probabilities)).items():
            told = {FAILED: self.failed[task]} if task in self.failed else {}
            for i, answer in zip(places[task], answers, strict=True):
                found[i] = join(requests[i].given, answer | told)
        return found

    def _written(self, rows: Mapping[str, Sequence[Any]]) -> dict[str, list[dict[str, Any]]]:
        """Texts, rows of all tasks together that write equally many tokens."""
        from inlay.training.generation import plan_generation, write_texts

        queues: dict[tuple[int, tuple[int, ...]], list[Waiting]] = {}
        for task, own in rows.items():
            most, length = plan_generation(self.model, self.schemas[task], self.processor, self.spec.max_length)
            encoded = self.schemas[task].encode_inputs(own, self.processor, length)
            queues.setdefault((most, self.schemas[task].stops(self.processor)), []).extend(
                (task, i, encoded[i]) for i in range(len(own))
            )
        texts: dict[str, list[str]] = {task: [""] * len(own) for task, own in rows.items()}
        for (most, ends), queue in queues.items():
            for part, batch in self._batches(queue, generation=True):
                for (task, i, _), text in zip(
                    part, write_texts(self.model, batch, self.processor, most, self.place, ends), strict=True
                ):
                    texts[task][i] = text
        return {task: self.schemas[task].decode(own) for task, own in texts.items()}

    def _mixed(self, rows: Mapping[str, Sequence[Any]], probabilities: bool) -> dict[str, list[dict[str, Any]]]:
        """Classes and values, rows of all tasks together."""
        import torch

        encoded, queue = self._encoded(rows)
        outputs: dict[str, list[Any]] = {task: [None] * len(own) for task, own in rows.items()}
        for part, batch in self._batches(queue):
            with torch.no_grad(), self.place.autocast():
                logits = self.model(**batch)["logits"].float().cpu().numpy()
            for (task, i, item), row in zip(part, logits, strict=True):
                own = row[..., : self.schemas[task].num_labels]
                outputs[task][i] = own[: len(item["input_ids"])] if own.ndim > 1 else own
        return {
            task: self.schemas[task].decode(_stack(own), encoded.get(task), probabilities=probabilities)
            for task, own in outputs.items()
        }

    def _encoded(self, rows: Mapping[str, Sequence[Any]]) -> tuple[dict[str, Any], list[Waiting]]:
        """The rows as the model reads them; with those that decoding needs, by task.

        Tasks that are read in the same way are read together: the tokenizer is called once for them, not once for each.
        """
        alike: dict[Any, list[str]] = {}
        for task in rows:
            alike.setdefault(_way_of_reading(self.schemas[task], task), []).append(task)
        needed, queue = {}, []
        for tasks in alike.values():
            places = [(task, i) for task in tasks for i in range(len(rows[task]))]
            first = self.schemas[tasks[0]]
            found = first.encode_inputs([rows[task][i] for task, i in places], self.processor, self.spec.max_length)
            queue += [(task, i, found[number]) for number, (task, i) in enumerate(places)]
            if len(tasks) == 1:
                needed[tasks[0]] = found
        return needed, queue

    def _batches(
        self, queue: Sequence[Waiting], generation: bool = False
    ) -> Iterator[tuple[Sequence[Waiting], dict[str, Any]]]:
        """Batches on the model's device, with the task of each row; rows of about the same length side by side."""
        from inlay.training.mixed_batches import NAMES, JointCollator

        first = next(iter(self.schemas.values()))
        collate = JointCollator(first.collator(self.processor, self.model, generation=generation))
        ordered = sorted(queue, key=lambda entry: len(entry[2].get("input_ids", ())))
        for begin in range(0, len(ordered), self.place.batch_size):
            part = ordered[begin : begin + self.place.batch_size]
            batch = collate([{NAMES: task, **item} for task, _, item in part])
            yield (
                part,
                {name: each if name == NAMES else each.to(self.place.device) for name, each in batch.items()},
            )


def answer(
    adapter: Path | str,
    requests: Path | str,
    output: Path | str | None = None,
    *,
    model: str | None = None,
    trust_remote_code: bool = False,
    probabilities: bool = False,
    say: Say | None = None,
) -> list[dict[str, Any]]:
    """The answers of an adapter folder's tasks to the requests of a file of JSON lines, each of which names its task.

    With `output` they are also written there, as JSON lines, all or nothing. `model` names the base model where it has
    moved since; it must hold the same weights. `trust_remote_code` lets code run that comes with the model: an adapter
    folder never allows it by itself. Tasks that failed in training answer all the same: `say` is told of them, and each
    of their answers has the reason in `failed_in_training`. `probabilities` adds those of all classes.
    """
    if output is not None:
        check_writable(Path(output))
    given = list(_read(Path(requests)))
    if not given:
        raise InlayError(f"There is nothing to predict in {str(requests)!r}: it has no lines.")
    facts = read_facts(locate_tasks(Path(adapter)))
    source, known = Path(requests).name, facts["tasks"]
    asked = {pick_task(each, known, number, source) for number, each in given}
    wanted = [name for name in known if name in asked]
    for line in describe_failed(facts["failed"], wanted):
        or_log(say)(line)
    tasks = Tasks(adapter, model=model, only=wanted, trust_remote_code=trust_remote_code)
    requested = [tasks.request(each, number, source) for number, each in given]
    answers = tasks.answer(requested, probabilities=probabilities)
    if output is not None:
        write_text(Path(output), "".join(format_lines(answers)))
    return answers


def describe_failed(failed: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """A line for each of these tasks that could not be trained to the end."""
    return [f"{name} failed in training: {failed[name]}" for name in names if name in failed]


def pick_task(given: Any, known: Collection[str], number: int, source: str) -> str:
    """The task that a request names (it need not where there is one); an error where it is none of the known ones, or
    the request could not be sent back."""
    if not isinstance(given, Mapping):
        raise InlayError(f"{source}, line {number}: give an object with a {TASK!r} and the task's fields.")
    task = given.get(TASK, next(iter(known)) if len(known) == 1 else None)
    if not isinstance(task, str) or task not in known:
        raise unknown(f"task in {source}, line {number}", str(task), known)
    if (wrong := find_unsayable(given)) is not None:
        raise InlayError(f"{source}, line {number} holds {wrong}.")
    return task


def find_unsayable(given: Mapping[str, Any]) -> str | None:
    """What JSON in UTF-8 cannot say: a request's own fields come back with its answer. None where all is well."""
    try:
        json.dumps(given, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return "half a character (a lone surrogate) or a number that is none"
    except RecursionError:
        return "lists within lists too many times over"
    return None


def settings_of(facts: Mapping[str, Any], task: str) -> Any:
    """A spec that loads what a folder of tasks was trained on."""
    from inlay.records.spec import Spec

    named = ("model", "method", "max_length", "precision", "batch_size", "revision", "pooling", "image_size")
    return Spec(task=task, **{name: facts[name] for name in named})


def _read(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InlayError(f"Cannot read {path}: {error}.{misspelt(path)} Give a file of JSON lines.") from error
    # Not `splitlines`: it also cuts at characters that may stand in a string of JSON as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InlayError(f"{path.name}, line {number} is not JSON: {error}.") from None


def _way_of_reading(schema: TaskSchema, task: str) -> Any:
    """The same for tasks whose rows become the same tokens. Tagged words must be found again: such a task is alone."""
    if schema.kind == kinds.TOKENS:
        return task
    marked = schema.kind if schema.kind == kinds.SPANS or schema.modality == "image" else None
    return marked, schema.fields, schema.full_template, schema.prompt_template, schema.prompt_tokens, schema.max_length


def _stack(rows: Sequence[Any]) -> Any:
    """Rows of unequal length, where tokens are labelled, filled up at the end."""
    import numpy as np

    longest = max(len(row) for row in rows)
    if rows[0].ndim < 2:
        return np.stack(rows)
    return np.stack([np.pad(row, ((0, longest - len(row)), (0, 0))) for row in rows])
