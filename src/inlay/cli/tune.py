"""`inlay tune`: one run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli import options as o
from inlay.cli import show


@partial(o.takes_spec, joint=True)
def command(
    model: o.Model,
    method: o.Method,
    fields: dict[str, Any],
    seed: o.Seed = 0,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also log for TensorBoard.")] = False,
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
    inlay tune --model embedded:minilm --tasks rte,sst2,mrpc,cola --method multi-lora

    \b
    inlay tune --model google/vit-base-patch16-224 --data photos/ --method linear-probe
    """
    from inlay.records.spec import Spec
    from inlay.workflow.tune import tune

    spec = Spec(model=model, method=method, seed=seed, **fields)
    run = tune(spec, out, progress=not quiet, tensorboard=tensorboard, say=show.nothing if quiet else show.say)
    show.run_result(run)
    if not quiet:
        how = f"--adapter {run.adapter} requests.jsonl" if spec.tasks else f"--run {run.folder} --input new-data"
        show.say(f"Predict with it: inlay predict {how} --output predictions.jsonl")
