"""`--method auto`: a short, budgeted comparison on held-out rows among a few methods, and the run by the one it picks.

Each candidate (`Method.auto` says for what it is one) is a run of its own, under the same folder, on at most `MOST`
training examples. So the comparison resumes like any run, and where there are no more examples than that, the run of
the method that is picked is done already. The test split plays no part.

What the candidates say of the validation split is compared row by row. Those whose mean is behind the best one's by an
interval that includes 0 are as good as it; of these the one with the fewest trained parameters is picked. Few rows tell
little apart: where the seed draws the validation split, further seeds, at most `SEEDS`, are tried until there are
`ENOUGH` rows. All candidates are tried with a seed before the next one, so that a budget cuts all alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError
from inlay.methods import registry
from inlay.records.atomic import writing
from inlay.records.sealed import is_intact, read_object, write_sealed
from inlay.records.spec import Spec
from inlay.records.store import Run, load
from inlay.tasks import kinds
from inlay.tasks.row_scores import WORDS, score_rows
from inlay.workflow.compare import make_runs
from inlay.workflow.notes import Say, or_log
from inlay.workflow.planning import kind_of, plan
from inlay.workflow.settle import Settled, digest_of, settle
from inlay.workflow.statistics import half_width
from inlay.workflow.tune import AUTO, tune

if TYPE_CHECKING:
    from inlay.tasks import Task

MINUTES = 10.0
ENOUGH, SEEDS = 200, 5
MOST = 1000  # examples that a candidate is trained on
STEPS = 100  # updates, of running text, whose examples the model's length makes
CHOICE = "chosen.json"


@dataclass(frozen=True)
class MethodTrial:
    """One candidate: its mean over the held-out rows, and how far it is behind the best (`low` to `high`: 95 % CI)."""

    method: str
    run: str
    mean: float
    behind: float
    low: float | None
    high: float | None
    trained: int
    seconds: float

    @property
    def ties(self) -> bool:
        """Whether it is as good as the best, as far as these rows tell."""
        return self.behind == 0 or self.low is None or self.low <= 0


@dataclass(frozen=True)
class MethodChoice:
    """Which method was picked and why. `measure` says what the means are of, `rows` over how many they are, held out
    by `seeds`, and `examples` on how many each candidate was trained (None: all). `unfinished` were not done in time.
    """

    method: str
    why: str
    measure: str
    rows: int
    seeds: tuple[int, ...]
    examples: int | None
    minutes: float
    trials: tuple[MethodTrial, ...]
    unfinished: Mapping[str, str]
    left_out: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "format": 1}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MethodChoice:
        """What `to_json` made."""
        known = {key: data[key] for key in cls.__dataclass_fields__}
        trials = tuple(MethodTrial(**each) for each in data["trials"])
        return cls(**{**known, "trials": trials, "seeds": tuple(data["seeds"])})


def tune_auto(
    spec: Spec, out: Path | str, *, minutes: float = MINUTES, progress: bool = True, say: Say | None = None, **how: Any
) -> Run:
    """Pick a method for `spec` and make its run, as `inlay.tune` does; the choice lies in the run's folder."""
    say = or_log(say)
    choice = choose(spec, out, minutes=minutes, progress=progress, say=say)
    say(f"method: {choice.method}: {choice.why}")
    run = tune(spec.with_(method=choice.method), out, progress=progress, say=say, **how)
    if not run.follower:
        with writing(run.folder):
            write_sealed(run.folder / CHOICE, choice.to_json())
    return run


def choose(
    spec: Spec, out: Path | str, *, minutes: float = MINUTES, progress: bool = True, say: Say | None = None
) -> MethodChoice:
    """Try the candidates for at most `minutes`, and pick one. The same again goes on, or finds what was picked."""
    say = or_log(say)
    if not minutes > 0:
        raise InlayError(f"minutes={minutes!r} must be greater than 0.")
    check(spec)
    names = candidates(spec)
    first = settle(plan(spec, names, [spec.seed]).specs[0])
    planned = plan(spec, names, seeds(first), say=say)
    noted = Path(out) / f"{AUTO}-{digest_of(spec, first.data)[:10]}.json"
    if (earlier := read(noted)) is not None and not earlier.unfinished:
        say(f"chosen before: {noted}")
        return earlier
    specs = [shortened(each, first) for each in planned.specs]
    on = f" on {specs[0].shots} of the training examples" if specs[0].shots != spec.shots else ""
    times = len({each.seed for each in specs})
    again = f" with {times} seeds" if times > 1 else ""
    say(f"tries {', '.join(planned.methods)}{on}{again}, for at most {minutes:g} minutes")
    named = [(f"{each.method}, seed {each.seed}" if times > 1 else each.method, each) for each in specs]
    outcomes = make_runs(named, out, minutes=minutes, progress=progress, say=say)
    unfinished = {
        name: outcome.error or outcome.status
        for (name, _), outcome in zip(named, outcomes, strict=True)
        if outcome.status != "finished"
    }
    runs = [load(Path(out) / outcome.run) for outcome in outcomes if outcome.status == "finished" and outcome.run]
    if not (rounds := complete(runs, spec.seed)):
        told = "; ".join(f"{name}: {why}" for name, why in unfinished.items())
        raise InlayError(
            f"No candidate finished within {minutes:g} minutes ({told}). Give the same command again, which goes on "
            "where it stopped, more time (--auto-budget), or a method."
        )
    found = judge(rounds, minutes=minutes)
    choice = replace(found, unfinished=unfinished, left_out=dict(planned.left_out), examples=specs[0].shots)
    with writing(noted):
        write_sealed(noted, choice.to_json())
    return choice


def seeds(first: Settled) -> list[int]:
    """With which seeds to try the candidates: more than one where it draws the validation split, and that is small."""
    own, rows = first.spec.seed, len(first.first.validation)
    if rows >= ENOUGH or settle(first.spec.with_(seed=own + 1)).first.digest == first.first.digest:
        return [own]
    return [own + number for number in range(min(SEEDS, math.ceil(ENOUGH / max(1, rows))))]


def complete(runs: Sequence[Run], seed: int) -> list[list[Run]]:
    """The finished runs by seed, the spec's own first: of the methods that finished with it, at the seeds at which all
    of them did."""
    by_seed: dict[int, dict[str, Run]] = {}
    for run in runs:
        by_seed.setdefault(run.spec.seed, {})[run.spec.method] = run
    methods = list(by_seed.get(seed, {}))
    return [[found[name] for name in methods] for found in by_seed.values() if methods and set(methods) <= found.keys()]


def check(spec: Spec) -> None:
    """An error where there is nothing to choose from."""
    if spec.tasks:
        raise InlayError(
            "--method auto picks a method for one task: --task or --data. Several tasks are for the methods that mix "
            f"them: {', '.join(registry.names_where(lambda method: method.mixes_tasks))}."
        )


def candidates(spec: Spec) -> Sequence[str]:
    """The methods to try, by what the model reads and what it is to learn."""
    from inlay import backbones

    kind = kinds.get(kind_of(spec))
    writes = kind.name in kinds.LANGUAGE_MODELS
    what = "writing" if writes else backbones.modality(spec.model, spec.revision)
    # What compares images with texts has no head to train.
    return registry.names_where(lambda m: what in m.auto and not (kind.has_captions and m.form == "head"))


def shortened(spec: Spec, first: Settled) -> Spec:
    """A candidate's run: the run that would be made of it, on fewer examples where there are many."""
    examples = first.first.examples
    if examples is None:
        return spec if spec.max_steps else spec.with_(max_steps=STEPS)
    return spec.with_(shots=MOST) if examples > MOST else spec


def judge(rounds: Sequence[Sequence[Run]], *, minutes: float) -> MethodChoice:
    """Score what each run says of its validation split, and pick. `rounds` have a run of each method for a seed."""
    tasks = [settle(runs[0].spec).first for runs in rounds]
    scores: list[list[float]] = [[] for _ in rounds[0]]
    for runs, task in zip(rounds, tasks, strict=True):
        for mine, run in zip(scores, runs, strict=True):
            mine += score(run, task)
    means = [fmean(each) for each in scores]
    best = max(range(len(means)), key=lambda i: (means[i], -trained(rounds[0][i])))
    trials = []
    for i, (run, mine) in enumerate(zip(rounds[0], scores, strict=True)):
        gaps = [theirs - own for theirs, own in zip(scores[best], mine, strict=True)]
        behind, half = fmean(gaps), half_width(gaps)
        low, high = (None, None) if half is None else (behind - half, behind + half)
        seconds = sum(float(runs[i].record["seconds"]) for runs in rounds)
        trials.append(MethodTrial(run.spec.method, run.id, means[i], behind, low, high, trained(run), seconds))
    picked = min((trial for trial in trials if trial.ties), key=lambda trial: (trial.trained, trial.behind))
    why = reason(trials, trials[best], picked, len(scores[0]))
    drawn = tuple(runs[0].spec.seed for runs in rounds)
    measure = WORDS.get(tasks[0].schema.predicts, WORDS["class"])
    return MethodChoice(picked.method, why, measure, len(scores[0]), drawn, None, minutes, tuple(trials), {}, {})


def reason(trials: Sequence[MethodTrial], best: MethodTrial, picked: MethodTrial, rows: int) -> str:
    """Why this one, in a sentence."""
    if len(trials) == 1:
        return "the only one that was tried to the end"
    if picked is best:
        tied = [trial.method for trial in trials if trial.ties and trial is not best]
        if not tied:
            return f"better than the others on {rows:,} held-out rows"
        return f"the best on {rows:,} held-out rows, and with fewer trained parameters than {', '.join(tied)}"
    return (
        f"not distinguishable from {best.method}, the best on {rows:,} held-out rows, and the fewest trained "
        f"parameters ({picked.trained:,}; {best.method}, {picked.behind:.3g} better here: {best.trained:,})"
    )


def trained(run: Run) -> int:
    """How many parameters a run trained."""
    return int(run.portrait["parameters"]["trained"])


def score(run: Run, task: Task) -> list[float]:
    """How good what a run says of each row of the validation split is."""
    from inlay.training.evaluation import outputs_of
    from inlay.workflow.loaded import LoadedRun

    loaded = LoadedRun(run, trust_remote_code=run.spec.trust_remote_code)
    task = task.with_schema(loaded.schema)
    outputs, encoded = outputs_of(loaded.model, task, "validation", loaded.processor, run.spec)
    return score_rows(loaded.schema, task.validation, encoded, outputs)


def read(path: Path) -> MethodChoice | None:
    """A choice that was written down; None where there is none, or one that was changed since."""
    try:
        data = read_object(path)
        return MethodChoice.from_json(data) if is_intact(data) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
