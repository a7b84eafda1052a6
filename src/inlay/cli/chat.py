"""`inlay chat`: talk to a tuned language model, or try a compressed prompt, alone or beside the prompt itself."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli import options as o
from inlay.cli import show, streams
from inlay.errors import InlayError, unknown

if TYPE_CHECKING:
    from inlay.workflow.chat import Chat
    from inlay.workflow.generation import Sampling

QUIT, NEW, HELP = "/quit", "/new", "/help"
COMMANDS = {QUIT: "end", NEW: "begin a new conversation", HELP: "say this"}


@o.takes(sampling=o.SAMPLING)
def command(
    sampling: dict[str, Any],
    run: Annotated[str | None, typer.Option(help="A run's folder, or its name under --out.")] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="An adapter's folder, as `inlay compress --out` writes it.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A model by itself; with --run or --adapter, where the base model is now, if it has moved."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="With --run: which of its tasks, where it has several.")] = None,
    prompt: Annotated[
        Path | None,
        typer.Option(help="With --adapter, the file of the prompt itself: its answers are shown beside the adapter's."),
    ] = None,
    once: Annotated[str | None, typer.Option(help="One text; the answer is printed, and that is all.")] = None,
    chat_template: Annotated[
        bool | None,
        typer.Option(
            "--chat-template/--plain",
            help="Put each line into the model's chat template, as a user's message. Plain: the model goes on from it "
            "as it is. Default: the template where there is one, but plain behind a compressed prompt.",
            show_default=False,
        ),
    ] = None,
    trust_remote_code: o.Trust = False,
    out: o.Out = Path("runs"),
    quiet: o.Quiet = False,
) -> None:
    """Talk to a tuned language model, to a model alone, or to one behind a compressed prompt.

    Type a line and see the answer. With --prompt the model with the prompt itself answers too: in a second column, or
    below on a narrow terminal. What was said before is part of the conversation until /new; /quit, Ctrl-D or Ctrl-C
    ends it. Lines that are piped in are answered one after the other.

    \b
    inlay chat --run runs/<id>
    inlay chat --adapter adapter/
    inlay chat --adapter adapter/ --prompt long_prompt.txt
    inlay chat --adapter adapter/ --once "Which cards do you have?"
    """
    from inlay.workflow.chat import open_chat

    say = show.nothing if quiet else show.say
    try:
        how = o.sampling(sampling)
        where = {"run": run, "model": model, "task": task, "out": out, "trust_remote_code": trust_remote_code}
        chat = open_chat(adapter, prompt=prompt, template=chat_template, say=say, **where)
        if once is not None:
            answer(chat, once, how, quiet)
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
                    answer(chat, line, how, quiet)
            except InlayError as error:
                if not talks():
                    raise
                show.mistake(error)
    except KeyboardInterrupt:
        print()
        raise typer.Exit(o.INTERRUPTED) from None


def beginning(chat: Chat, talks: bool) -> Iterator[str]:
    """What a person should know before the first line."""
    facts = chat.speaker.stands_for
    tokens = facts.prompt_tokens if facts is not None else None
    yield chat.speaker.title + (f", which stands for a prompt of {tokens:,} tokens" if tokens else "")
    if chat.template:
        yield "each line is a user's message in the model's chat template"
        if chat.speaker.schema is not None and not chat.speaker.learnt_chats:
            yield "the run was not trained on messages: --plain puts each line into its own template"
    else:
        does = (
            "goes on from each line as it is" if chat.speaker.schema is None else "has each line in the run's template"
        )
        why = "(--chat-template: a user's message)" if chat.speaker.has_template else "(there is no chat template)"
        yield f"the model {does} {why}"
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
