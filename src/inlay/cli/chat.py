"""`inlay chat`: try a compressed prompt, alone or beside the prompt itself."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli import options as o
from inlay.cli import show, streams
from inlay.errors import InlayError, unknown

if TYPE_CHECKING:
    from inlay.workflow.chat import Chat
    from inlay.workflow.generation import Sampling

QUIT, NEW, HELP = "/quit", "/new", "/help"
COMMANDS = {QUIT: "end", NEW: "begin a new conversation", HELP: "say this"}


def command(
    adapter: Annotated[Path, typer.Option(help="An adapter's folder, as `inlay compress --out` writes it.")],
    prompt: Annotated[
        Path | None, typer.Option(help="The file of the prompt itself: its answers are shown beside the adapter's.")
    ] = None,
    once: Annotated[str | None, typer.Option(help="One text; the answer is printed, and that is all.")] = None,
    chat_template: Annotated[
        bool,
        typer.Option(
            "--chat-template/--plain",
            help="Put each line into the model's chat template, as a user's message. Plain: the model goes on from it "
            "as it is.",
        ),
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="The longest answer, in tokens.")] = 256,
    temperature: Annotated[
        float, typer.Option(help="0: always the likeliest token; 1: drawn as the model has it.")
    ] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that together have this share.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Draws the same answers again. Default: others each time.")] = None,
    model: o.MovedModel = None,
    trust_remote_code: o.Trust = False,
    quiet: o.Quiet = False,
) -> None:
    """Talk to a model behind a compressed prompt.

    Type a line and see the answer. With --prompt the model with the prompt itself answers too: in a second column, or
    below on a narrow terminal. What was said before is part of the conversation until /new; /quit, Ctrl-D or Ctrl-C
    ends it. Lines that are piped in are answered one after the other.

    \b
    inlay chat --adapter adapter/
    inlay chat --adapter adapter/ --prompt long_prompt.txt
    inlay chat --adapter adapter/ --once "Which cards do you have?"
    """
    from inlay.workflow.chat import open_chat
    from inlay.workflow.generation import Sampling

    try:
        sampling = Sampling(max_tokens, temperature, top_p, seed)
        chat = open_chat(
            adapter, model=model, prompt=prompt, template=chat_template, trust_remote_code=trust_remote_code
        )
        say = show.nothing if quiet else show.say
        if once is not None:
            answer(chat, once, sampling, quiet)
            return
        for line in beginning(chat, talks()):
            say(line)
        for line in lines():
            try:
                if line.startswith("/"):
                    if (name := line.split()[0]) not in COMMANDS:
                        raise unknown("command", name, COMMANDS)
                    if name == QUIT:
                        break
                    if name == NEW:
                        chat.forget()
                    say("A new conversation begins." if name == NEW else commands())
                else:
                    answer(chat, line, sampling, quiet)
            except InlayError as error:
                if not talks():
                    raise
                show.mistake(error)
    except KeyboardInterrupt:
        print()
        raise typer.Exit(o.INTERRUPTED) from None


def beginning(chat: Chat, talks: bool) -> Iterator[str]:
    """What a person should know before the first line."""
    facts = chat.adapter
    stands = f", which stands for a prompt of {facts.prompt_tokens:,} tokens" if facts.prompt_tokens else ""
    yield f"{chat.writer.name} with {facts.place}{stands}"
    yield (
        "each line is a user's message in the model's chat template"
        if chat.template
        else "the model goes on from each line as it is (--chat-template: a user's message)"
    )
    if talks:
        yield commands()


def commands() -> str:
    """The commands, on one line."""
    return ", ".join(f"{name}: {what}" for name, what in COMMANDS.items())


def answer(chat: Chat, line: str, sampling: Sampling, quiet: bool) -> None:
    """Print the answers to one line while they are written."""
    shown = streams.answers([side.name for side in chat.sides])
    found = chat.ask(line, sampling, shown.add, together=shown.together)
    shown.close()
    if not quiet:
        show.say("; ".join(f"{each.side}: {each.tokens} tokens in {each.seconds:.1f} s" for each in found))


def talks() -> bool:
    """Whether a person types, and sees what is answered."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def lines() -> Iterator[str]:
    """What is typed, or piped in, line by line, without the empty ones."""
    if not talks():
        yield from (line.rstrip("\n") for line in sys.stdin if line.strip())
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (lines can be edited, and those before be fetched again)
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        if line.strip():
            yield line
