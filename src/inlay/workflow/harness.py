"""Score a language model, with whatever adapter is in it, on tasks of lm-evaluation-harness.

The harness is given the model itself, so every method acts as it does everywhere. Its own tasks take their data from
the Hub; a task of one's own is a YAML file, with data on this machine.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inlay.console import quiet
from inlay.errors import InlayError, first_line, misspelt, nearest, unknown
from inlay.records.atomic import write_json
from inlay.training.batches import count_virtual_tokens
from inlay.workflow.notes import Say, or_log
from inlay.workflow.speakers import Speaker

BATCH = 8
CODE = "!function"  # in a YAML of the harness: a function of a Python file beside it
RESAMPLES = 1000  # of the harness's bootstrap, for metrics that are no mean


@dataclass(frozen=True)
class Score:
    """One metric of one task: `error` is the standard error that the harness gives, None where it gives none."""

    task: str
    metric: str
    filter: str
    value: float
    error: float | None
    examples: int


@dataclass(frozen=True)
class HarnessResult:
    """What the harness found, and how it was asked."""

    model: str
    harness: str
    shots: int | None
    limit: int | None
    scores: list[Score]

    def to_json(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return asdict(self)


def evaluate_harness(
    speaker: Speaker,
    tasks: Sequence[str],
    *,
    shots: int | None = None,
    limit: int | None = None,
    trust: bool = False,
    output: Path | None = None,
    say: Say | None = None,
) -> HarnessResult:
    """Run tasks of the harness: its own by name, or YAML files. `shots` is the number of examples before each question
    (None: as the task says), `limit` the number of questions of each task. A YAML that runs code is taken only with
    `trust`."""
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise InlayError(
            f"The harness needs {error.name}, which is not installed: pip install 'inlay[harness]'."
        ) from None
    say = or_log(say)
    if output is not None and output.exists() and output.is_dir():
        raise InlayError(f"{output} is a folder: give the name of a file.")
    with _silent():
        names, manager = _find(tasks, trust)
    model = speaker.writer.model.eval()
    if speaker.adapter is not None and speaker.adapter in getattr(model, "peft_config", {}):
        model.set_adapter(speaker.adapter)
    how: dict[str, Any] = {"num_fewshot": shots, "limit": limit, "bootstrap_iters": RESAMPLES, "log_samples": False}
    try:
        with _silent():
            harness = _take_in(HFLM, speaker)
            found = lm_eval.simple_evaluate(harness, tasks=names, task_manager=manager, **how)
    except Exception as error:  # a task is somebody's program, and its data are anywhere
        raise _explain(error, names) from error
    assert found is not None
    if limit is not None:
        first = "question" if limit == 1 else f"{limit:,} questions"
        say(f"only the first {first} of each task: for a quick look, not for a comparison")
    result = HarnessResult(speaker.title, lm_eval.__version__, shots, limit, [*_scores(found)])
    if output is not None:
        write_json(output, result.to_json())
    return result


def _take_in(kind: Any, speaker: Speaker) -> Any:
    """The model as the harness's class `kind` has it, with logits for the tokens of the text alone: methods with tokens
    of their own before it give more, and the harness counts from the first."""

    class WithoutVirtualTokens(kind):
        def _model_call(self, inps: Any, *others: Any, **named: Any) -> Any:
            return super()._model_call(inps, *others, **named)[:, -inps.shape[1] :]

    writer = speaker.writer
    room = None if writer.context is None else writer.context - count_virtual_tokens(writer.model)
    return WithoutVirtualTokens(pretrained=writer.model, tokenizer=writer.tokenizer, batch_size=BATCH, max_length=room)


def _find(tasks: Sequence[str], trust: bool) -> tuple[list[str], Any]:
    """The names of the tasks, and the harness's index of them, with the folders of those that are files."""
    import yaml
    from lm_eval.tasks import TaskManager

    names, folders = [], []
    for task in tasks:
        if not task.endswith((".yaml", ".yml")):
            names.append(task)
            continue
        path = Path(task)
        if not path.is_file():
            raise InlayError(f"There is no file {task}.{misspelt(path)} Give a YAML of the harness, or a task's name.")
        text = path.read_text(encoding="utf-8")
        if CODE in text and not trust:
            raise InlayError(
                f"{task} names functions ({CODE}) of a Python file beside it, which would be run. Read it, and if you "
                "trust it give --trust-remote-code."
            )
        try:
            read = yaml.safe_load(text.replace(CODE, ""))
        except yaml.YAMLError as error:
            raise InlayError(f"{task} is no YAML: {first_line(error)}") from None
        if not isinstance(read, Mapping) or not isinstance(read.get("task"), str):
            raise InlayError(f"{task} has no `task:` with a name, as a task of the harness has.")
        names.append(read["task"])
        folders.append(str(path.resolve().parent))
    if not names:
        raise InlayError("Give --harness the names of tasks, or YAML files, separated by commas.")
    try:
        manager = TaskManager(include_path=folders or None, include_defaults=len(folders) < len(tasks))
    except Exception as error:  # of any file in these folders
        raise InlayError(f"The tasks in {', '.join(folders)} cannot be read: {first_line(error)}") from error
    known = manager.all_tasks
    for name in names:
        if name not in known:
            raise unknown("task of the harness", name, nearest(name, known, 5), "`lm-eval ls tasks` lists all.")
    return names, manager


def _explain(error: Exception, names: Sequence[str]) -> InlayError:
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < 10:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    away = ("Offline", "Connection", "Connect", "LocalEntryNotFound", "Timeout", "HfHub")
    if any(word in type(each).__name__ for each in chain for word in away):
        return InlayError(
            f"The data of {', '.join(names)} could not be had from the Hub ({type(error).__name__}: "
            f"{first_line(error)}). Run it where there is a network, or give a YAML whose data are on this machine "
            "(docs/harness.md)."
        )
    return InlayError(f"The harness failed on {', '.join(names)} ({type(error).__name__}: {first_line(error)}).")


def _scores(found: Mapping[str, Any]) -> Iterator[Score]:
    for task, values in sorted(found["results"].items()):
        counts = found.get("n-samples", {}).get(task, {})
        for key, value in values.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = values.get(f"{metric}_stderr,{filtered}")
            known = float(error) if isinstance(error, (int, float)) else None
            yield Score(task, metric, filtered, float(value), known, int(counts.get("effective", 0)))


@contextmanager
def _silent() -> Iterator[None]:
    """Without the harness's own log, without its question whether to run code from the Hub, and without asking git for
    the commit of the working folder, of which git complains where there is none."""
    import lm_eval.evaluator as harness

    loggers = [logging.getLogger(name) for name in ("lm_eval", "lm-eval", "datasets")]
    before, known = [each.level for each in loggers], os.environ.get("TOKENIZERS_PARALLELISM")
    asks_git = harness.get_git_commit_hash
    with quiet():
        harness.get_git_commit_hash = lambda: None
        for each in loggers:
            each.setLevel(logging.ERROR)
        try:
            yield
        finally:
            harness.get_git_commit_hash = asks_git
            for each, level in zip(loggers, before, strict=True):
                each.setLevel(level)
            if known is None:
                os.environ.pop("TOKENIZERS_PARALLELISM", None)
            else:
                os.environ["TOKENIZERS_PARALLELISM"] = known
