"""Try every method on every architecture and record what works in `src/inlay/methods/capabilities.json`.

    python scripts/probe_methods.py      # about a minute; then brings the generated documentation up to date

The architectures are the tiny models of tests/zoo.py; what it means to work is in tests/probing.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import document_methods  # noqa: E402

import quantised_zoo  # noqa: E402
from inlay.anatomy import anatomy  # noqa: E402
from inlay.methods.capabilities import FILE, capabilities  # noqa: E402
from inlay.methods.registry import Method, all_methods  # noqa: E402
from probing import cost, probe  # noqa: E402
from zoo import FAMILIES, tiny  # noqa: E402


def main() -> int:
    """The command."""
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    text = compact(probe_all(all_methods().values(), FAMILIES))
    (ROOT / "src/inlay/methods" / FILE).write_text(text, encoding="utf-8")
    capabilities.cache_clear()
    return document_methods.main(["--write"])


def probe_all(methods: Iterable[Method], families: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What works where, by trying, and what a person wants to know of each: see `inlay.methods.capabilities`."""
    methods, families = list(methods), list(families)
    tasks = {name: [task for task in FAMILIES[name].tasks if task != "base"] for name in families}
    works: dict[str, dict[str, list[str]]] = {}
    for method in methods:
        tried = {family: [task for task in tasks[family] if _works(method, family, task)] for family in families}
        works[method.name] = {family: found for family, found in tried.items() if found}
    return {
        "methods": works,
        "tasks": tasks,
        "modalities": {name: FAMILIES[name].modality for name in families},
        "kinds": {name: anatomy(tiny(name, "base")[0]).kind for name in families},
        "model_types": {name: tiny(name, tasks[name][0])[0].config.model_type for name in families},
        "quantised": {method.name: probe_quantised(method, works[method.name]) for method in methods},
        "trained": {method.name: count for method in methods if (count := cost(method)) is not None},
    }


def probe_quantised(method: Method, works: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """By quantisation, on which families' quantised models a method works, of those on which it works at all.

    What cannot be tried here, for lack of a package, is taken over from before.
    """
    known = capabilities().get("quantised", {}).get(method.name, {})
    found = {}
    for kind in quantised_zoo.KINDS:
        if (why := quantised_zoo.missing(kind)) is not None:
            print(f"{kind} is taken over: {why}", file=sys.stderr)
            tried = known.get(kind, [])
        else:
            tried = [
                family
                for family, task in quantised_zoo.TASKS.items()
                if task in works.get(family, ()) and quantised_zoo.fault(method, family, kind) is None
            ]
        if tried:
            found[kind] = tried
    return found


def _works(method: Method, family: str, task: Any) -> bool:
    fault = probe(method, lambda: tiny(family, task))
    if fault is not None:
        print(f"{method.name} on {family}, {task}: {fault.splitlines()[0]}", file=sys.stderr)
    return fault is None


def compact(data: Mapping[str, Mapping[str, Any]]) -> str:
    """JSON with one entry a line, so that a change shows as one."""
    entry = json.dumps
    parts = (
        f" {entry(key)}: {{\n" + ",\n".join(f"  {entry(k)}: {entry(v)}" for k, v in value.items()) + "\n }"
        for key, value in data.items()
    )
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
