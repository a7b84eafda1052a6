"""The table of rooms in docs/architecture.md, from docs/layers.toml.

python scripts/document_rooms.py --write     # bring it up to date
python scripts/document_rooms.py --check     # fail where it is not
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Sequence

from generated import ROOT, replaced

LAYERS, PAGE = ROOT / "docs" / "layers.toml", ROOT / "docs" / "architecture.md"
TABLE = ("<!-- layers:begin -->", "<!-- layers:end -->")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="say whether it is out of date")
    action.add_argument("--write", action="store_true", help="bring it up to date")
    options = parser.parse_args(arguments)
    wanted = page()
    if options.write:
        PAGE.write_text(wanted, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != wanted:
        print("docs/architecture.md is out of date: run python scripts/document_rooms.py --write")
        return 1
    return 0


def page() -> str:
    """docs/architecture.md as it should be."""
    return replaced(PAGE.read_text(encoding="utf-8"), TABLE, table(), PAGE)


def table() -> str:
    """A line for every room, layer by layer; the first room of a layer says what the layer is."""
    lines = ["| layer | room | purpose |", "| --- | --- | --- |"]
    for layer in tomllib.loads(LAYERS.read_text(encoding="utf-8"))["layer"]:
        named = f"**{layer['name']}**: {layer['purpose']}" if layer.get("purpose") else f"**{layer['name']}**"
        for room in layer["room"]:
            lines.append(f"| {named} | `{room['name']}` | {room['purpose']} |")
            named = ""
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
