"""`inlay compress`: a prompt of any length becomes an adapter of fixed size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli import options as o
from inlay.cli import show
from inlay.workflow.compress_options import targets

if TYPE_CHECKING:
    from inlay.workflow.compress import Compression


SIZE = "What it becomes"
# What `workflow.compress.Options` takes; `texts` is called --count here, and --texts the user's own.
HOW = {
    "to": o.Option(f"One of {', '.join(targets())}; docs/compress.md compares them. Default: the first.", SIZE),
    "size": o.Option("Tokens it may take room of. Default: 128, at most half of the prompt.", SIZE, int | None),
    "share": o.Option("The same as a share of the prompt, such as 0.05.", SIZE, float | None),
    "quality": o.Option(
        "Find the smallest size that keeps this share of the prompt's benefit, such as 0.95: several times the work.",
        SIZE,
        float | None,
    ),
    "chunk": o.Option(
        "Read the prompt in pieces of at most so many tokens, each behind what those before it became. Default: only "
        "where the prompt does not fit the model's context.",
        SIZE,
        int | None,
    ),
    "distil": o.Option(
        "Train the adapter to match the prompted model; without it, the closed form alone: seconds, but far less of "
        "the prompt.",
        None,
        bool,
        True,
        ("--distil/--no-distil",),
    ),
    "count": o.Option("How many continuations the model writes; a fifth is held out.", o.DATA, int, 320),
    "length": o.Option("Tokens of a continuation.", o.DATA, int, 64),
    "study": o.Option(
        "What the texts are: own (how the prompted model goes on), prompt (pieces of the prompt), questions (self-made "
        "questions and answers about it), mixed; auto: mixed where the texts have room for questions.",
        o.DATA,
        str,
        "auto",
    ),
    "steps": o.Option("Updates; 0: the least-squares fit alone.", o.TRAINING, int, 150),
    "batch_size": o.Option("Texts per update.", o.TRAINING, int, 8),
    "learning_rate": o.Option(
        "How much a step changes, relative to each head. Default: the method's own.",
        o.TRAINING,
        float | None,
        None,
        ("--learning-rate", "--lr"),
    ),
    "seed": o.Option("Decides everything that is random.", None, int, 0),
    **{name: o.SPEC[name] for name in ("precision", "set_", "layers", "revision", "trust_remote_code")},
}


@o.takes(how=HOW)
def command(
    model: o.Model,
    out: Annotated[Path, typer.Option(help="A new folder for the adapter.", rich_help_panel=o.OUTPUT)],
    how: dict[str, Any],
    prompt: Annotated[Path | None, typer.Option(help="A text file with the prompt.")] = None,
    prefix_adapter: Annotated[
        Path | None,
        typer.Option(help="In place of a prompt: an adapter that PEFT's prefix tuning trained. Needs --texts."),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            help="Continuations of the prompt to learn from, one a line (.jsonl: the field `text`). Default: the "
            "prompted model writes its own.",
            rich_help_panel=o.DATA,
        ),
    ] = None,
    quiet: o.Quiet = False,
) -> None:
    """Compress a prompt into an adapter.

    With the adapter the model behaves as if the prompt stood before every text, and it stores as much as a prompt of
    128 tokens (--size). The table shows how much of the prompt's benefit is left, on held-out texts. Use the
    adapter with `PeftModel.from_pretrained(model, OUT)` after `import inlay`; try it with `inlay chat`; serve many with
    `inlay serve`.

    \b
    inlay compress --model embedded:smollm2 --prompt long_prompt.txt --out adapter/

    \b
    inlay compress --model embedded:smollm2 --prompt long_prompt.txt --out adapter/ --share 0.05 --steps 0

    \b
    inlay compress --model embedded:smollm2 --prompt long_prompt.txt --out adapter/ --quality 0.95

    \b
    inlay compress --model embedded:smollm2 --prompt long_prompt.txt --out adapter/ --texts dialogues.jsonl --to lora
    """
    from inlay.workflow.compress import Options, compress

    settings = o.settings(how.pop("set_"), how.pop("layers"))
    options = Options(texts=how.pop("count"), settings=settings, **how)
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
            f"{found.prompt_tokens:,} tokens are now {room(found)}{show.count(found.trained)} parameters in "
            f"{found.folder} ({show.size(found.saved_bytes)})."
        )
    show.say(
        "Lossy: the prompt's general instructions survive best. Names, numbers and exact wording of the prompt may be "
        "lost. Compare the continuations above before you rely on it."
    )


def room(found: Compression) -> str:
    """What is kept in place of the prompt's tokens, where it has a size in tokens."""
    return "" if found.tokens is None else f"{found.tokens:,} ({found.tokens / found.prompt_tokens:.1%}): "


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
