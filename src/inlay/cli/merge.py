"""`inlay merge`: a model with its adapter folded in, as an ordinary checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli import options as o
from inlay.cli import show


def command(
    out: Annotated[Path, typer.Option(help="The new folder to write.")],
    run: Annotated[
        str | None, typer.Option(help="A run's folder, or its name under runs/ (`inlay runs list`).")
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="The folder of an adapter in PEFT's format, whoever trained it.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Which task, where there are several.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the written weights: float32, bfloat16, float16.")] = "float32",
    model: o.MovedModel = None,
    trust_remote_code: o.Trust = False,
) -> None:
    """Fold an adapter into its base model.

    Writes one checkpoint with the label names and the tokenizer or image processor, which AutoModelFor... loads without
    inlay and without PEFT. It gives the same outputs, up to a rounding. A method whose work no weight can hold, such as
    a prompt, is refused, with the names of those that can be merged.

    \b
    inlay merge --run runs/<id> --out merged/

    \b
    inlay merge --run runs/<id> --task rte --out merged/ --dtype bfloat16

    \b
    inlay merge --adapter my-lora/ --model ./my-model --out merged/
    """
    from inlay.errors import InlayError
    from inlay.workflow.merge import merge

    given = [each for each in (run, adapter) if each is not None]
    if len(given) != 1:
        raise InlayError("Give --run or --adapter, one of them; see `inlay merge --help`.")
    how: dict[str, Any] = {"task": task, "model": model, "dtype": dtype, "trust_remote_code": trust_remote_code}
    found = merge(given[0], out, say=show.say, **how)
    show.say(f"merged into {found}")
