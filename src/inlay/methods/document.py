"""Write what is generated about the methods: the capabilities file, the tables, the headers of the method pages.

    python -m inlay.methods.document --check     # is everything current? (imports neither torch nor PEFT)
    python -m inlay.methods.document --write     # make it so
    python -m inlay.methods.document --probe     # first try every method on every architecture of tests/zoo.py

The pages' equations, advice and examples are written by hand below the generated header.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inlay.errors import InlayError
from inlay.methods.capabilities import FILE, capabilities
from inlay.methods.registry import Method, all_methods

ROOT = Path(__file__).resolve().parents[3]
TABLE = ("<!-- methods:begin -->", "<!-- methods:end -->")
HEADER = ("<!-- generated:begin -->", "<!-- generated:end -->")
SECTIONS = ("The equation", "When to use it", "Cost", "Example", "Fidelity")
SAVED = {"peft": "an adapter in PEFT's format", "head": "the head alone", "full": "a whole checkpoint"}
TASKS = {"classification": "classification", "token-classification": "tokens", "causal-lm": "language modelling"}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m inlay.methods.document", description=__doc__.split("\n")[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="say what is out of date")
    action.add_argument("--write", action="store_true", help="bring it up to date")
    action.add_argument("--probe", action="store_true", help="probe every method, then write")
    options = parser.parse_args(arguments)
    if options.probe:
        _write(Path(__file__).with_name(FILE), _compact(_probe_all()))
        capabilities.cache_clear()
    stale = [path for path, text in pages().items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if options.check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: run python -m inlay.methods.document --write")
        return 1 if stale else 0
    for path in stale:
        _write(path, pages()[path])
        print(path.relative_to(ROOT))
    return 0


def pages() -> dict[Path, str]:
    """Every file that has a generated part, as it should read."""
    readme = ROOT / "README.md"
    found = {readme: _replace(readme.read_text(encoding="utf-8"), TABLE, table("docs/methods/"), readme)}
    index = f"# The methods\n\n{TABLE[0]}\n{table('')}\n{TABLE[1]}\n"
    found[ROOT / "docs/methods/README.md"] = index
    for method in all_methods().values():
        path = ROOT / "docs/methods" / f"{method.name}.md"
        text = path.read_text(encoding="utf-8") if path.is_file() else _skeleton(method)
        found[path] = _replace(text, HEADER, header(method), path)
    return found


def table(links: str) -> str:
    """The methods, one a line: what each trains, where it works, what it costs."""
    lines = [
        "| method | what it does | text | images | trained, of BERT-base | saved as |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for method in all_methods().values():
        text, images = (share(method, modality) for modality in ("text", "image"))
        name = f"[`{method.name}`]({links}{method.name}.md)"
        lines.append(
            f"| {name} | {method.summary} | {text} | {images} | {trained_count(method)} | {SAVED[method.form]} |"
        )
    return "\n".join(lines)


def header(method: Method) -> str:
    """The facts of one method."""
    rate = f"{method.learning_rate:g} by default; a search tries {', '.join(f'{rate:g}' for rate in method.grid)}"
    facts = {
        "paper": method.paper,
        "config": f"`{_public(method)}`" if method.config else "none: it has no settings",
        "learning rate": rate,
        "starts as the base model": "yes, exactly" if method.identity_at_start else "no",
        "can be merged": "yes" if method.mergeable else "no",
        "saved as": SAVED[method.form],
        "trained, of BERT-base": f"{trained_count(method)}, and the new head"
        if method.form == "peft"
        else trained_count(method),
    }
    lines = [
        f"{method.summary}",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {key} | {value} |" for key, value in facts.items()),
    ]
    return "\n".join([*lines, "", "Works on, as probed:", "", *_families(method)])


def _families(method: Method) -> list[str]:
    known = capabilities()
    by_family = known["methods"].get(method.name, {})
    lines = []
    for task, title in TASKS.items():
        probed = [family for family, tasks in known["tasks"].items() if task in tasks]
        works = [family for family in probed if task in by_family.get(family, ())]
        lacking = [family for family in probed if family not in works]
        text = ", ".join(works) if works else "nothing"
        lines.append(f"- {title}: {'everything probed' if not lacking else text}" + _not(works, lacking))
    return lines


def _not(works: list[str], lacking: list[str]) -> str:
    return f"; not {', '.join(lacking)}" if works and lacking else ""


def share(method: Method, modality: str) -> str:
    """How many of the probed architectures of a modality a method works on."""
    known = capabilities()
    families = [family for family, kind in known["modalities"].items() if kind == modality]
    works = [family for family in families if known["methods"].get(method.name, {}).get(family)]
    if not works:
        return "-"
    return "all" if len(works) == len(families) else f"{len(works)} of {len(families)}"


def trained_count(method: Method) -> str:
    """What a method trains of BERT-base, in words."""
    count = capabilities()["trained"].get(method.name)
    if count is None:
        return "does not apply"
    if method.form == "head":
        return "the head"
    return f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count / 1e3:.0f}k"


def _public(method: Method) -> str:
    module, _, name = (method.config or "").partition(":")
    return f"inlay.{name}" if method.tuner else f"{module}.{name}"


def _skeleton(method: Method) -> str:
    return "\n\n".join([f"# {method.name}", *HEADER, *(f"## {section}" for section in SECTIONS)]) + "\n"


def _replace(text: str, markers: tuple[str, str], content: str, path: Path) -> str:
    begin, end = markers
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise InlayError(f"{path} has no lines {begin} and {end}, between which the generated part goes.")
    return f"{head}{begin}\n{content}\n{end}{tail}"


def _compact(data: Mapping[str, Mapping[str, Any]]) -> str:
    """JSON with one entry a line, so that a change shows as one."""
    entry = json.dumps
    parts = (
        f" {entry(key)}: {{\n" + ",\n".join(f"  {entry(k)}: {entry(v)}" for k, v in value.items()) + "\n }"
        for key, value in data.items()
    )
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _probe_all() -> Mapping[str, Any]:
    """What works where, by trying. The zoo of tiny models lies with the tests."""
    sys.path.insert(0, str(ROOT / "tests"))
    from inlay.anatomy import anatomy
    from inlay.methods.probe import cost, probe
    from zoo import FAMILIES, tiny

    tasks = {name: [task for task in family.tasks if task != "base"] for name, family in FAMILIES.items()}
    methods: dict[str, dict[str, list[str]]] = {}
    for method in all_methods().values():
        methods[method.name] = {}
        for family in FAMILIES:
            works = []
            for task in tasks[family]:
                fault = probe(method, lambda family=family, task=task: tiny(family, task))  # type: ignore[misc]
                if fault is None:
                    works.append(task)
                else:
                    print(f"{method.name} on {family}, {task}: {fault.splitlines()[0]}", file=sys.stderr)
            if works:
                methods[method.name][family] = works
    return {
        "methods": methods,
        "tasks": tasks,
        "modalities": {name: family.modality for name, family in FAMILIES.items()},
        "kinds": {name: anatomy(tiny(name, "base")[0]).kind for name in FAMILIES},
        "model_types": {name: tiny(name, tasks[name][0])[0].config.model_type for name in FAMILIES},
        "trained": {name: count for name, method in all_methods().items() if (count := cost(method)) is not None},
    }


if __name__ == "__main__":
    sys.exit(main())
