"""Where the adapters of a service lie: single folders, runs, repositories of the hub, and folders with many of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from inlay.errors import InlayError, misspelt
from inlay.workflow.lora_folders import adapter_in, is_hub_id, tasks_in


@dataclass
class Sources:
    """`folders` hold one adapter below each of their folders, which come and go; `fixed` and `extra` (added while it
    runs) are adapters by name. `hub` has the repository and revision of a fixed one that is no folder here; `twice`
    what was left out because its name was taken; `known` where each lay when they were last looked for."""

    given: tuple[str, ...]
    folders: list[Path] = field(default_factory=list)
    fixed: dict[str, Path] = field(default_factory=dict)
    extra: dict[str, Path] = field(default_factory=dict)
    hub: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    twice: list[tuple[str, str]] = field(default_factory=list)
    known: dict[str, Path] = field(default_factory=dict)
    _doubled: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, given: Sequence[str]) -> Sources:
        """What `--adapters` says: a folder of adapters, or one adapter, `name=source` where it is to have another name.
        A hub id may end in `@revision`."""
        found = cls(tuple(given))
        if not given:
            raise InlayError("Give --adapters: a folder of adapter folders, one adapter's folder, a run, or a hub id.")
        for each in given:
            found._add(each)
        return found

    def _add(self, given: str) -> None:
        named, source = None, given
        if "=" in given and not Path(given).exists():
            named, _, source = given.partition("=")
            if not named or "/" in named:
                raise InlayError(f"--adapters {given!r}: give name=source, with a name without slashes.")
        folder = Path(source).expanduser()
        if folder.is_dir():
            if named is None and adapter_in(folder) is None:
                self.folders.append(tasks_in(folder) or folder)  # of a run of several tasks, each is an adapter
                return
            self._fix(named or folder.resolve().name, folder, source)
            return
        repository, _, revision = source.partition("@")
        if not is_hub_id(repository):
            raise InlayError(
                f"--adapters {source!r} is no folder, and no hub id (as in name/adapter).{misspelt(folder)}"
            )
        self._fix(named or repository.rpartition("/")[2], Path(source), source)
        self.hub[source] = repository, revision or None

    def _fix(self, name: str, place: Path, source: str) -> None:
        if name in self.fixed:
            self._doubled.append((name, f"{source} has the name of another adapter: give it one, as in name={source}."))
            return
        self.fixed[name] = place

    def places(self, children: Callable[[Path], dict[str, Path] | None]) -> dict[str, Path] | None:
        """Every place by its name; None where a folder cannot be read: what is away for a moment is not gone."""
        found = dict(self.fixed)
        twice = list(self._doubled)
        for folder in self.folders:
            if (inside := children(folder)) is None:
                return None
            for name, place in inside.items():
                if adapter_in(place) is None and tasks_in(place) is None:
                    continue
                if name in found:
                    twice.append((name, f"{place} has the name of another adapter: call the folder by another one."))
                    continue
                found[name] = place
        self.twice = twice
        self.known = found | {name: place for name, place in self.extra.items() if name not in found}
        return self.known

    def place_of(self, name: str) -> Path | None:
        """Where an adapter lies."""
        return self.extra.get(name) or self.known.get(name)

    @property
    def root(self) -> Path | None:
        """Where further ones may be added from unless the settings say; None where all come from the hub."""
        places = self.folders or [place for place in self.fixed.values() if place.is_dir()]
        return places[0] if places else None
