"""Tables for a person at a terminal; for a pipe the same in plain text: one item a line, tabs between, nothing cut."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from inlay.console import has_colour, tell, visible
from inlay.report.columns import columns_in, figure, size
from inlay.report.columns import count as count

if TYPE_CHECKING:
    from inlay.records.store import Run
    from inlay.workflow.comparison import Comparison, Difference
    from inlay.workflow.forecast import Forecast
    from inlay.workflow.harness import HarnessResult
    from inlay.workflow.loaded import Evaluation
    from inlay.workflow.planning import Planned

# Under `accelerate launch` every process runs the command, and the first one speaks.
SPEAKS = int(os.environ.get("RANK", "0")) == 0
CHECKED_FROM = 0.05  # seconds of the trunk cache's checks that are worth a word
WHITESPACE = re.compile(r"[ \t\n\r\f\v]+")  # not the blank that keeps two words together


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    right: Sequence[int] = (),
    whole: Sequence[int] = (),
    cut: Sequence[int] = (),
    broken: Sequence[int] = (),
) -> None:
    """Print rows under named columns; `right` are the columns to align to the right.

    On a terminal, cells of the columns `whole`, of `right` and of the first one are never broken over lines (their
    headers are, between words), but for those of `broken`; those of `cut` are cut short where there is no room. Where
    a table has no room even so, its rows stand one below the other.
    """
    if not SPEAKS:
        return
    columns = [plain(column) for column in columns]
    rows = [[plain(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            print("\t".join(row))
        return
    from inlay.cli import grid

    entire = {0, *whole, *right} - {*broken}  # what comes first names the row, and people copy it
    lines = grid.lay_out(columns, rows, terminal_width(), right=right, whole=entire, cut=cut)
    if title:
        lines[:0] = [grid.TableLine(line, heading=True) for line in grid.wrap(plain(title), terminal_width())]
    bold, normal = ("\x1b[1m", "\x1b[0m") if has_colour(sys.stdout) else ("", "")
    for line in lines:
        print(f"{bold}{line.text}{normal}" if line.heading and line.text else line.text)
    print()


def plain(text: str) -> str:
    """A cell of a table, or a title: on one line, with control characters made visible."""
    return visible(" ".join(WHITESPACE.split(text)).strip(" "))


def terminal_width() -> int:
    """How many characters a line of the terminal has."""
    return shutil.get_terminal_size().columns


def fits(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Whether a table is narrow enough for the terminal, headers broken between words; a pipe has no width."""
    if not sys.stdout.isatty():
        return True
    from inlay.cli import grid

    return grid.fits(columns, rows, terminal_width())


def say(line: str) -> None:
    """One line of news, on stderr: results on stdout can be piped. Control characters in it are made visible."""
    if SPEAKS:
        tell(line)


def answer(line: str) -> None:
    """One line of a command's result, on stdout. Control characters in it are made visible."""
    if SPEAKS:
        print(visible(line), flush=True)


def mistake(error: BaseException) -> None:
    """What is wrong with what was asked, on stderr; every process says so, as each of them ends."""
    tell(f"Error: {error}")


def nothing(line: str) -> None:
    """What `say` is where --quiet was given."""


def evaluation(found: Evaluation) -> None:
    """How good a run is on labelled rows, beside its own test split; or a model as it is."""
    if not found.test:
        told = [(name, f"{value:.4f}") for name, value in found.metrics.items()]
        table(("metric", f"these rows (n = {found.examples:,})"), told, right=(1,))
        return
    rows = [
        (name, f"{value:.4f}", f"{found.test[name]:.4f}" if name in found.test else "-")
        for name, value in found.metrics.items()
    ]
    columns = ("metric", f"these rows (n = {found.examples:,})", f"the run's test split (n = {found.test_examples:,})")
    table(columns, rows, right=(1, 2))


def harness(found: HarnessResult) -> None:
    """What lm-evaluation-harness found."""
    rows = [
        (
            score.task,
            score.metric if score.filter == "none" else f"{score.metric} ({score.filter})",
            f"{score.value:.4f}",
            "-" if score.error is None else f"{score.error:.4f}",
            f"{score.examples:,}",
        )
        for score in found.scores
    ]
    table(("task", "metric", "value", "standard error", "questions"), rows, right=(2, 3, 4))


def result(run: Run) -> tuple[str, ...]:
    """A run's test metric, and the columns of a list of runs; why a run failed is for `runs show`."""
    listed = columns_in("list")
    if run.status != "finished":
        return ("-", *("-" for _ in listed))
    metric = run.record["metric"]
    split = "test" if "test" in run.metrics else "validation"
    return (f"{metric} {run.metrics[split][metric]:.4f}", *(column.text([run.record]) for column in listed))


def how_made(run: Run) -> tuple[str, str, str]:
    """When a run was begun (UTC), at which learning rate, and on how many examples."""
    examples = run.record.get("examples", {}).get("train") if run.status == "finished" else run.spec.shots
    rate = run.spec.learning_rate
    return (
        run.created[:16].replace("T", " ") or "-",
        "-" if rate is None else f"{rate:g}",
        "-" if examples is None else f"{examples:,}",
    )


def run_result(run: Run) -> None:
    """A finished run's result and cost."""
    rows = [
        *(
            (f"{split} {metric}", f"{value:.4f}")
            for split, metrics in run.metrics.items()
            for metric, value in metrics.items()
        ),
        *((column.titles["run"], column.described(run.record)) for column in columns_in("run")),
        *machine(run.portrait),
        *trunk(run.portrait),
        *recomputing(run.portrait),
        *whole_time(run.record),
        *(("predictions of held-out rows", str(path)) for path in run.predictions.values()),
        ("run", str(run.folder)),
    ]
    table(("", run.spec.method), rows)


def choice(run: Run) -> None:
    """What `--method auto` tried before this run, and why it picked its method; nothing where nobody asked it to."""
    from inlay.workflow.auto import CHOICE, read

    found = read(run.folder / CHOICE)
    if found is None:
        return
    rows = [
        (
            trial.method,
            f"{abs(trial.mean):.4f}",
            "the best"
            if trial.behind == 0
            else f"{trial.behind:.4f}" + ("" if trial.low is None else f" ({trial.low:.4f} to {trial.high:.4f})"),
            count(trial.trained),
            f"{figure(trial.seconds)} s",
            "picked" if trial.method == found.method else "as good, trains more" if trial.ties else "worse",
        )
        for trial in found.trials
    ]
    rows += [(name, "-", "-", "-", "-", why) for name, why in {**found.unfinished, **found.left_out}.items()]
    columns = ("method", found.measure, "behind the best (95 % CI)", "trained", "time", "verdict")
    table(columns, rows, title=f"{found.rows:,} held-out rows", right=range(1, 5))
    starts = f"{len(found.seeds)} starts each" if len(found.seeds) > 1 else "One start each"
    say(f"{found.method}: {found.why}. {starts}: the intervals are over rows, not over starts.")
    if found.unfinished:
        say("Not all were tried: the same command goes on with them.")


def machine(portrait: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How busy the machine was: times depend on it. Nothing of a run from before that was on record."""
    from inlay.portrait import was_contended

    found = portrait.get("machine")
    if not found or not found["seconds"]:
        return []
    own, others = (found[name] / found["seconds"] for name in ("processor_seconds", "others_processor_seconds"))
    told = f"{found['cores']} processors, {figure(own)} busy with this run, {figure(others)} with others"
    warning = ": times vary, and would be shorter on an idle machine" if was_contended(found) else ""
    return [("machine", f"{told}, load {figure(found['load'])}{warning}")]


def trunk(portrait: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Whether the frozen part before the first trained piece was computed once or in every epoch."""
    entry = portrait.get("trunk")
    if not entry:  # a run from before there was such a thing
        return []
    spent = entry.get("check_seconds") or 0.0
    checked = f", checked in {figure(spent)} s" if spent >= CHECKED_FROM else ""
    if not entry["cached"]:
        return [("trunk", f"not cached: {entry['reason']}{checked}")]
    blocks = "" if entry["blocks"] is None else f"{entry['blocks_skipped']} of {entry['blocks']} blocks, "
    place = {"device": "on the accelerator", "memory": "in memory", "file": "in a file"}[entry["where"]]
    first = entry["first_epoch_seconds"]
    return [
        ("trunk", f"cached: {blocks}{size(entry['bytes'])} {place}, computed in {figure(entry['seconds'])} s{checked}"),
        *([] if first is None else [("time of the first epoch", f"{figure(first)} s, the trunk included")]),
    ]


def recomputing(portrait: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Whether the activations were computed again in the backward pass: memory and times depend on it."""
    on = portrait.get("gradient_checkpointing")
    return [("activations", "computed again in the backward pass (gradient checkpointing)")] if on else []


def whole_time(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How long the command took in all: loading, training, evaluation, checkpoints, checks."""
    seconds, resumed = record.get("seconds"), record.get("resumed_from")
    since = f", from step {resumed} on, where it was resumed" if resumed else ""
    return [] if seconds is None else [("time of the whole run", f"{figure(seconds)} s{since}")]


def whole_run(run: Run) -> None:
    """Everything that is on record of one run."""
    spec = [(key, json.dumps(value)) for key, value in run.spec.to_json().items() if value not in (None, [], {})]
    if fits(("spec", run.id), [(key, "") for key, _ in spec]):
        table(("spec", run.id), spec)
    else:
        table(("spec", "value"), spec, title=run.id)
    if run.status != "finished":
        say(f"This run is {run.status}" + (f": {run.error}" if run.error else "."))
        return
    choice(run)
    run_result(run)
    record = run.record
    tasks = record.get("tasks") or {"": record["task"]}  # of a run of several, by name
    facts = [
        *(
            (f"{name} {what}".strip(), line)
            for name, task in tasks.items()
            for what, line in (("data", task["source"]), *(("note", note) for note in task["notes"]))
        ),
        *(("note", note) for note in record.get("notes", ())),
        ("model", record["backbone"]["source"]),
        *(("note", note) for note in record["backbone"]["notes"]),
        *((name, str(version)) for name, version in record["versions"].items() if version is not None),
    ]
    table(("on record", "what"), facts)


def comparison(found: Comparison) -> None:
    """A comparison as a table, best first; the last line is the majority class, where it is known."""
    costs = columns_in("compare")
    records = {row.method: [run.record for run in found.runs if run.spec.method == row.method] for row in found.rows}
    seeds = max(len(row.values) for row in found.rows)
    metric = f"test {found.rows[0].metric}" + (" (95 % interval)" if seeds > 1 else "")
    columns = ("method", metric, "seeds", *(column.titles["compare"] for column in costs))
    rows: list[tuple[str, ...]] = [
        (
            row.method,
            f"{row.mean:.4f}" + ("" if row.interval is None else f" ± {row.interval:.4f}"),
            str(len(row.values)),
            *(column.text(records[row.method]) for column in costs),
        )
        for row in found.rows
    ]
    known = [row.standing.majority for row in found.rows if row.standing is not None and row.standing.majority]
    if known:
        from inlay.workflow.chance import NAME

        rows.append((f"({NAME})", f"{fmean(known[0]):.4f}", str(len(known[0])), *("-" for _ in costs)))
    if fits(columns, rows):
        table(columns, rows, right=range(1, len(columns)))
    else:  # what came out, and then what it cost
        half = 3 + len(costs) // 3
        table(columns[:half], [row[:half] for row in rows], right=range(1, half))
        rest = [(row[0], *row[half:]) for row in rows]
        table((columns[0], *columns[half:]), rest, right=range(1, len(columns) - half + 1))
    say("n: how often training and inference were timed; ± is the standard deviation over them.")
    from inlay.portrait import was_contended

    if slowed := [row.method for row in found.rows if any(map(was_contended, machines(records[row.method])))]:
        say(f"Times vary: other processes, or other runs, used the machine during {', '.join(slowed)}.")


def machines(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any] | None]:
    """What is on record of the machine during some runs."""
    return [record["portrait"].get("machine") for record in records]


def plan(plans: Sequence[Planned], found: Forecast, workers: int = 1) -> None:
    """The runs that would be made, which are finished, what would be left out, and about how long it takes."""
    from inlay.workflow.forecast import in_words

    specs = [spec for planned in plans for spec in planned.specs]
    rows = [
        (
            *(spec.model, spec.subject, spec.method, str(spec.shots or "all"), str(spec.seed)),
            "its own" if spec.learning_rate is None else f"{spec.learning_rate:g}",
            status or "to make",
        )
        for spec, status in zip(specs, found.status, strict=True)
    ]
    table(("model", "data", "method", "shots", "seed", "learning rate", "status"), rows, right=(3, 4, 5))
    for planned in plans:
        left_out(planned.left_out)
    many = "s" * (len(plans) > 1)
    say(f"{len(specs)} run{'s' * (len(specs) != 1)} in {len(plans)} comparison{many}. {in_words(found, workers)}")


def left_out(methods: Mapping[str, str]) -> None:
    """The methods that are not run, one line a reason."""
    for why in dict.fromkeys(methods.values()):
        say(f"left out ({why}): {', '.join(name for name, reason in methods.items() if reason == why)}")


def conclusions(found: Comparison, baseline: str | None = None) -> None:
    """What a comparison's numbers allow one to say, and what is missing from it."""
    from inlay.workflow.comparison import COSTS, words

    for line in words(found, baseline):
        say(line)
    fronts = {name: [row.method for row in found.rows if cost in row.front] for cost, name in COSTS.items()}
    if any(len(methods) > 1 for methods in fronts.values()):
        told = "; ".join(f"{name}: {', '.join(methods)}" for name, methods in fronts.items() if methods)
        say(f"Worth their cost, each better than all that cost less ({told}).")
    elif len(found.rows) > 1:
        say("No method is shown to be worth its cost: none is significantly better than all that cost less.")
    for method in dict.fromkeys(each.method for each in found.tried):
        tried = [each for each in found.tried if each.method == method]
        scores = ", ".join(f"{each.rate:g}: {each.validation:.4f}{' *' * each.chosen}" for each in tried)
        say(f"learning rate of {method}, validation scores (* chosen): {scores}")
    left_out(found.left_out)
    for which, why in found.failures.items():
        say(f"failed: {which}: {why}")
    if any(run.status == "failed" for run in found.others):  # not those that cannot be read, or were never begun
        say("Failed runs are not tried again by themselves: --retry-failed does.")
    if found.unfinished:
        say(f"not done, the same command goes on: {'; '.join(found.unfinished)}")


def p_value(found: Difference) -> str:
    """The p of a paired t-test; of equal differences, which have no spread, that of their signs. Of fewer seeds than
    are tested there is none."""
    if found.verdict == "too few seeds":
        return "-"
    return figure(found.p) + (" (signs)" if found.p is not None and not round(found.difference_error or 0.0, 9) else "")


def differences(found: Sequence[Difference], baseline: str) -> None:
    """Each method's mean and standard error, and its difference from the baseline, paired by seed."""

    def pair(mean: float | None, error: float | None) -> str:
        return "-" if mean is None else f"{mean:.4f}" + ("" if error is None else f" ± {error:.4f}")

    rows = [
        (
            each.method,
            pair(each.mean, each.error),
            pair(each.difference, each.difference_error),
            "-" if each.low is None else f"{each.low:.4f} to {each.high:.4f}",
            p_value(each),
            each.verdict or "the baseline",
        )
        for each in found
    ]
    columns = (
        "method",
        "mean ± s.e.",
        f"minus {baseline} ± s.e.",
        "95 % CI, paired bootstrap",
        "p, paired t",
        "verdict",
    )
    table(columns, rows, right=range(1, 5))
