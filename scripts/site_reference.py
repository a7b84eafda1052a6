"""The pages of Reference: what `import inlay` gives, and every command with its options."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer

from inlay import PUBLIC
from inlay.methods.registry import all_methods

GROUPS = {
    "Train and compare": ("Spec", "tune", "compare"),
    "Use what was trained": ("load", "predict", "evaluate"),
    "Prompts and many adapters": ("compress", "mix", "unmix", "AdapterPool"),
    "In a training loop of your own": ("load_backbone", "anatomy", "rounded_once", "LossParts"),
    "Errors": ("InlayError",),
}


def api_page() -> str:
    """Every public name; mkdocstrings fills in signatures and docstrings."""
    known = {name for names in GROUPS.values() for name in names}
    groups = GROUPS | {"Others": tuple(sorted(set(PUBLIC) - known))}
    lines = [
        "# Python",
        "",
        "What `import inlay` gives. [What is stable](../stability.md) says what these names promise.",
        "",
    ]
    for title, names in groups.items():
        here = [name for name in names if name in PUBLIC]
        if here:
            lines += [f"## {title}", ""]
        for name in here:
            lines += [
                f"### inlay.{name}",
                "",
                f"::: {PUBLIC[name]}.{name}",
                "    options:",
                "      heading_level: 4",
                "",
            ]
    lines += [
        "## Configurations of the methods",
        "",
        "Each is a PEFT configuration: `get_peft_model(model, inlay.BiasTuningConfig())`.",
        "",
    ]
    configs: dict[str, list[str]] = {}
    for method in all_methods().values():
        if method.config and method.tuner:
            configs.setdefault(method.config, []).append(method.name)
    for path, methods in sorted(configs.items(), key=lambda item: item[0].partition(":")[2]):
        pages = ", ".join(f"[`{name}`](../methods/{name}.md)" for name in methods)
        lines += [f"### inlay.{path.partition(':')[2]}", "", pages, "", f"::: {path.replace(':', '.')}"]
        lines += ["    options:", "      heading_level: 4", "      members: false", ""]
    return "\n".join(lines)


def cli_page() -> str:
    """Every command of `inlay`, with its options, as `--help` has them."""
    app = importlib.import_module("inlay.cli.app").app
    lines = ["# Command line", "", "Each command as `--help` describes it.", ""]
    for name, command in _commands(typer.main.get_command(app), "inlay"):
        lines += _described(name, command)
    return "\n".join(lines)


def _commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        yield f"{prefix} {name}", command
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix} {name}")


def _described(name: str, command: Any) -> list[str]:
    lines = [f"{'#' * (len(name.split()))} {name}", "", *_help(command.help or ""), ""]
    if hasattr(command, "commands"):
        return lines
    context = typer.Context(command, info_name=name)
    usage = " ".join([name, *(piece for each in command.params for piece in each.get_usage_pieces(context))])
    lines += ["~~~text", f"{usage} [OPTIONS]", "~~~", ""]
    panels: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None:
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(record)
    for panel, records in panels.items():
        lines += [f"| {panel} | |", "| --- | --- |"]
        lines += [f"| `{_cell(flags)}` | {_cell(meaning)} |" for flags, meaning in records] + [""]
    return lines


def _help(text: str) -> Iterator[str]:
    """A docstring's paragraphs; those that keep their lines (after a backspace) are examples."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        if paragraph.startswith("\b"):
            yield from ("~~~bash", paragraph.removeprefix("\b").strip("\n"), "~~~", "")
        else:
            yield from (_prose(paragraph), "")


def _prose(text: str) -> str:
    """Text for a person in which flags and placeholders must not become markup."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([<>*_])", r"\\\1", part) for part in parts)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
