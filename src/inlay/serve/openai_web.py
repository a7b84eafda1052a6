"""What clients of OpenAI's interface ask: `/v1/models`, `/v1/completions`, `/v1/chat/completions`, `/v1/embeddings`.

`model` is the name of an adapter; the base model's own is the model alone.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from inlay.errors import InlayError, first_line
from inlay.serve.adapters import Adapters, ServedAdapter
from inlay.serve.batching import Batcher
from inlay.serve.gate import OPENAI, error_body
from inlay.serve.lora_rows import ADAPTER, TextRow, TokenRow
from inlay.serve.reading import Read
from inlay.serve.refusals import Refusal
from inlay.serve.settings import ServiceSettings
from inlay.serve.stops import Cut
from inlay.serve.streaming import Pieces, event, from_thread, stream
from inlay.serve.web import submit, wait_for
from inlay.workflow.generation import END, STOPPED, Sampling

FINISHED = {END: "stop", STOPPED: "stop"}  # others: "length"
COMPLETION_TOKENS = 16  # where a completion does not say, as OpenAI has it
# Settings that are not heeded, and the values with which they ask for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "modalities": (["text"],),
    "dimensions": (),
    "store": (False,),
}


class OpenAIRequest(BaseModel):
    """What all have in common. What asks for what is not done here is refused, unless it asks for nothing."""

    model_config = ConfigDict(extra="allow")

    model: str
    user: Any = None
    metadata: Any = None

    def check(self, known: Sequence[str] = ()) -> None:
        """An error for a setting that would not be heeded."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in known or value in NEUTRAL.get(name, ()):
                continue
            raise Refusal(400, f"{name}={value!r} is not served here: leave it out.")


class StreamOptions(BaseModel):
    """How a stream is told."""

    include_usage: bool = False


class Completing(OpenAIRequest):
    """How a text is continued."""

    max_tokens: int | None = None
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    def sampling(self, default: int, most: int) -> Sampling:
        """The settings of the model."""
        tokens = default if self.max_tokens is None else self.max_tokens
        if tokens > most:
            raise Refusal(400, f"max_tokens={tokens:,}: this service writes at most {most:,} (--max-tokens).")
        hot = 1.0 if self.temperature is None else self.temperature
        try:
            return Sampling(tokens, hot, 1.0 if self.top_p is None else self.top_p, self.seed)
        except InlayError as error:
            raise Refusal(400, str(error)) from None

    def stops(self) -> list[str]:
        """The texts at which it ends."""
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(found) > 4 or not all(found):
            raise Refusal(400, f"stop={self.stop!r}: give up to four texts, none of them empty.")
        return found


class Completion(Completing):
    """A text to continue, or several."""

    prompt: str | list[str]


class Message(BaseModel):
    """One turn of a conversation; `content` may be parts, of text alone."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None

    def plain(self) -> dict[str, Any]:
        """As a chat template reads it."""
        content = self.content
        if isinstance(content, list):
            if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in content):
                raise Refusal(400, "The parts of a message's content may be texts: {'type': 'text', 'text': ...}.")
            content = "".join(part["text"] for part in content)
        return {"role": self.role, "content": content or ""}


class Conversing(Completing):
    """A conversation to go on with."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None


class Embedding(OpenAIRequest):
    """Texts to embed."""

    input: str | list[str]
    encoding_format: str | None = "float"

    def texts(self, most: int) -> list[str]:
        """The texts, at most so many; an error for a form of vectors that is not known."""
        found = [self.input] if isinstance(self.input, str) else self.input
        if not found or len(found) > most:
            raise Refusal(400, f"Give from 1 to {most:,} texts as input.")
        if self.encoding_format not in (None, "float", "base64"):
            raise Refusal(400, f"encoding_format={self.encoding_format!r}: float and base64 are known.")
        return found


def add_openai(app: FastAPI, batcher: Batcher[Adapters], settings: ServiceSettings, told: Callable[[str], str]) -> None:
    """Let the application answer them."""
    hosted, begun = batcher.hosted, int(time.time())
    writing = partial(_write, batcher, settings, told)

    @app.get(f"{OPENAI}models")
    async def models() -> dict[str, Any]:
        """The base model, and every adapter."""
        return {
            "object": "list",
            "data": [_model(hosted, name, begun) for name in (hosted.name, *sorted(hosted.served))],
        }

    @app.get(f"{OPENAI}models/{{name:path}}")
    async def model(name: str) -> dict[str, Any]:
        """One of them."""
        hosted.get(name)
        return _model(hosted, name, begun)

    @app.post(f"{OPENAI}completions")
    async def completions(request: Request, asked: Completion) -> Any:
        """Continue texts."""
        asked.check()
        prompts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
        if not prompts or (asked.stream and len(prompts) > 1):
            raise Refusal(400, "Give a prompt, or a list of them; streamed is one.")
        how = asked.sampling(min(COMPLETION_TOKENS, settings.max_tokens), settings.max_tokens)
        return await writing(request, asked, (prompts, how, False), _Shape("cmpl", "text_completion", asked.model))

    @app.post(f"{OPENAI}chat/completions")
    async def chat(request: Request, asked: Conversing) -> Any:
        """Go on with a conversation, in the words of the model's own chat template."""
        asked.check()
        if asked.max_completion_tokens is not None:
            asked.max_tokens = asked.max_completion_tokens
        how = asked.sampling(settings.max_tokens, settings.max_tokens)
        text = await asyncio.get_running_loop().run_in_executor(hosted.readers, _conversation, hosted, asked)
        return await writing(request, asked, ([text], how, True), _Shape("chatcmpl", "chat.completion", asked.model))

    @app.post(f"{OPENAI}embeddings")
    async def embeddings(request: Request, asked: Embedding) -> JSONResponse:
        """A vector of length 1 for each text."""
        asked.check()
        served = hosted.get(asked.model)
        texts = asked.texts(batcher.max_queue)

        def read() -> list[Read]:
            return [Read(*hosted.rows.vector(served, text, settings.max_characters)) for text in texts]

        rows = await asyncio.get_running_loop().run_in_executor(hosted.readers, read)
        found = await answer_all(request, batcher, rows, settings.timeout)
        return JSONResponse(shape_vectors(asked, found) | {ADAPTER: found[0][ADAPTER]})


# ---- answers


class _Shape:
    """How one answer is said, whole or in pieces."""

    def __init__(self, prefix: str, kind: str, model: str) -> None:
        self.chats = kind.startswith("chat")
        self.kind, self.model = kind, model
        self.head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[tuple[str, str]], usage: Any, adapter: Any) -> dict[str, Any]:
        said = [
            {"index": i, "finish_reason": finish, "logprobs": None, **self._content(text)}
            for i, (text, finish) in enumerate(choices)
        ]
        return {**self.head, "object": self.kind, "choices": said, "usage": usage, ADAPTER: adapter}

    def part(self, text: str | None, finish: str | None, adapter: Any, *, first: bool = False) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chats else self.kind
        content: dict[str, Any] = {"text": text or ""}
        if self.chats:
            content = {"delta": ({"role": "assistant"} if first else {}) | ({} if text is None else {"content": text})}
        choice = {"index": 0, "finish_reason": finish, "logprobs": None, **content}
        return {**self.head, "object": kind, "choices": [choice], ADAPTER: adapter}

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}} if self.chats else {"text": text}


class _ChunkEvents:
    """A stream as OpenAI has it: chunks, the reason of the end, the usage where it was asked for, and `[DONE]`."""

    def __init__(self, shape: _Shape, row: TextRow, cut: Cut, served: ServedAdapter, asked: Completing) -> None:
        self._shape, self._row, self._cut, self._tag = shape, row, cut, served.tag()
        self._usage = asked.stream_options is not None and asked.stream_options.include_usage
        self._path, self._first = OPENAI, True

    def piece(self, text: str) -> str:
        said = self._cut.add(text)
        if self._cut.found:
            self._row.row.stop()
        return self._chunk(said) if said else ""

    def end(self, found: Mapping[str, Any]) -> str:
        rest = self._cut.rest()
        said = self._chunk(rest) if rest else ""
        said += event(self._shape.part(None, _finish(found, self._cut), self._tag))
        if self._usage:
            whole = self._shape.part(None, None, self._tag)
            said += event(whole | {"choices": [], "usage": _usage([self._row])})
        return said + "data: [DONE]\n\n"

    def error(self, refusal: Refusal) -> str:
        return event(error_body(refusal, self._path)) + "data: [DONE]\n\n"

    def _chunk(self, text: str) -> str:
        first, self._first = self._first, False
        return event(self._shape.part(text, None, self._tag, first=first))


async def _write(
    batcher: Batcher[Adapters],
    settings: ServiceSettings,
    told: Callable[[str], str],
    request: Request,
    asked: Completing,
    what: tuple[Sequence[str], Sampling, bool],
    shape: _Shape,
) -> Any:
    """Continue texts, in one answer or as events."""
    hosted, (texts, sampling, whole) = batcher.hosted, what
    served, stops = hosted.get(asked.model), asked.stops()
    queue: Pieces = asyncio.Queue()
    tell = from_thread(queue) if asked.stream else None
    cuts = [Cut(stops) for _ in texts]

    def begin() -> list[Read]:
        found = []
        for text, cut in zip(texts, cuts, strict=True):
            hear = tell if asked.stream else cut.hear if stops else None
            read = Read(*hosted.rows.begin(served, text, sampling, hear, whole=whole, most=settings.max_characters))
            if not asked.stream:
                cut.stop = read.request.row.stop  # type: ignore[attr-defined]
            found.append(read)
        return found

    reads = await asyncio.get_running_loop().run_in_executor(hosted.readers, begin)
    rows: list[TextRow] = [read.request for read in reads]  # type: ignore[misc]
    if tell is not None:
        (future,) = submit(batcher, reads, request)
        future.add_done_callback(lambda _: tell(None))
        say = _Told(_ChunkEvents(shape, rows[0], cuts[0], served, asked), told)
        return await stream(request, queue, (rows[0].row, future), settings.timeout, say, batcher.metrics)
    try:
        found = await answer_all(request, batcher, reads, settings.timeout)
    finally:
        for row in rows:
            row.row.stop()
    choices = [
        (cut.whole() if stops else each["text"], _finish(each, cut)) for each, cut in zip(found, cuts, strict=True)
    ]
    return JSONResponse(shape.whole(choices, _usage(rows), found[0][ADAPTER]))


class _Told:
    """Events whose errors name no path of this machine."""

    def __init__(self, events: _ChunkEvents, told: Callable[[str], str]) -> None:
        self.piece, self.end, self._events, self._told = events.piece, events.end, events, told

    def error(self, refusal: Refusal) -> str:
        return self._events.error(Refusal(refusal.status, self._told(str(refusal))))


async def answer_all(request: Request, batcher: Batcher[Any], rows: Sequence[Read], timeout: float) -> list[Any]:
    """The answers to all of them; the first error where there is one."""
    found = await wait_for(request, submit(batcher, rows, request), timeout)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def _conversation(hosted: Adapters, asked: Conversing) -> str:
    """The messages as one text, by the chat template of the model's tokenizer."""
    hosted.get(asked.model)
    tokenizer = hosted.rows.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise Refusal(
            400, f"The tokenizer of {hosted.name} has no chat template: send a whole text to {OPENAI}completions."
        )
    try:
        return str(
            tokenizer.apply_chat_template(
                [each.plain() for each in asked.messages], tokenize=False, add_generation_prompt=True
            )
        )
    except Refusal:
        raise
    except Exception as error:  # whatever a template says of messages that it does not take
        raise Refusal(400, f"The chat template of {hosted.name} refuses these messages: {first_line(error)}.") from None


def _finish(found: Mapping[str, Any], cut: Cut) -> str:
    return "stop" if cut.found else FINISHED.get(found["finish"], "length")


def _usage(rows: Sequence[TextRow | TokenRow]) -> dict[str, int]:
    given = sum(len(each.row.given) for each in rows if isinstance(each, TextRow))
    written = sum(len(each.row.written) for each in rows if isinstance(each, TextRow))
    return {"prompt_tokens": given, "completion_tokens": written, "total_tokens": given + written}


def shape_vectors(asked: Embedding, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The vectors that were found, as OpenAI has them."""
    used = sum(each["tokens"] for each in found)
    data = [
        {"object": "embedding", "index": i, "embedding": _encoded(each["embedding"], asked.encoding_format)}
        for i, each in enumerate(found)
    ]
    usage = {"prompt_tokens": used, "total_tokens": used}
    return {"object": "list", "data": data, "model": asked.model, "usage": usage}


def _encoded(vector: Sequence[float], form: str | None) -> Any:
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode() if form == "base64" else vector


def _model(hosted: Adapters, name: str, begun: int) -> dict[str, Any]:
    served = hosted.get(name)
    root = {} if served.adapter is None else {"root": hosted.name, "parent": hosted.name}
    return {
        "id": name,
        "object": "model",
        "created": begun,
        "owned_by": "inlay",
        **root,
        "kind": served.kind,
        ADAPTER: served.tag(),
    }
