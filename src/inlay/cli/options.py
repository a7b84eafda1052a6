"""The options that several commands share: the same words mean the same everywhere."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli import show
from inlay.errors import InlayError
from inlay.records.spec import MOST_SEEDS as MOST_SEEDS

INTERRUPTED = 130
DATA, TRAINING, OUTPUT = "What to learn from", "How to train", "Where it goes"

Model = Annotated[str, typer.Option(help="Hub id, local folder, or embedded:NAME (see `inlay models`).")]
Task = Annotated[str | None, typer.Option(help="A named task (see `inlay tasks`).", rich_help_panel=DATA)]
Tasks = Annotated[
    str | None,
    typer.Option(
        help="Several named tasks for one run in mixed batches, as in rte,sst2 (method multi-lora).",
        rich_help_panel=DATA,
    ),
]
Sampling = Annotated[
    str,
    typer.Option(
        help="How often each of several tasks has a row: proportional (to its data), temperature or uniform.",
        rich_help_panel=TRAINING,
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        help="With --sampling temperature: rows to the power of 1 over this; 1 is proportional, more is more even.",
        rich_help_panel=TRAINING,
    ),
]
Data = Annotated[
    str | None,
    typer.Option(help="Your own data: a CSV, TSV, JSONL or Parquet file, or a folder of images.", rich_help_panel=DATA),
]
Text = Annotated[
    list[str] | None,
    typer.Option(
        help="Column with the text, or a path into nested data as in review.body; twice for pairs of texts.",
        rich_help_panel=DATA,
    ),
]
Label = Annotated[
    str | None,
    typer.Option(
        help="Column (or path) with the label; with --kind causal-lm the answer, which follows the prompt in --text "
        "after one blank.",
        rich_help_panel=DATA,
    ),
]
Image = Annotated[str | None, typer.Option(help="Column with the paths of images.", rich_help_panel=DATA)]
Kind = Annotated[
    str | None, typer.Option(help="Kind of task, where it cannot be told from the data.", rich_help_panel=DATA)
]
Template = Annotated[
    str | None,
    typer.Option(help="How the fields become one text, e.g. '{premise} {hypothesis}'.", rich_help_panel=DATA),
]
TestData = Annotated[str | None, typer.Option(help="Your own test data, where it is apart.", rich_help_panel=DATA)]
DataDir = Annotated[str | None, typer.Option(help="Folder with local copies of named tasks.", rich_help_panel=DATA)]
Shots = Annotated[
    int | None,
    typer.Option(help="Train on this many examples, drawn evenly over classes.", rich_help_panel=DATA),
]
Protocol = Annotated[str | None, typer.Option(help="A published protocol, e.g. vtab-1k.", rich_help_panel=DATA)]
Epochs = Annotated[
    float | None,
    typer.Option(
        help="Passes over the training data. Default: 3; to train on 512 examples at most, with no --batch-size "
        "or --max-steps either, 30.",
        rich_help_panel=TRAINING,
    ),
]
MaxSteps = Annotated[int | None, typer.Option(help="Stop after this many updates.", rich_help_panel=TRAINING)]
BatchSize = Annotated[
    int | None,
    typer.Option(
        help="Examples per update. Default: 32, or 8 where so few are trained on that 30 epochs are the default.",
        rich_help_panel=TRAINING,
    ),
]
Accumulation = Annotated[
    int,
    typer.Option(
        "--gradient-accumulation", help="Parts a batch is computed in, to save memory.", rich_help_panel=TRAINING
    ),
]
Rate = Annotated[
    float | None, typer.Option("--learning-rate", "--lr", help="Default: the method's own.", rich_help_panel=TRAINING)
]
Decay = Annotated[float, typer.Option(help="Weight decay.", rich_help_panel=TRAINING)]
Warmup = Annotated[
    float, typer.Option(help="Share of the updates over which the rate rises.", rich_help_panel=TRAINING)
]
Schedule = Annotated[str, typer.Option(help="linear, cosine or constant.", rich_help_panel=TRAINING)]
Clip = Annotated[float, typer.Option(help="Largest norm of a gradient; longer ones are cut.", rich_help_panel=TRAINING)]
Patience = Annotated[
    int | None,
    typer.Option("--early-stopping", help="Stop after this many evaluations without gain.", rich_help_panel=TRAINING),
]
Evaluations = Annotated[
    int | None,
    typer.Option(
        help="Evaluations on held-out data during training. Not given: one an epoch; without --early-stopping at most "
        "10, and so few that no more examples are evaluated than trained on.",
        rich_help_panel=TRAINING,
    ),
]
MaxLength = Annotated[int | None, typer.Option(help="Longest text, in tokens.", rich_help_panel=TRAINING)]
Pooling = Annotated[
    str,
    typer.Option(
        help="What a text classifier's head reads: mean, first or last (of the tokens' states), pooler, or own (what "
        "its architecture has it read). auto: what the checkpoint was made for, if it says so; else own.",
        rich_help_panel=TRAINING,
    ),
]
GroupByLength = Annotated[
    bool,
    typer.Option(
        "--group-by-length",
        help="Train on batches of texts that are about equally long: less padding, another order.",
        rich_help_panel=TRAINING,
    ),
]
Precision = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=TRAINING)]
Checkpointing = Annotated[
    bool, typer.Option("--gradient-checkpointing", help="Trade time for memory.", rich_help_panel=TRAINING)
]
TrunkCache = Annotated[
    str,
    typer.Option(
        help="Compute the frozen part before the first trained piece once, not in every epoch: auto, on (an error "
        "where it cannot be) or off.",
        rich_help_panel=TRAINING,
    ),
]
Augment = Annotated[
    str | None,
    typer.Option(
        help="Change the training pictures a little in every epoch: flip (left to right), crop (a random part), or "
        "crop-flip.",
        rich_help_panel=TRAINING,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting of the method, e.g. --set r=16. May be repeated.", rich_help_panel=TRAINING),
]
Layers = Annotated[
    str | None,
    typer.Option(
        help="Layers to adapt, counted from 1, as in 3 or 1,3,5; 0 is the pixels (activation-prompt); auto: the "
        "method's own choice.",
        rich_help_panel=TRAINING,
    ),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.", rich_help_panel=DATA)]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model. Only if you have read it.")
]
Out = Annotated[Path, typer.Option(help="Folder of runs.", rich_help_panel=OUTPUT)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result, no progress.", rich_help_panel=OUTPUT)]

# The options that make a spec, but for the method and the seed: name, type, default.
SPEC: dict[str, tuple[Any, Any]] = {
    "task": (Task, None),
    "tasks": (Tasks, None),
    "data": (Data, None),
    "text": (Text, None),
    "label": (Label, None),
    "image": (Image, None),
    "kind": (Kind, None),
    "template": (Template, None),
    "test_data": (TestData, None),
    "data_dir": (DataDir, None),
    "shots": (Shots, None),
    "protocol": (Protocol, None),
    "revision": (Revision, None),
    "epochs": (Epochs, None),
    "max_steps": (MaxSteps, None),
    "batch_size": (BatchSize, None),
    "gradient_accumulation": (Accumulation, 1),
    "learning_rate": (Rate, None),
    "weight_decay": (Decay, 0.0),
    "warmup": (Warmup, 0.06),
    "schedule": (Schedule, "linear"),
    "clip": (Clip, 1.0),
    "early_stopping": (Patience, None),
    "evaluations": (Evaluations, None),
    "max_length": (MaxLength, None),
    "pooling": (Pooling, "auto"),
    "group_by_length": (GroupByLength, False),
    "precision": (Precision, "auto"),
    "gradient_checkpointing": (Checkpointing, False),
    "trunk_cache": (TrunkCache, "auto"),
    "sampling": (Sampling, "proportional"),
    "temperature": (Temperature, 1.0),
    "augment": (Augment, None),
    "layers": (Layers, None),
    "set_": (Set, None),
    "trust_remote_code": (Trust, False),
}


JOINT = ("tasks", "sampling", "temperature")  # offered by the commands that train several tasks in one run


def takes_spec(
    command: Callable[..., None], without: Collection[str] = (), *, joint: bool = False
) -> Callable[..., None]:
    """Give a command the options that make a spec; it receives them together, as its argument `fields`.

    Those named in `without` are not offered, and keep their defaults; those for several tasks only if it is `joint`.
    """
    without = {*without, *(() if joint else JOINT)}
    own = inspect.signature(command, eval_str=True).parameters
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in SPEC.items()
        if name not in without
    ]
    before = [parameter for name, parameter in own.items() if name != "fields" and parameter.default is parameter.empty]
    after = [
        parameter for name, parameter in own.items() if name != "fields" and parameter.default is not parameter.empty
    ]
    listed = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*before, *shared, *after)]

    def with_options(**given: Any) -> None:
        fields = {name: given.pop(name, default) for name, (_, default) in SPEC.items()}
        fields["text"] = tuple(fields["text"] or ())
        fields["tasks"] = tuple(name.strip() for name in (fields["tasks"] or "").split(",") if name.strip())
        fields["settings"] = settings(fields.pop("set_"), fields.pop("layers"))
        with resumable():
            command(fields=fields, **given)

    with_options.__doc__ = command.__doc__
    with_options.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in listed}
    return with_options


@contextmanager
def resumable() -> Iterator[None]:
    """Ctrl-C in the middle of runs is not the end of them: say so."""
    try:
        yield
    except KeyboardInterrupt:
        show.say("Interrupted. Give the same command again: it goes on from the last checkpoint.")
        raise typer.Exit(INTERRUPTED) from None


def settings(pairs: list[str] | None, chosen_layers: str | None = None) -> dict[str, Any]:
    """`--set key=value` pairs; values are JSON where they can be, words otherwise. `--layers` is one of them."""
    found: dict[str, Any] = {}
    for pair in pairs or ():
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise InlayError(f"--set takes key=value, as in --set r=16; got {pair!r}.")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    if chosen_layers is not None:
        if "layers" in found:
            raise InlayError(f"Give --layers {chosen_layers} or --set layers={found['layers']}, not both.")
        found |= layers(chosen_layers)
    return found


def layers(chosen: str) -> dict[str, list[int]]:
    """The setting that `--layers 3`, `--layers 1,3,5` or `--layers auto` stands for."""
    if chosen.strip() == "auto":
        return {}
    parts = [part.strip() for part in chosen.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise InlayError(f"--layers takes numbers counted from 1, as in 3 or 1,3,5, or auto; got {chosen!r}.")
    return {"layers": sorted({int(part) for part in parts})}
