"""The options that several commands share, each declared once: the same words mean the same everywhere."""

from __future__ import annotations

import dataclasses
import inspect
import json
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli import show
from inlay.errors import InlayError
from inlay.records.spec import MOST_SEEDS as MOST_SEEDS
from inlay.records.spec import Spec

if TYPE_CHECKING:
    from inlay.workflow.generation import Sampling

INTERRUPTED = 130
SOME_FAILED = 1
DATA, TRAINING, OUTPUT, WHERE = "What to learn from", "How to train", "Where it goes", "Where it runs"

Model = Annotated[str, typer.Option(help="Hub id, local folder, or embedded:NAME (see `inlay models`).")]
OwnModel = Annotated[
    str | None, typer.Option(help="Hub id, local folder, or embedded:NAME (see `inlay models`).", show_default=False)
]
OwnMethod = Annotated[
    str | None,
    typer.Option(
        help="How to adapt it (see `inlay methods`). auto: a short comparison of a few on held-out rows picks one, and "
        "says why; ties go to the one that trains fewer parameters.",
        show_default=False,
    ),
]
MovedModel = Annotated[str | None, typer.Option(help="Where the base model is now, if it has moved.")]
Classes = Annotated[
    str | None,
    typer.Option(help="Where a model compares images with texts: other classes than the run's, as in cat,dog."),
]
Captions = Annotated[
    str | None, typer.Option(help='With those: what makes the text of a class. Default: "a photo of a {label}".')
]
Method = Annotated[str, typer.Option(help="How to adapt it (see `inlay methods`).")]
Seed = Annotated[int, typer.Option(help="Decides everything that is random.")]
Seeds = Annotated[int, typer.Option(min=1, max=MOST_SEEDS, help="Runs of each setting, with the seeds 0, 1, ...")]
DataDir = Annotated[str | None, typer.Option(help="Folder with local copies of named tasks.", rich_help_panel=DATA)]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model. Only if you have read it.")
]
Out = Annotated[Path, typer.Option(help="Folder of runs.", rich_help_panel=OUTPUT)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result, no progress.", rich_help_panel=OUTPUT)]


@dataclass(frozen=True)
class Option:
    """One option of a group: its help, the panel it is listed in, and its type, default and flags."""

    help: str
    panel: str | None = None
    kind: Any = str | None
    default: Any = None
    flags: tuple[str, ...] = ()
    least: float | None = None

    def parameter(self, name: str) -> inspect.Parameter:
        """As a parameter of a command."""
        flags = self.flags or ((f"--{name.replace('_', '-')}",) if self.kind is bool else ())
        option = typer.Option(*flags, help=self.help, rich_help_panel=self.panel, min=self.least)
        annotated: Any = Annotated
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=self.default, annotation=annotated[self.kind, option]
        )


# What the options say that make a spec, by the panel they are listed in. A field's type and default are the spec's.
HELPS: dict[str | None, dict[str, str]] = {
    DATA: {
        "task": "A named task (see `inlay tasks`).",
        "tasks": "Several tasks for one run in mixed batches (lora, multi-lora): names, as in rte,sst2, or a file of "
        "tasks, tasks.yaml.",
        "task_data": "One of several tasks, on your own data: a name and a path, as in reviews=reviews.csv. May be "
        "repeated; --text, --label and --kind are those of all.",
        "task_fields": 'What single tasks have of their own, as JSON: {"reviews": {"data": ..., "label": ...}}.',
        "data": "Your own data: a CSV, TSV, JSONL or Parquet file, of conversations too, or a folder of images.",
        "text": "Column with the text, or a path into nested data as in review.body; twice for pairs of texts.",
        "label": "Column (or path) with the label, or several as in a,b,c; with --kind causal-lm the answer, which "
        "follows the prompt in --text after one blank; with --kind sequence-to-sequence the text to write.",
        "image": "Column with the paths of images.",
        "label_separator": "What stands between the labels of a row that has several (kind multi-label), as in '|'.",
        "classes": "Names of the classes, as in bad,ok,good: from the lowest to the highest with --kind ordinal; with "
        "--kind soft-labels those of probabilities given as lists.",
        "kind": "Kind of task, where the data do not show it.",
        "template": "How the fields become one text, e.g. '{premise} {hypothesis}'; for conversations a chat template "
        "in Jinja, or its file.",
        "test_data": "Your own test data, if they are in a file or folder of their own.",
        "data_dir": "Folder with local copies of named tasks.",
        "shots": "Train on this many examples, drawn evenly over classes.",
        "protocol": "A published protocol, e.g. vtab-1k.",
        "revision": "Branch, tag or commit of a hub model.",
    },
    TRAINING: {
        "epochs": "Passes over the training data. Default: 3; with at most 512 training examples, and neither "
        "--batch-size nor --max-steps given, 30. Where a language model learns to write, lora has others by the "
        "model's size (docs/methods/lora.md).",
        "max_steps": "Stop after this many updates.",
        "batch_size": "Examples per update. Default: 32; 8 where 30 epochs are the default.",
        "gradient_accumulation": "Parts a batch is computed in, to save memory.",
        "learning_rate": "Default: the method's own; of lora, where a language model learns to write, 1e-3 below 1B "
        "parameters, 2e-4 below 20B, 1e-4 above (docs/methods/lora.md has the sources).",
        "weight_decay": "Weight decay.",
        "warmup": "Share of the updates over which the learning rate rises.",
        "schedule": "Schedule of the learning rate: linear, cosine or constant.",
        "clip": "Largest norm of a gradient; longer ones are clipped.",
        "class_weights": "How much each class counts in the loss: balanced (rare ones more, so that all count alike), "
        "or weights by name, as in rare=3,common=1; classes not named count 1. For one class a row.",
        "early_stopping": "Stop after this many evaluations without improvement.",
        "evaluations": "Evaluations on the validation split during training. Default: one an epoch; without "
        "--early-stopping at most 10, and so few that no more examples are evaluated than trained on.",
        "max_eval": "Rows of a validation split that an evaluation during training scores, drawn once by the seed. "
        "At the end validation and test are scored whole. Default: all.",
        "max_length": "Longest text, in tokens.",
        "image_size": "Side of the images in pixels, where it is to be another than the model's own; a transformer's "
        "positions are interpolated.",
        "pooling": "What a text classifier's head reads: mean, first or last (of the tokens' states), pooler, or own "
        "(what its architecture has it read). auto: what the checkpoint was made for, if it says so; else own.",
        "pack": "Let short texts of a training batch share rows, for tasks in which a model writes: less padding, and "
        "the same is learnt.",
        "group_by_length": "Train on batches of texts of about equal length: less padding, another order.",
        "precision": "auto, float32, bfloat16 or float16.",
        "quantize": "Hold the frozen linear layers in fewer bits: 4bit (NF4) or 8bit (LLM.int8) by bitsandbytes, int8 "
        "or int4 by torchao. Needs the extra `quantize`.",
        "gradient_checkpointing": "Use less memory and more time: activations are computed again. Default: only where "
        "a language model of 1B parameters or more learns to write on CUDA.",
        "trunk_cache": "Compute the frozen part before the first trained piece once, not in every epoch: auto, on (an "
        "error where it cannot be) or off.",
        "similarity_temperature": "With --kind embedding: divides cosines before their softmax. Default: 0.05.",
        "sampling": "How often each of several tasks has a row: proportional (to its data), temperature or uniform.",
        "temperature": "With --sampling temperature: rows to the power of 1 over this; 1 is proportional, more is more "
        "even.",
        "augment": "Change the training images a little in every epoch: flip (left to right), crop (a random part), or "
        "crop-flip.",
        "init_adapter": "Begin with what this adapter has learnt: a run (its folder or name), or an adapter's folder, "
        "of the same method and model. The head is new.",
        "calibrate": "At the end, choose the temperature of the classes' probabilities on the validation split: honest "
        "scores, the same predictions. For one class a row.",
        "towers": "With --kind image-text: adapt the tower that reads images, the one that reads texts, or both.",
        "layers": "Layers to adapt, counted from 1, as in 3 or 1,3,5; 0 is the pixels (activation-prompt); auto: the "
        "method's own choice.",
        "set_": "A setting of the method, e.g. --set r=16. May be repeated.",
    },
    None: {"trust_remote_code": "Run code that comes with the model. Only if you have read it."},
}
TYPED = {  # unlike a spec
    **dict.fromkeys(("text", "task_data", "set_"), list[str] | None),
    **dict.fromkeys(("tasks", "task_fields", "layers", "classes"), str | None),
}
FLAGS = {"learning_rate": ("--learning-rate", "--lr"), "set_": ("--set",)}


def _spec_options() -> dict[str, Option]:
    hints, defaults = typing.get_type_hints(Spec), {field.name: field.default for field in dataclasses.fields(Spec)}
    return {
        name: Option(help, panel, TYPED[name], flags=FLAGS.get(name, ()))
        if name in TYPED
        else Option(help, panel, hints[name], defaults[name], FLAGS.get(name, ()))
        for panel, helps in HELPS.items()
        for name, help in helps.items()
    }


# The options that make a spec, but for the model, the method and the seed.
SPEC = _spec_options()
# Offered by the commands that train several tasks in one run.
JOINT = (
    "tasks",
    "task_data",
    "task_fields",
    "sampling",
    "temperature",
)
# Where runs are made: what `engines.make` takes.
ENGINE: dict[str, Option] = {
    "engine": Option("local (the default): this machine; ray: a Ray cluster.", WHERE),
    "workers": Option("Runs at a time on this machine; they share its cores.", WHERE, int | None, least=1),
    "cpus": Option("Cores of each run.", WHERE, float | None),
    "gpus": Option("GPUs of each run: 1, a part of one to share it, or 0 for none.", WHERE, float | None),
    "address": Option("A Ray cluster: host:port, or auto for this machine's. Default: one of its own.", WHERE),
}
# How a text is continued: what `inlay.workflow.generation.Sampling` takes.
SAMPLING: dict[str, Option] = {
    "max_tokens": Option("The longest answer, in tokens.", None, int, 256),
    "temperature": Option("0: always the likeliest token; 1: drawn as the model has it.", None, float, 0.0),
    "top_p": Option("Draw from the likeliest tokens that together have this share.", None, float, 1.0),
    "seed": Option("Draws the same answers again. Default: others each time.", None, int | None),
    "stop": Option("End before this text; \\n is a line's end. May be repeated.", None, list[str] | None),
}
# How many runs are carried out.
PACE: dict[str, Option] = {
    "minutes": Option(
        "Begin nothing after this long, and stop what runs; the same command goes on.", None, float | None, least=0
    ),
    "retry_failed": Option("Try runs again that are on record as failed.", None, bool, False),
    "dry_run": Option("Check what was asked, print the runs, and stop.", None, bool, False),
}


def takes(**groups: Mapping[str, Option]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command groups of options; it receives each group as one argument, a dictionary of this name."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        listed: list[inspect.Parameter] = []
        for name, own in inspect.signature(command, eval_str=True).parameters.items():
            if name in groups:
                listed += [option.parameter(each) for each, option in groups[name].items()]
            else:
                listed.append(own.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        def with_options(**given: Any) -> None:
            command(**{group: {name: given.pop(name) for name in groups[group]} for group in groups}, **given)

        with_options.__doc__ = command.__doc__
        with_options.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
        with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in listed}
        return with_options

    return decorate


def takes_spec(
    command: Callable[..., None],
    without: Collection[str] = (),
    *,
    joint: bool = False,
    **groups: Mapping[str, Option],
) -> Callable[..., None]:
    """Give a command the options that make a spec; it receives them as its argument `fields`, ready for `Spec`.

    Those named in `without` are not offered, and keep their defaults; those for several tasks only if it is `joint`.
    """
    without = {*without, *(() if joint else JOINT)}

    def with_fields(fields: dict[str, Any], **given: Any) -> None:
        fields = {name: fields.get(name, option.default) for name, option in SPEC.items()}
        fields["text"] = tuple(fields["text"] or ())
        fields["classes"] = tuple(names_in(fields["classes"] or ""))
        fields |= several(fields["tasks"], fields.pop("task_data"), fields["task_fields"])
        fields["settings"] = settings(fields.pop("set_"), fields.pop("layers"))
        with resumable():
            command(fields=fields, **given)

    with_fields.__doc__ = command.__doc__
    with_fields.__signature__ = inspect.signature(command, eval_str=True)  # type: ignore[attr-defined]
    offered = {name: option for name, option in SPEC.items() if name not in without}
    return takes(fields=offered, **groups)(with_fields)


@contextmanager
def resumable() -> Iterator[None]:
    """Ctrl-C in the middle of runs is not the end of them: say so."""
    try:
        yield
    except KeyboardInterrupt:
        show.say("Interrupted. Give the same command again: it goes on from the last checkpoint.")
        raise typer.Exit(INTERRUPTED) from None


def given(context: typer.Context) -> set[str]:
    """The fields of a spec, and other options, that were typed: what has its default is not among them."""
    typed = {name for name in context.params if getattr(context.get_parameter_source(name), "name", "") != "DEFAULT"}
    also = {"settings": {"set_", "layers"}, "tasks": {"task_data"}, "task_fields": {"tasks", "task_data"}}
    return typed | {name for name, sources in also.items() if typed & sources}


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


def several(names: str | None, data: list[str] | None, more: str | None) -> dict[str, Any]:
    """The tasks that `--tasks`, `--task-data` and `--task-fields` stand for, as fields of a spec."""
    if not names and not data and not more:
        return {"tasks": (), "task_fields": {}}
    from inlay.workflow.tasks_file import gather

    try:
        own = json.loads(more) if more else {}
    except ValueError as error:
        raise InlayError(f"--task-fields takes JSON, and this is none ({error}): {more!r}.") from None
    if not isinstance(own, dict):
        raise InlayError(f"--task-fields takes a JSON object of tasks, by their names; got {more!r}.")
    return gather(names_in(names or ""), data or (), own)


def layers(chosen: str) -> dict[str, list[int]]:
    """The setting that `--layers 3`, `--layers 1,3,5` or `--layers auto` stands for."""
    if chosen.strip() == "auto":
        return {}
    parts = [part.strip() for part in chosen.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise InlayError(f"--layers takes numbers counted from 1, as in 3 or 1,3,5, or auto; got {chosen!r}.")
    return {"layers": sorted({int(part) for part in parts})}


def sampling(given: dict[str, Any]) -> Sampling:
    """What the options of `SAMPLING` say."""
    from inlay.workflow.generation import Sampling

    stop = tuple(each.replace("\\n", "\n") for each in given["stop"] or ())
    return Sampling(given["max_tokens"], given["temperature"], given["top_p"], given["seed"], stop)


def names_in(text: str) -> list[str]:
    """Names separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def pairs_in(pairs: Sequence[str], option: str) -> dict[str, str]:
    """Names with their values, as in `data=/mnt/data`."""
    split = [pair.partition("=") for pair in pairs]
    for pair, (name, sign, _) in zip(pairs, split, strict=True):
        if not sign or not name:
            raise InlayError(f"{option} takes NAME=VALUE, as in {option} data=/mnt/data; got {pair!r}.")
    return {name: value for name, _, value in split}


def numbers_in(text: str, option: str, *, whole: bool = False) -> list[float]:
    """Numbers separated by commas, all greater than 0."""
    try:
        numbers = [float(int(part)) if whole else float(part) for part in names_in(text)]
    except ValueError:
        numbers = []
    if not numbers or not all(number > 0 for number in numbers):
        kind = "whole numbers" if whole else "numbers"
        raise InlayError(f"{option} takes {kind} greater than 0, separated by commas, as in 50,100; got {text!r}.")
    return numbers
