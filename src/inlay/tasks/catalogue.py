"""The tasks that have names, read from catalogue.toml; importing this file imports nothing heavy."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from inlay.errors import InlayError, unknown
from inlay.tasks import kinds
from inlay.tasks.schema import Described, TaskSchema

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Hub:
    """Where a data set is on the hub, and what its splits are called there."""

    path: str
    config: str | None = None
    revision: str | None = None
    data_dir: str | None = None
    splits: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        return f"{self.path} ({self.config or self.data_dir})" if self.config or self.data_dir else self.path


@dataclass(frozen=True)
class Package:
    """A pinned wheel of the package index that holds the data."""

    name: str
    version: str
    sha256: str
    members: str
    reader: str
    where: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    rename: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class TaskCard(Described):
    """What is known of a task before its data is touched. The keys are explained at the head of catalogue.toml.

    `schema` lacks what only the data say: the names of the classes, in some tasks. `columns` are the names that a
    field may have in the data, `target` is the column of the answers.
    """

    schema: TaskSchema
    summary: str
    num_labels: int | None = None
    label: tuple[str, ...] = ("label",)
    target: str | None = None
    group: str | None = None
    folder: str = ""
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    resplit: tuple[float, float, float] | None = None
    aliases: tuple[str, ...] = ()
    hub: Hub | None = None
    package: Package | None = None
    installed: str | None = None
    local: str | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        """Where the data may come from besides a local folder, in words."""
        found = []
        if self.hub:
            found.append(f"the hub, {self.hub}")
        if self.installed:
            found.append("an installed package")
        if self.package:
            found.append(f"the package index, {self.package.name}=={self.package.version}")
        return tuple(found)


def _names(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _card(name: str, entry: Mapping[str, Any]) -> TaskCard:
    """One entry of the catalogue, with the defaults that its kind implies."""
    kind = kinds.check_kind(entry["kind"])
    image = kind == kinds.IMAGES
    hub = dict(entry["hub"]) if "hub" in entry else None
    splits = {split: hub.pop(split) for split in SPLITS if split in hub} if hub else {}
    labels = tuple(entry["labels"]) if "labels" in entry else None
    default_label = ("label", "labels", "cls") if image else ("label",)
    described = ("template", "prompt_template", "cue", "prepare", "lm", "max_new_tokens")
    schema = TaskSchema(
        name=name,
        kind=kind,
        fields=("image",) if image else tuple(entry["fields"]),
        metrics=tuple(entry.get("metrics", ("accuracy",))),
        label_names=labels,
        words=tuple(entry["words"]) if "words" in entry else None,
        answers="target" in entry,
        **{key: entry[key] for key in described if key in entry},
    )
    return TaskCard(
        schema=schema,
        summary=entry["summary"],
        num_labels=1 if kind == kinds.REGRESSION else entry.get("classes", len(labels) if labels else None),
        label=_names(entry.get("label", default_label)),
        folder=entry.get("folder", name.replace("-", "_")),
        columns={key: _names(value) for key, value in entry.get("columns", {}).items()},
        resplit=tuple(entry["resplit"]) if "resplit" in entry else None,
        aliases=tuple(entry.get("aliases", ())),
        hub=Hub(**hub, splits=splits) if hub else None,
        package=Package(**entry["package"]) if "package" in entry else None,
        **{key: entry[key] for key in ("target", "group", "installed", "local") if key in entry},
    )


@cache
def _read() -> tuple[Mapping[str, TaskCard], Mapping[str, str]]:
    """The cards by name, and why some names that one might look for are not there."""
    entries = tomllib.loads((files("inlay.tasks") / "catalogue.toml").read_text(encoding="utf-8"))
    refused = entries.pop("refused")
    return MappingProxyType({name: _card(name, entry) for name, entry in entries.items()}), refused


def fold(name: str) -> str:
    """A name as it is compared: only letters and digits count (`Clevr/count` is `clevr-count`)."""
    return "".join(filter(str.isalnum, name.casefold()))


@cache
def _by_any_name() -> Mapping[str, TaskCard]:
    """Every name, alias and folder name to its card; a task's own name wins over another's folder."""
    cards, _ = _read()
    found = {fold(card.folder): card for card in reversed(list(cards.values()))}
    found |= {fold(alias): card for card in cards.values() for alias in card.aliases}
    return found | {fold(name): card for name, card in cards.items()}


def names() -> list[str]:
    """The names of all tasks, in the order of the catalogue."""
    return list(_read()[0])


def describe(name: str) -> TaskCard:
    """The card of the task called `name` (or one of its aliases), or a clear error with the nearest names."""
    card = _by_any_name().get(fold(name))
    if card is not None:
        return card
    cards, refused = _read()
    if fold(name) in refused:
        raise InlayError(f"Task {name!r} is not offered: {refused[fold(name)]}.")
    raise unknown(
        "task", name, cards, "`inlay tasks` describes them; data of your own goes in with --data PATH instead."
    )


def is_named(name: str) -> bool:
    """Whether the catalogue has a task of this name or alias."""
    return fold(name) in _by_any_name()


def canonical(name: str) -> str:
    """The catalogue's own name of a task; a name that it does not have (a data set of the hub, say) is left alone."""
    card = _by_any_name().get(fold(name))
    return name if card is None else card.name
