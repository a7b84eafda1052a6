"""Rows of many adapters: from what a client sent to tokens, through the model in one pass, and to what is answered."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from inlay.backbones import pooling as poolings
from inlay.backbones.locate import find as locate_model
from inlay.backbones.pooled import WAYS, pool
from inlay.errors import InlayError
from inlay.serve.lora_set import LoraSet
from inlay.serve.reading import A_TOKEN, FEWEST_CHARACTERS, TEXTS_A_BATCH
from inlay.serve.refusals import Refusal, unknown_adapter
from inlay.tasks import TaskSchema, kinds, templates
from inlay.tasks.encode import DEFAULT_LENGTH, TextCollator, encode_texts, length_limit
from inlay.workflow.answer import find_unsayable
from inlay.workflow.generation import Continuation, Sampling, TooLong
from inlay.workflow.lora_folders import EMBEDDING
from inlay.workflow.predict import join

if TYPE_CHECKING:
    from inlay.serve.adapters import ServedAdapter

MODEL, PAIR, SCORES = "model", "text_pair", "probabilities"  # fields of a request beside those of its task
ADAPTER = "adapter"  # the field of an answer that says who gave it
ALIKE, CLOSE = 2, 16  # rows go together that have at most so many times as many tokens, or so many more
LONGEST = 4096  # tokens of a text that are read, where nothing says less
Find = Callable[[str], "ServedAdapter | None"]


@dataclass(frozen=True, eq=False)
class TokenRow:
    """A row to be read: `encoded` are its tokens, `schema` what its task reads (None: a vector is wanted)."""

    task: str
    kind: str
    given: dict[str, Any]
    schema: TaskSchema | None
    encoded: Any
    item: dict[str, Any]
    scores: bool = False

    @property
    def length(self) -> int:
        """How many tokens it has."""
        return len(self.item["input_ids"])


@dataclass(frozen=True, eq=False)
class TextRow:
    """A text to be continued."""

    task: str
    row: Continuation


class LoraRows:
    """Reads rows, and answers them by the adapters that are in `loras`."""

    def __init__(self, backbone: Any, head: kinds.Head, model: str, batch: int) -> None:
        self.tokenizer = backbone.processor
        self.loras = LoraSet(backbone, head, batch)
        self.device = self.loras.place.device
        self._own = _OwnTokenizers(self.tokenizer)
        self._collate = TextCollator(self.tokenizer)
        limit = length_limit(self.tokenizer, self.loras.base.config)
        self.max_length = min(limit or DEFAULT_LENGTH, LONGEST)
        declared = poolings.declared(locate_model(model)) if head is not kinds.LANGUAGE else None
        usual = "last" if _reads_forward(model) else "mean"
        self.pooling: str = declared if declared in WAYS else usual
        if self.loras.writer is not None:
            self.loras.writer.encode_with = lambda: self._own.tokenizer

    @property
    def context(self) -> int | None:
        """The most tokens that a text to be continued and its answer may have."""
        return None if self.loras.writer is None else self.loras.writer.context

    # ---- from requests to rows: in any thread

    def read(self, served: ServedAdapter, given: Mapping[str, Any], most: int | None) -> tuple[TokenRow, float]:
        """A request as its adapter's task reads it, and the part of a batch that it fills."""
        fields = {key: value for key, value in given.items() if key not in (MODEL, SCORES)}
        if (wrong := find_unsayable(given)) is not None:
            raise Refusal(400, f"The request holds {wrong}.")
        if SCORES in given and not isinstance(given[SCORES], bool):
            raise Refusal(400, f"{SCORES!r} says whether those of all classes are wanted: true or false.")
        schema = served.schema
        try:
            if schema is None:
                return self._vector(served, given, given.get("text"), most)
            schema, fields = _adjusted(
                schema, fields, described=served.adapter is not None and bool(served.adapter.schema)
            )
            row = schema.row(fields, "the request", 1)
        except InlayError as error:
            if isinstance(error, Refusal):
                raise
            raise Refusal(400, str(error)) from None
        size = sum(len(str(value)) if not isinstance(value, list) else sum(map(len, value)) for value in row.values())
        load = self._check_size(size, most, served.name)
        encoded = schema.encode_inputs([row], self._own.tokenizer, schema.max_length or self.max_length)
        scores = bool(given.get(SCORES)) and kinds.get(schema.kind).has_probabilities
        return TokenRow(served.name, served.kind, dict(given), schema, encoded, encoded[0], scores), load

    def vector(self, served: ServedAdapter, text: Any, most: int | None) -> tuple[TokenRow, float]:
        """A text of which a vector is wanted."""
        if served.schema is not None and served.adapter is not None:
            raise Refusal(
                400,
                f"{served.name!r} is an adapter for {served.kind}, which gives no embeddings. Adapters of the task "
                "type FEATURE_EXTRACTION do, and so does the base model by its own name.",
            )
        return self._vector(served, {}, text, most)

    def _vector(
        self, served: ServedAdapter, given: Mapping[str, Any], text: Any, most: int | None
    ) -> tuple[TokenRow, float]:
        if not isinstance(text, str):
            raise Refusal(400, "Give the text to embed in 'text', a string.")
        if (wrong := find_unsayable({"text": text})) is not None:
            raise Refusal(400, f"The request holds {wrong}.")
        load = self._check_size(len(text), most, served.name)
        trained = None if served.adapter is None or served.adapter.schema is None else served.adapter.schema.max_length
        length = min(self.max_length, trained or self.max_length)
        columns, _ = encode_texts([{"text": text}], "{text}", self._own.tokenizer, length)
        item = {key: values[0] for key, values in columns.items()}
        return TokenRow(served.name, EMBEDDING, dict(given), None, None, item), load

    def _check_size(self, size: int, most: int | None, name: str) -> float:
        most = most or max(FEWEST_CHARACTERS, A_TOKEN * self.max_length)
        if size > most:
            raise Refusal(413, f"The text has {size:,} characters; {name!r} reads at most {most:,}.")
        return size / (TEXTS_A_BATCH * most)

    def begin(
        self,
        served: ServedAdapter,
        text: str,
        sampling: Sampling,
        tell: Callable[[str], None] | None = None,
        *,
        whole: bool = False,
        most: int | None = None,
    ) -> tuple[TextRow, float]:
        """A text that the model is to continue; `whole`: it begins with all that the model reads first."""
        writer = self.loras.writer
        if writer is None or served.kind == EMBEDDING or (served.schema and not served.schema.writes_text):
            raise Refusal(400, f"{served.name!r} is served for {served.kind}: it writes no texts.")
        if (wrong := find_unsayable({"text": text})) is not None:
            raise Refusal(400, f"The request holds {wrong}.")
        most = most or max(FEWEST_CHARACTERS, A_TOKEN * (self.context or 0))
        if len(text) > most:
            raise Refusal(413, f"The text has {len(text):,} characters; at most {most:,} are read.")
        try:
            row = writer.begin(text, sampling, before=[] if whole else None, tell=tell)
        except TooLong as error:
            raise Refusal(413, str(error)) from None
        except InlayError as error:
            raise Refusal(400, str(error)) from None
        return TextRow(served.name, row), len(text) / (TEXTS_A_BATCH * most)

    def prompt_of(self, served: ServedAdapter, given: Mapping[str, Any]) -> str:
        """The text that an adapter which writes is to continue, of a request with its task's fields."""
        schema = served.schema
        if schema is None or served.adapter is None or served.adapter.schema is None:
            if not isinstance(given.get("text"), str):
                raise Refusal(400, "Give the text to continue in 'text', a string.")
            return str(given["text"])
        try:
            row = schema.row({key: value for key, value in given.items() if key != MODEL}, "the request", 1)
            return templates.render(schema.full_template, row, None)[0]
        except InlayError as error:
            raise Refusal(400, str(error)) from None

    # ---- from rows to answers: in the thread that owns the model

    def answer(self, requests: Sequence[TokenRow | TextRow], find: Find) -> list[dict[str, Any]]:
        """An answer to each, in order."""
        found: list[dict[str, Any]] = [{} for _ in requests]
        written = [i for i, each in enumerate(requests) if isinstance(each, TextRow)]
        if written:
            texts: list[Any] = [requests[i] for i in written]
            for i, answer in zip(written, self._write(texts, find), strict=True):
                found[i] = answer
        read = [i for i, each in enumerate(requests) if isinstance(each, TokenRow)]
        for part in _of_like_length(read, [requests[i] for i in read]):  # type: ignore[misc]
            tokens: list[Any] = [requests[i] for i in part]
            for i, answer in zip(part, self._pass(tokens, find), strict=True):
                found[i] = answer
        return found

    def _write(self, requests: Sequence[TextRow], find: Find) -> list[dict[str, Any]]:
        served = [_still(each, find) for each in requests]
        for each in requests:
            if each.row.written:  # a batch that failed is tried again in halves
                each.row.again()
        self.loras.generate([each.row for each in requests], [each.within for each in served])
        return [
            {
                "model": each.task,
                "text": each.row.text,
                "tokens": len(each.row.written),
                "finish": each.row.finish,
                ADAPTER: own.tag(),
            }
            for each, own in zip(requests, served, strict=True)
        ]

    def _pass(self, requests: Sequence[TokenRow], find: Find) -> list[dict[str, Any]]:
        """Rows of any adapters through the model together; then each through its own head, where that is another's."""
        served = [_still(each, find) for each in requests]
        batch = self._collate([each.item for each in requests])
        logits, states = self.loras.run(batch, [each.within for each in served])
        outputs: list[Any] = [None] * len(requests)
        apart: dict[str, list[int]] = {}
        for i, own in enumerate(served):
            if own.head is not None:
                apart.setdefault(own.name, []).append(i)
            elif requests[i].schema is not None:
                outputs[i] = logits[i, ..., : own.outputs]
        for rows in apart.values():
            head = served[rows[0]].head
            assert head is not None
            made = head.run(states[rows], {key: value[rows] for key, value in batch.items()})
            for i, row in zip(rows, made, strict=True):
                outputs[i] = row
        vectors = [i for i, each in enumerate(requests) if each.schema is None]
        if vectors:
            mask = batch["attention_mask"][vectors].bool().to(states.device)
            pooled = pool(states[vectors].float(), mask, self.pooling)
            for i, row in zip(vectors, torch.nn.functional.normalize(pooled, dim=-1), strict=True):
                outputs[i] = row
        return [
            _said(each, own, row.float().cpu().numpy())
            for each, own, row in zip(requests, served, outputs, strict=True)
        ]


class _OwnTokenizers(threading.local):
    """A tokenizer for each thread: it is for one at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = copy.deepcopy(tokenizer)


def _said(request: TokenRow, served: ServedAdapter, output: np.ndarray) -> dict[str, Any]:
    """What is answered to a row."""
    if not np.isfinite(output).all():
        raise Refusal(500, f"{served.name!r} answers with what is not a number.")
    if request.schema is None:
        said: dict[str, Any] = {"embedding": [float(value) for value in output], "tokens": request.length}
    else:
        if request.schema.predicts == "tags":
            output = output[: request.length]
        (said,) = request.schema.decode(output[None], request.encoded, probabilities=request.scores)
    given = {key: value for key, value in request.given.items() if key != SCORES}
    return join(given, said | {ADAPTER: served.tag()})


def _still(request: TokenRow | TextRow, find: Find) -> ServedAdapter:
    """What a row was read for; a `Refusal` where another stands in its place by now."""
    served = find(request.task)
    if served is None:
        raise unknown_adapter(request.task, ())
    if (
        isinstance(request, TokenRow)
        and request.schema is not None
        and request.schema.label_names != (None if served.schema is None else served.schema.label_names)
    ):
        raise Refusal(503, f"{request.task!r} has just become another adapter. Ask again.", {"Retry-After": "1"})
    return served


def _adjusted(schema: TaskSchema, fields: dict[str, Any], described: bool) -> tuple[TaskSchema, dict[str, Any]]:
    """A text may be called `text` whatever the only field of a task is called; words may come as one text. An adapter
    that nobody described reads a pair of texts too."""
    from dataclasses import replace

    only = schema.columns.get(schema.fields[0], schema.fields[0]) if len(schema.fields) == 1 else None
    if only is not None and only not in fields and isinstance(fields.get("text"), str):
        fields = {**fields, only: fields["text"]}
    if schema.predicts == "tags" and only is not None and isinstance(fields.get(only), str):
        fields = {**fields, only: fields[only].split()}
    if not described and schema.kind in (kinds.CLASSIFICATION, kinds.REGRESSION) and PAIR in fields:
        schema = replace(schema, fields=("text", PAIR))
    return schema, fields


def _of_like_length(places: Sequence[int], rows: Sequence[TokenRow]) -> Iterator[list[int]]:
    """The places in parts, each of rows of about the same length: a short row beside a long one is mostly padding."""
    ordered = sorted(zip(places, rows, strict=True), key=lambda each: each[1].length)
    part: list[int] = []
    shortest = math.inf
    for place, row in ordered:
        if part and row.length > max(ALIKE * shortest, shortest + CLOSE):
            yield part
            part = []
        if not part:
            shortest = row.length
        part.append(place)
    if part:
        yield part


def _reads_forward(model: str) -> bool:
    """Whether only the last token has read the whole text."""
    from inlay.backbones import locate

    return locate.kind(model) == "decoder"
