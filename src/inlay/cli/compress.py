"""`inlay compress`: a prompt of any length becomes an adapter of fixed size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli import options as o
from inlay.cli import show

if TYPE_CHECKING:
    from inlay.workflow.compress import Compression


@o.takes(fields={name: o.SPEC[name] for name in ("precision", "set_", "layers", "revision", "trust_remote_code")})
def command(
    model: o.Model,
    out: Annotated[Path, typer.Option(help="A new folder for the adapter.", rich_help_panel=o.OUTPUT)],
    fields: dict[str, Any],
    prompt: Annotated[Path | None, typer.Option(help="A text file with the prompt.")] = None,
    prefix_adapter: Annotated[
        Path | None,
        typer.Option(help="In place of a prompt: an adapter that PEFT's prefix tuning trained. Needs --texts."),
    ] = None,
    distil: Annotated[
        bool,
        typer.Option(
            "--distil/--no-distil",
            help="Train the adapter to match the prompted model; without it, the closed form alone: seconds, but far "
            "less of the prompt.",
        ),
    ] = True,
    texts: Annotated[
        Path | None,
        typer.Option(
            help="Continuations of the prompt to learn from, one a line (.jsonl: the field `text`). Default: the "
            "prompted model writes its own.",
            rich_help_panel=o.DATA,
        ),
    ] = None,
    count: Annotated[
        int, typer.Option(help="How many continuations the model writes; a fifth is held out.", rich_help_panel=o.DATA)
    ] = 320,
    length: Annotated[int, typer.Option(help="Tokens of a continuation.", rich_help_panel=o.DATA)] = 64,
    steps: Annotated[
        int, typer.Option(help="Updates; 0: the least-squares fit alone.", rich_help_panel=o.TRAINING)
    ] = 300,
    batch_size: Annotated[int, typer.Option(help="Texts per update.", rich_help_panel=o.TRAINING)] = 8,
    learning_rate: Annotated[
        float,
        typer.Option(
            "--learning-rate",
            "--lr",
            help="How much a step changes, relative to each head.",
            rich_help_panel=o.TRAINING,
        ),
    ] = 3e-3,
    seed: o.Seed = 0,
    quiet: o.Quiet = False,
) -> None:
    """Compress a prompt into an NTK-Attention adapter: the model then behaves as if the prompt stood before every text.

    The prompt takes no tokens, no cache and no context any more. The table shows, on continuations that were held out,
    how much of what the prompt was worth is left. Use the adapter with `PeftModel.from_pretrained(model, OUT)` after
    `import inlay`.

    \b
    inlay compress --model embedded:smollm2 --prompt long_prompt.txt --out adapter/

    \b
    inlay compress --model embedded:smollm2 --prompt long_prompt.txt --out adapter/ --texts dialogues.jsonl

    \b
    inlay compress --model embedded:smollm2 --prompt long_prompt.txt --out adapter/ --no-distil --set feature_map=taylor
    """
    from inlay.workflow.compress import Options, compress

    options = Options(
        steps=steps,
        learning_rate=learning_rate,
        batch_size=batch_size,
        texts=count,
        length=length,
        seed=seed,
        distil=distil,
        settings=o.settings(fields.pop("set_"), fields.pop("layers")),
        **fields,
    )
    try:
        found = compress(
            model,
            prompt,
            out,
            prefix_adapter=prefix_adapter,
            texts=texts,
            options=options,
            progress=not quiet,
            say=None if quiet else show.say,
        )
    except KeyboardInterrupt:
        show.say("Interrupted. Nothing was written.")
        raise typer.Exit(o.INTERRUPTED) from None
    table(found)
    generations(found)
    if not quiet and not found.helped:
        show.say(
            "No step of the distillation came nearer to the prompt than where it began, so that is what was kept. Try "
            "a lower --learning-rate, or more texts."
        )
    if not quiet:
        show.say(
            f"{found.prompt_tokens:,} tokens are now {show.count(found.trained)} parameters in {found.folder} "
            f"({show.size(found.saved_bytes)})."
        )
    show.say(
        "Lossy: the prompt's general instructions survive best. Names, numbers and exact wording of the prompt may be "
        "lost. Compare the continuations above before you rely on it."
    )


def table(found: Compression) -> None:
    """Held-out continuations: how well each expects them, and how much of the prompt's benefit that is."""
    rows = []
    for who, scores in found.scores.items():
        recovered = found.recovered(who)
        rows.append(
            (
                who,
                f"{scores.perplexity:.2f}",
                f"{scores.divergence:.3f}",
                "-" if recovered is None else f"{recovered:.0%}",
            )
        )
    columns = ("model sees", "perplexity", "divergence", "of the prompt's benefit")
    show.table(columns, rows, title="held-out continuations", right=(1, 2, 3))


def generations(found: Compression) -> None:
    """Beginnings of held-out texts, and the likeliest continuation with the prompt, with the adapter, with neither."""
    rows = []
    for number, each in enumerate(found.generations, 1):
        rows.append((f"text {number} begins", each.beginning))
        rows += [("full prompt", each.prompted), ("adapter", each.adapter), ("no prompt", each.bare)]
    show.table(("model sees", "and writes"), rows, title="how held-out texts go on")
