"""What a recipe works with: where models and data lie, runs that are made or found again, and parts that are kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from inlay.engines import JobOutcome
from inlay.errors import InlayError, first_line
from inlay.papers.reproduce.recipe import RecipeScale
from inlay.papers.reproduce.results import Key, Results
from inlay.records.atomic import Unwritable, write_folder, write_json, write_text, writing
from inlay.records.spec import Spec
from inlay.records.store import Run
from inlay.records.versions import versions
from inlay.workflow.tune import Say, tune


@dataclass(frozen=True)
class Follower:
    """Tells which runs begin and end, where several are made at a time."""

    labels: list[str]
    tell: Say

    def begin(self, number: int) -> None:
        self.tell(f"[{number + 1}/{len(self.labels)}] {self.labels[number]}")

    def step(self, number: int, done: int, total: int) -> None:
        """Nothing: lines of several runs at a time would be many."""

    def say(self, number: int, line: str) -> None:
        self.tell(f"{self.labels[number]}: {line}")

    def end(self, number: int, outcome: JobOutcome) -> None:
        why = f": {outcome.error}" if outcome.error else ""
        self.tell(f"{self.labels[number]}: {outcome.status} after {outcome.seconds:.0f} s{why}")


@dataclass(frozen=True)
class Bench:
    """The place where recipes are made. Runs go to `out`/runs, like those of `inlay compare`; parts to `out`/parts."""

    out: Path = Path("reproduce")
    data_dir: str | None = None
    models_dir: str | None = None
    progress: bool = True
    say: Say = lambda line: None
    workers: int = 1  # runs at a time, each with its part of the cores

    def check_options(self) -> None:
        """Refuse folders that are not there, and less than one worker."""
        for option, given in (("--data-dir", self.data_dir), ("--models-dir", self.models_dir)):
            if given is not None and not Path(given).expanduser().is_dir():
                raise InlayError(f"{option} {given!r} is not a folder.")
        if self.workers < 1:
            raise InlayError(f"workers={self.workers!r}: give 1 or more, the runs that are made at a time.")

    # ------------------------------------------------------------------------------------------------ models and data

    def model(self, name: str) -> str:
        """A model by its name: embedded, a folder of --models-dir (with or without the hub's owner), or a hub id."""
        if name.startswith("embedded:") or self.models_dir is None:
            return name
        root = Path(self.models_dir).expanduser()
        for folder in (root / name, root / name.rpartition("/")[2]):
            if (folder / "config.json").is_file():
                return str(folder)
        return name

    def has(self, name: str) -> bool:
        """Whether --models-dir has this model: one that a recipe takes only where it is there."""
        return self.model(name) != name

    def spec(self, model: str, method: str, **fields: Any) -> Spec:
        """The spec of a run, with models and data from where they lie."""
        return Spec(model=self.model(model), method=method, data_dir=self.data_dir, **fields)

    def check(self, name: str, scale: RecipeScale) -> None:
        """Find out before the work whether all it needs is there; else say what to download and where to put it."""
        wanted = [self._missing_model(model) for model in scale.models] + [
            self._missing_data(task) for task in scale.data
        ]
        missing = [line for line in wanted if line]
        if missing:
            raise InlayError(f"{name} lacks {len(missing)} things at this scale.\n- " + "\n- ".join(missing))

    def _missing_model(self, name: str) -> str | None:
        from inlay.backbones import locate

        folder = name.rpartition("/")[2]
        if "/" not in name and ":" not in name and self.model(name) == name:
            return (
                f"The model {name!r}: put its folder (config.json, model.safetensors; Transformers' layout) into a "
                f"folder DIR as DIR/{folder} and pass --models-dir DIR."
            )
        try:
            locate.find(self.model(name))
        except InlayError as error:
            if name.startswith("embedded:"):
                return str(error)
            return (
                f"The model {name!r}: on a machine with a network, `hf download {name} --local-dir DIR/{folder}` gets "
                f"it; then pass --models-dir DIR. ({error})"
            )
        return None

    def _missing_data(self, name: str) -> str | None:
        from inlay.fetch import cache_root, hub_reachable
        from inlay.tasks import catalogue, sources

        card = catalogue.describe(name)
        roots = [*([Path(self.data_dir).expanduser()] if self.data_dir else []), cache_root() / "data"]
        if any(sources.find_local(card, root) for root in roots) or (card.hub and hub_reachable()):
            return None
        try:
            sources.load(card, self.data_dir)
        except InlayError as error:
            return str(error)
        return None

    def with_standins(self, scale: RecipeScale) -> Bench:
        """The same bench over tiny stand-ins of everything that the scale names; made once for a folder `out`."""
        from inlay.papers.reproduce import standins

        root = self.out / "standins"
        with writing(root):
            for name in scale.models:
                folder = root / "models" / standins.folder_of(name)
                if not (folder / "config.json").is_file():
                    write_folder(folder, partial(standins.model, name))
            for name in scale.data:
                if not (root / f"{name}.made").is_file():
                    standins.data(name, root / "data")
                    write_text(root / f"{name}.made", "")
        return replace(self, models_dir=str(root / "models"), data_dir=str(root / "data"))

    # ----------------------------------------------------------------------------------------------------------- work

    def tune(self, spec: Spec) -> Run:
        """One run, made or found again."""
        return tune(spec, self.out / "runs", progress=self.progress, say=self.say)

    def runs(self, specs: Mapping[Key, Spec], seeds: int) -> tuple[dict[Key, list[Run]], dict[str, str]]:
        """The runs of each spec with the seeds 0, 1, ..., and what failed: a cell with a failed run is left out."""
        found: dict[Key, list[Run]] = {}
        failures = self._made_ahead(specs, seeds) if self.workers > 1 else {}
        for number, (key, spec) in enumerate(specs.items(), start=1):
            label = ", ".join(part for part in key if part)
            if label in failures:
                continue
            self.say(f"[{number}/{len(specs)}] {label}")
            try:
                found[key] = [self.tune(spec.with_(seed=seed)) for seed in range(seeds)]
            except Unwritable:
                raise  # the disk would refuse every other run as well
            except InlayError as error:
                failures[label] = str(error)
            except Exception as error:  # out of memory, a defect of a library or of ours: the other runs go on
                failures[label] = f"{type(error).__name__}: {first_line(error)}"
            if label in failures:
                self.say(f"failed: {label}: {failures[label]}")
        if failures and not found:
            raise InlayError(f"No run finished. {next(iter(failures.values()))}")
        return found, failures

    def _made_ahead(self, specs: Mapping[Key, Spec], seeds: int) -> dict[str, str]:
        """Make the runs several at a time, so that they are found afterwards; what failed, by its label."""
        from inlay import engines
        from inlay.workflow.compare import job_of

        labels = {key: ", ".join(part for part in key if part) for key in specs}
        wanted = [(labels[key], spec.with_(seed=seed)) for key, spec in specs.items() for seed in range(seeds)]
        jobs = [job_of(spec, self.out / "runs", retry_failed=True) for _, spec in wanted]
        follow = Follower([f"{label}, seed {spec.seed}" for label, spec in wanted], self.say)
        with engines.make(workers=self.workers) as engine:
            outcomes = engine.run(jobs, follow)
        ended = zip(wanted, outcomes, strict=True)
        if (refused := next((each for each in outcomes if each.status == "unwritable"), None)) is not None:
            raise Unwritable(refused.error)
        return {label: str(each.error) for (label, _), each in ended if each.status == "failed"}

    def values(self, specs: Mapping[Key, Spec], seeds: int, measure: Callable[[Run], float]) -> Results:
        """One cell a spec, one value a seed, read off its runs by `measure`."""
        found, failures = self.runs(specs, seeds)
        return Results.of({key: [measure(run) for run in runs] for key, runs in found.items()}, failures=failures)

    def once(self, name: str, settings: Mapping[str, Any], work: Callable[[], Results]) -> Results:
        """What `work` gives, kept by its name, its settings and the version of the code."""
        known = versions()
        key = {"name": name, "settings": dict(settings), "inlay": known["inlay"], "commit": known["commit"]}
        digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:16]
        path = self.out / "parts" / f"{name.replace('/', '-')}-{digest}.json"
        clean = not str(known["commit"]).endswith("+")
        if clean and path.is_file():
            try:
                found = Results.from_json(json.loads(path.read_text(encoding="utf-8"))["results"])
                self.say(f"already done: {path.name}")
                return found
            except (ValueError, KeyError, TypeError):
                self.say(f"{path} cannot be read and is made again")
        results = work()
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"key": json.loads(json.dumps(key, default=str)), "results": results.to_json()})
        return results
