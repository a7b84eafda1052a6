"""One model and LoRAs from anywhere, mixed in one pass: each has its own kind of task, and a name.

They come and go with their folders (watching.py), or by requests. One that cannot be served is remembered with the
reason, and the others go on.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from inlay.backbones.locate import portable
from inlay.errors import InlayError, first_line, listed
from inlay.serve.adapter_sources import Sources
from inlay.serve.lora_rows import ADAPTER, LoraRows
from inlay.serve.refusals import Refusal, unknown_adapter
from inlay.serve.watching import Change, Stamp, Watched
from inlay.tasks import kinds
from inlay.workflow.lora_folders import EMBEDDING, LoraAdapter, adapter_in, is_same_base, look, plain_base, tasks_in

if TYPE_CHECKING:
    from inlay.serve.trunk_heads import TrunkHead
    from inlay.tasks import TaskSchema

READERS = 4  # threads that turn texts into tokens
MAX_BATCH = 64  # rows of a batch, each of which may name another adapter
LABELS = 2  # outputs of the head that the base model is loaded with, and no row reads
REMOVED = "It was removed by a request. `POST /adapters` with its name serves it again, as a change of its folder does."


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter that is served, or the model alone: its task, and where it lies. `head` is its own where the model's
    class has another."""

    name: str
    kind: str
    schema: TaskSchema | None
    adapter: LoraAdapter | None = None
    stamp: Stamp = ()
    outputs: int | None = None
    head: TrunkHead | None = None
    low_rank: Path | None = None
    kept: Any = field(default=None, compare=False)  # a folder for as long as it is needed

    @property
    def within(self) -> str | None:
        """The adapter of its rows; None: none."""
        return None if self.adapter is None else self.name

    def tag(self) -> dict[str, str] | None:
        """What an answer says of who gave it."""
        return None if self.adapter is None else {"name": self.name, "revision": self.adapter.revision}


class Adapters(Watched):
    """A model with LoRAs by name."""

    what = ADAPTER

    def __init__(
        self,
        sources: Sequence[str],
        *,
        model: str | None = None,
        trust_remote_code: bool = False,
        batch: int = MAX_BATCH,
    ) -> None:
        super().__init__()
        self.served: dict[str, ServedAdapter]
        self.sources = Sources.of(sources)
        self._trust = trust_remote_code
        self._heads: dict[tuple[str, str | None], tuple[TrunkHead, str]] = {}
        self._seen = self._stamps() or {}
        found = {name: adapter for name in self._seen if (adapter := self._looked_at(name)) is not None}
        self.model, self.aliases = self._base_of(found, model)
        self.head, self.backbone = self._load(list(found.values()))
        self.name = portable(self.model)
        self.rows = LoraRows(self.backbone, self.head, self.model, batch)
        self.loras = self.rows.loras
        self.bare = ServedAdapter(self.name, kinds.CAUSAL_LM if self.head is kinds.LANGUAGE else EMBEDDING, None)
        count = max(1, min(READERS, os.cpu_count() or 1))
        self.readers = ThreadPoolExecutor(count, thread_name_prefix="inlay-reader")
        for name, adapter in found.items():
            self._take(name, adapter, lambda action: action())

    # ---- what the queue asks

    def missing(self, task: str) -> Refusal | None:
        return None if self.find(task) is not None else unknown_adapter(task, self.known())

    def answer(self, requests: Sequence[Any]) -> list[dict[str, Any]]:
        return self.rows.answer(requests, self.find)

    # ---- what the application asks

    def find(self, name: str) -> ServedAdapter | None:
        """What is served by a name: an adapter, or by the base model's name the model alone."""
        return self.served.get(name) or (self.bare if name in (self.name, self.model) else None)

    def known(self) -> list[str]:
        """The names that a request may have."""
        return [*self.served, self.name]

    def get(self, name: Any) -> ServedAdapter:
        """The same; a `Refusal` lists the known ones."""
        if name is None and len(self.served) == 1:
            return next(iter(self.served.values()))
        if not isinstance(name, str):
            raise Refusal(400, f"The request names no 'model'. Known: {', '.join(sorted(self.known()))}.")
        if (found := self.find(name)) is None:
            raise unknown_adapter(name, self.known())
        return found

    def describe(self) -> dict[str, Any]:
        """The model, what is served, and what is not."""
        return {
            "model": self.name,
            "kind": self.bare.kind,
            "writes": self.head is kinds.LANGUAGE,
            "adapters": [_described(each) for _, each in sorted(self.served.items())],
            "refused": [
                {ADAPTER: name, "error": why}
                for name, why in sorted([(n, w) for n, (_, w) in self.refused.items()] + self.twice)
            ],
        }

    def add(self, name: str, source: Path | None, change: Change) -> ServedAdapter:
        """Serve one more, from a folder; without one, again from where it lies. For any thread but the model's."""
        with self.changing:
            if name in self.served or name == self.name:
                raise Refusal(409, f"There is an adapter called {name!r} already: remove it first.")
            before = self.sources.place_of(name)
            if source is not None and before is not None and source.resolve() != before.resolve():
                raise Refusal(409, f"{name!r} is the name of another folder already: give another one.")
            if source is None and before is None:
                raise Refusal(400, f"Say where {name!r} lies: give its 'source'.")
            if source is not None:
                self.sources.extra[name] = source
            try:
                stamps = self._stamps() or {}
                if name not in stamps:
                    raise Refusal(400, f"{source or before} holds no adapter.")
                found = self._prepared(name, self._look(name), stamps[name])
                change(lambda: self._serve(found)).result()
            except BaseException as error:
                if source is not None:
                    self.sources.extra.pop(name, None)
                if isinstance(error, InlayError) and not isinstance(error, Refusal):
                    raise Refusal(400, str(error)) from None
                raise
            self._seen[name] = stamps[name]
            self.refused.pop(name, None)
            return found

    def drop(self, name: str, change: Change) -> None:
        """Serve one no longer; its files stay. Called by any thread but the model's."""
        with self.changing:
            if name not in self.served:
                raise unknown_adapter(name, self.served)
            stamp = self.served[name].stamp
            change(lambda: self._remove(name)).result()
            if self.sources.extra.pop(name, None) is None:
                self.refused[name] = (stamp, REMOVED)

    # ---- the folders

    @property
    def twice(self) -> list[tuple[str, str]]:
        return list(self.sources.twice)

    def _places(self) -> dict[str, Path] | None:
        return self.sources.places(self._children)

    def _stamp(self, place: Path) -> Stamp | None:
        if str(place) in self.sources.hub:
            return ((str(place), 0, 0, 0),)
        inner = adapter_in(place) or tasks_in(place)
        return None if inner is None else super()._stamp(inner)

    def _look(self, name: str) -> LoraAdapter:
        place = self.sources.place_of(name)
        assert place is not None
        hub = self.sources.hub.get(str(place))
        return look(place) if hub is None else look(*hub)

    def _take(self, name: str, found: LoraAdapter, do: Callable[[Callable[[], Any]], Any]) -> None:
        """Whatever is the matter with one of them, the others go on."""

        def put() -> None:
            served = self._prepared(name, found, self._seen[name])  # beside the service: only the rest between batches
            do(lambda: self._serve(served))

        if self._try(name, put):
            self.refused.pop(name, None)

    def _serve(self, found: ServedAdapter) -> None:
        """Between two batches."""
        assert found.adapter is not None
        self.loras.add(found.name, found.low_rank or found.adapter.place)
        self.served[found.name] = found

    def _remove(self, name: str) -> None:
        del self.served[name]
        self.loras.remove(name)

    # ---- one adapter, beside the running service

    def _prepared(self, name: str, adapter: LoraAdapter, stamp: Stamp) -> ServedAdapter:
        """All that can be done before the model is touched; an error where it does not fit."""
        from inlay.methods import vetting
        from inlay.methods.folder import CONFIG
        from inlay.methods.mixture.heads import outputs_in
        from inlay.workflow.lora_moving import head_tensors, move

        if name == self.name:
            raise InlayError(f"{name!r} is the base model's own name: call the adapter's folder by another one.")
        self._check_base(adapter)
        base = self.loras.base
        vetting.check_settings(
            adapter.place / CONFIG["peft"], adapter.settings, adapter.shapes, base, vouched=bool(adapter.note)
        )
        head = adapter.head or (kinds.LANGUAGE if self._writes_like(adapter) else None)
        if head is kinds.LANGUAGE and self.head is not head:
            raise InlayError(
                f"{adapter.place} is an adapter that writes texts, and {self.name} is served as a model that reads "
                "them. Serve it from a service of its own."
            )
        length = self.rows.max_length
        if head is kinds.LANGUAGE:
            schema = adapter.schema or adapter.task(None, name, length)
            return ServedAdapter(name, schema.kind, schema, adapter, stamp)
        if head is self.head and adapter.pooling == self.backbone_pooling and adapter.settings.get("modules_to_save"):
            if (outputs := outputs_in(base, adapter.own_weights)) is None:
                raise InlayError(f"{adapter.place} has no head for {type(base).__name__}, and the base model has none.")
            self._check_new(adapter)
            schema = adapter.task(outputs, name, length)
            return ServedAdapter(name, schema.kind, schema, adapter, stamp, outputs)
        kept = TemporaryDirectory(prefix="inlay-adapter-")
        move(adapter, base, Path(kept.name))
        moved: dict[str, Any] = {"low_rank": Path(kept.name), "kept": kept}
        if head is None:
            if adapter.own_weights:
                raise InlayError(f"{adapter.place} gives embeddings, and brings more than low-rank products.")
            if adapter.schema is not None and adapter.pooling != self.rows.pooling:
                raise InlayError(
                    f"{adapter.place} was trained for vectors with pooling={adapter.pooling!r}, and {self.name} is "
                    f"served with {self.rows.pooling!r}. `inlay serve --adapter` serves it by itself."
                )
            return ServedAdapter(name, EMBEDDING, None, adapter, stamp, **moved)
        own = self._head_of(head, adapter.pooling)[0].holding(head_tensors(adapter), str(adapter.place))
        schema = adapter.task(own.outputs, name, length)
        return ServedAdapter(name, schema.kind, schema, adapter, stamp, own.outputs, own.to(self.rows.device), **moved)

    def _check_new(self, adapter: LoraAdapter) -> None:
        """An error where the base model has no weights for a part of the head, and the adapter brings none either."""
        from inlay.methods.plain import plain_parameters

        new = tuple(f"{name}." for name in self.backbone.newly_initialised)
        lacking = [key for key in plain_parameters(self.loras.base) if key.startswith(new)]
        lacking = [key for key in lacking if key not in adapter.own_weights]
        if new and lacking:
            raise InlayError(
                f"{adapter.place} lacks {listed(lacking, 3)}, which {self.name} has no weights for: it was drawn anew "
                "for every training, and not saved. Name it in modules_to_save when you train."
            )

    @property
    def backbone_pooling(self) -> str | None:
        """What was put in place of the feature that the model's own head reads."""
        from inlay.backbones.pooled import installed

        return installed(self.loras.base)

    def _writes_like(self, adapter: LoraAdapter) -> bool:
        """Whether one that does not say what it is for writes texts: where the model does."""
        return adapter.settings.get("task_type") is None and adapter.schema is None and self.head is kinds.LANGUAGE

    def _check_base(self, adapter: LoraAdapter) -> None:
        """An error where an adapter was made of another base model. A fingerprint says so for certain; without one its
        base model's name must be the one that is served."""
        other = f"{adapter.place} belongs to another base model: it was made of {adapter.base_model or 'one'}"
        if adapter.fingerprint is not None and adapter.head is not None:
            found = self.backbone.fingerprint
            if (adapter.head, adapter.pooling) != (self.head, self.backbone_pooling):
                found = self._head_of(adapter.head, adapter.pooling)[1]
            if found != adapter.fingerprint:
                raise InlayError(
                    f"{other} with fingerprint {adapter.fingerprint[:12]}, and {self.name} has {found[:12]}. Serve it "
                    "from a service of its own."
                )
        elif adapter.base_model is not None and not is_same_base(plain_base(adapter.base_model), self.aliases):
            raise InlayError(
                f"{other}, and {self.name} is served. If that is the same model under another name, write it into "
                "base_model_name_or_path of adapter_config.json; if not, serve the adapter from a service of its own."
            )

    def _head_of(self, head: kinds.Head, pooling: str | None) -> tuple[TrunkHead, str]:
        """A model of this class without its trunk, and the fingerprint that it had; loaded when it is first needed."""
        from inlay import backbones
        from inlay.serve.trunk_heads import TrunkHead

        key = head.name, pooling
        if key not in self._heads:
            backbone = backbones.load(
                self.model,
                kind=_kind_of(head),
                num_labels=None if head is kinds.LANGUAGE else LABELS,
                trust_remote_code=self._trust,
                pooling=(pooling or "own") if head is kinds.SEQUENCE else "auto",
            )
            self._heads[key] = TrunkHead.of(backbone), backbone.fingerprint
        return self._heads[key]

    # ---- the base model

    def _base_of(self, found: dict[str, LoraAdapter], model: str | None) -> tuple[str, frozenset[str]]:
        """The base model that is asked for, or that most adapters name; and the names that stand for it."""
        from inlay.workflow.prompt_folders import find_base

        named = Counter(plain_base(each.base_model) for each in found.values() if each.base_model)
        usual = next((name for name, _ in named.most_common(1)), None)
        if model is not None:
            # A folder may hold what is called otherwise elsewhere: what most of these were made of.
            moved = {usual} if usual is not None and plain_base(model).startswith("./") else set()
            return model, frozenset({plain_base(model), *moved})
        if usual is None:
            reasons = "; ".join(f"{name}: {first_line(Exception(why))}" for name, (_, why) in self.refused.items())
            raise InlayError(
                f"{', '.join(self.sources.given)}: there is no adapter that says which base model it was made of "
                f"({reasons or 'no folder with an adapter'}). Give --model; then the service starts without one, too."
            )
        first = next(each for each in found.values() if each.base_model and plain_base(each.base_model) == usual)
        model = find_base(first)  # type: ignore[arg-type]
        return model, frozenset({plain_base(model), usual})

    def _load(self, found: Sequence[LoraAdapter]) -> tuple[kinds.Head, Any]:
        """The base model, with the head that most adapters have: theirs are then run together."""
        from inlay import backbones
        from inlay.backbones import locate

        own = [each for each in found if not each.base_model or is_same_base(plain_base(each.base_model), self.aliases)]
        heads = Counter((each.head, each.pooling) for each in own if each.head is not None)
        decoder = locate.kind(self.model) == "decoder"
        writes = any(head is kinds.LANGUAGE for head, _ in heads)
        if decoder and (writes or not heads):
            head, pooling = kinds.LANGUAGE, None
        else:
            usual = [key for key, _ in heads.most_common() if key[0] is not kinds.LANGUAGE]
            head, pooling = usual[0] if usual else (kinds.SEQUENCE, None)
        backbone = backbones.load(
            self.model,
            kind=_kind_of(head),
            num_labels=None if head is kinds.LANGUAGE else LABELS,
            trust_remote_code=self._trust,
            pooling=(pooling or "own") if head is kinds.SEQUENCE else "auto",
        )
        if head is kinds.LANGUAGE and backbone.newly_initialised:
            raise InlayError(f"{self.model!r} came without {', '.join(backbone.newly_initialised)}: it writes nothing.")
        return head, backbone


def _kind_of(head: kinds.Head) -> str:
    """A kind of task with this head."""
    return next(name for name, kind in kinds.TABLE.items() if kind.head is head)


def _described(each: ServedAdapter) -> dict[str, Any]:
    assert each.adapter is not None
    schema = each.schema
    fields = ["text"] if schema is None else [schema.columns.get(name, name) for name in schema.fields]
    return {
        ADAPTER: each.name,
        "revision": each.adapter.revision,
        "kind": each.kind,
        "fields": fields,
        "labels": None if schema is None else schema.label_names,
        "rank": each.adapter.settings.get("r"),
        "source": portable(each.adapter.source),
    }
