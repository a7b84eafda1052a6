"""`inlay tune`: one run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli import options as o
from inlay.cli import show
from inlay.errors import InlayError

if TYPE_CHECKING:
    from inlay.records.store import Run


@partial(o.takes_spec, joint=True)
def command(
    context: typer.Context,
    fields: dict[str, Any],
    file: Annotated[
        Path | None, typer.Argument(help="A run as YAML; options given here override it.", show_default=False)
    ] = None,
    model: o.OwnModel = None,
    method: o.OwnMethod = None,
    seed: o.Seed = 0,
    log_to: Annotated[
        str, typer.Option(help="Where metrics go too, as in tensorboard,wandb,mlflow,trackio.", show_default=False)
    ] = "",
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="The same as --log-to tensorboard.")] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the run as YAML, with its defaults, and stop.")
    ] = False,
    auto_budget: Annotated[
        float | None,
        typer.Option(help="With --method auto: minutes that the comparison may take. Default: 10.", show_default=False),
    ] = None,
    out: o.Out = Path("runs"),
    quiet: o.Quiet = False,
) -> None:
    """Adapt a model to data, evaluate it, and record the run.

    A run that was made before is found, not repeated; one that was cut short goes on where it stopped.

    \b
    inlay tune --model embedded:minilm --task rotten-tomatoes --method lora

    \b
    inlay tune --model ./my-model --data reviews.csv --text body --label stars --method bias

    \b
    inlay tune --model embedded:smollm2 --data chats.jsonl --method lora

    \b
    inlay tune --model embedded:minilm --tasks rte,sst2,mrpc,cola --method multi-lora

    \b
    inlay tune --model google/vit-base-patch16-224 --data photos/ --method linear-probe

    \b
    inlay tune --model embedded:minilm --data reviews.csv --method auto --auto-budget 20

    \b
    inlay tune run.yaml --epochs 5
    """
    from inlay.workflow import run_file
    from inlay.workflow.tune import AUTO, identify, tune

    asked = {"model": model, "method": method, "seed": seed, **fields}
    if file is None:
        spec = run_file.make(asked)
    else:
        written = run_file.read(file, {name: asked[name] for name in o.given(context) & asked.keys()})
        spec = written.spec
        out = out if written.out is None or "out" in o.given(context) else Path(written.out)
    if auto_budget is not None and spec.method != AUTO:
        raise InlayError(f"--auto-budget is for --method auto, and the method is {spec.method!r}: leave it out.")
    if print_config:
        if spec.method == AUTO:
            raise InlayError("--print-config prints a run, and --method auto has yet to pick its method: give one.")
        show.answer(run_file.write(identify(spec)[0], str(out)).rstrip("\n"))
        return
    boards = [*o.names_in(log_to), *(["tensorboard"] if tensorboard else [])]
    say = show.nothing if quiet else show.say
    if spec.method == AUTO:
        from inlay.workflow.auto import MINUTES, tune_auto

        minutes = MINUTES if auto_budget is None else auto_budget
        run = tune_auto(spec, out, minutes=minutes, progress=not quiet, log_to=boards, say=say)
        show.choice(run)
    else:
        run = tune(spec, out, progress=not quiet, log_to=boards, say=say)
    show.run_result(run)
    if not quiet:
        _say_next(run)


def _say_next(run: Run) -> None:
    """What can be done with a finished run."""
    how = f"--adapter {run.adapter} requests.jsonl" if run.spec.tasks else f"--run {run.folder} --input new-data"
    show.say(f"Predict with it: inlay predict {how} --output predictions.jsonl")
    if ((run.record.get("task") or {}).get("schema") or {}).get("chat"):
        show.say(f"Talk to it: inlay chat --run {run.folder}")
    show.say(f"What it gets wrong, as a page: inlay report {run.folder.parent} --out report.html")
