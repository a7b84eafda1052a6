"""`inlay evaluate`: a finished run is scored on labelled rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli import options as o
from inlay.cli import show
from inlay.errors import InlayError


def command(
    run: Annotated[
        str | None,
        typer.Option(help="A run's folder, or its name under --out (see `inlay runs list`).", show_default=False),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Labelled rows: a file like the one it was trained on, or a folder of class folders.",
            show_default=False,
        ),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Which of the run's tasks, where it has several.")] = None,
    label: Annotated[
        str | None, typer.Option(help="Column with the label. Default: the one of training, or the only likely one.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="With --model, no run: image-text scores the model as it is.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="With --kind: column with the texts of the images.")] = None,
    image: Annotated[str | None, typer.Option(help="With --kind: column with the images.")] = None,
    template: Annotated[str | None, typer.Option(help='With --kind: text of a class, "a photo of a {label}".')] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write the result as JSON, too.")] = None,
    harness: Annotated[
        str | None,
        typer.Option(
            help="Tasks of lm-evaluation-harness in place of --data, for a language model: names or YAML files, as in "
            "arc_easy,mine.yaml. Needs the extra `harness`.",
            show_default=False,
        ),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="With --harness: an adapter's folder in place of a run.", show_default=False)
    ] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="With --harness: examples before each question. Default: as the task has.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="With --harness: questions of each task. Default: all.")
    ] = None,
    model: o.MovedModel = None,
    trust_remote_code: o.Trust = False,
    out: o.Out = Path("runs"),
) -> None:
    """Score a finished run on new labelled rows, or on a benchmark; or a model that compares images with texts.

    Prints the run's metrics on these rows, beside those of its test split. All rows that have a label are scored. Of
    data that are divided (a column `split`, folders train and test) it is the test rows alone. A label that the run has
    not learnt is an error. With --harness lm-evaluation-harness scores a language model (run, adapter or --model).

    \b
    inlay evaluate --run runs/<id> --data labelled.csv --label stars --output scores.json

    \b
    inlay evaluate --model ./clip --data photos/ --kind image-text

    \b
    inlay evaluate --run runs/<id> --harness arc_easy,hellaswag --limit 200
    """
    if (data is None) == (harness is None):
        raise InlayError("Give --data, labelled rows, or --harness, tasks of lm-evaluation-harness: one of them.")
    if harness is not None:
        unread = {"--label": label, "--kind": kind, "--text": text, "--image": image, "--template": template}
        _refuse(unread, "is for --data; a task of --harness says itself which data, texts and answers are read")
        who: dict[str, Any] = {"model": model, "task": task, "out": out, "trust_remote_code": trust_remote_code}
        _by_harness(run, adapter, who, o.names_in(harness), {"shots": shots, "limit": limit, "output": output})
        return
    _refuse({"--adapter": adapter, "--shots": shots, "--limit": limit}, "is for --harness; --data scores a run")
    if kind is not None and run is None and model is not None:
        about: dict[str, Any] = {"text": (text,) if text else (), "image": image, "label": label, "template": template}
        _as_it_is(model, data, output, task, {**about, "kind": kind, "trust_remote_code": trust_remote_code})
        return
    if (kind, text, image, template) != (None, None, None, None):
        raise InlayError("--kind, --text, --image and --template score a model as it is: give --model, and no --run.")
    if run is None:
        raise InlayError("--data scores a run: give --run; or --model and --kind, to score a model as it is.")
    from inlay.workflow.loaded import evaluate

    how: dict[str, Any] = {"model": model, "trust_remote_code": trust_remote_code, "out": out}
    show.evaluation(evaluate(run, data, output, task=task, label=label, say=show.say, **how))


def _refuse(options: dict[str, Any], why: str) -> None:
    """An error for an option that was given where it would be ignored."""
    for name, value in options.items():
        if value is not None:
            raise InlayError(f"{name} {value} {why}: leave it out.")


def _by_harness(
    run: str | None, adapter: Path | None, who: dict[str, Any], tasks: list[str], how: dict[str, Any]
) -> None:
    """A language model on the tasks of lm-evaluation-harness."""
    from inlay.workflow.harness import evaluate_harness
    from inlay.workflow.speakers import open_speaker

    speaker = open_speaker(run, adapter=adapter, say=show.say, **who)
    show.harness(evaluate_harness(speaker, tasks, trust=who["trust_remote_code"], say=show.say, **how))


def _as_it_is(model: str, data: Path | None, output: Path | None, task: str | None, about: dict[str, Any]) -> None:
    """A model that compares images with texts, without training."""
    from inlay.workflow.zero_shot import evaluate_model

    _refuse({"--task": task}, "is one of a run's tasks, and there is no --run")
    show.evaluation(evaluate_model(model, str(data), output, say=show.say, **about))
