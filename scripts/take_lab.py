"""Bring what `inlay lab` made into the checkout: numbers to their paper's `kept/lab`, pictures to docs/images/lab.

Numbers are kept with six significant digits.

    inlay lab prefix --out lab && python scripts/take_lab.py lab

An experiment that no paper keeps yet is refused: make its folder `src/inlay/papers/<paper>/kept/lab/<name>` first.
Another start of an experiment that is kept, made with `--seed 1`, is taken with `--start seed-1`: its numbers alone.
"""

from __future__ import annotations

import argparse
import csv
import shutil
from pathlib import Path

from generated import ROOT

from inlay.papers.reproduce import kept
from inlay.records.tables import csv_text

PICTURES = ROOT / "docs" / "images" / "lab"


def take(folder: Path, start: str | None) -> None:
    """Take one experiment. From the folder where its numbers are kept, where it was drawn again, the pictures move."""
    homes = list(kept.ROOT.glob(f"*/kept/lab/{folder.name}"))
    if len(homes) != 1:
        raise SystemExit(f"{len(homes)} papers keep an experiment {folder.name!r}: make its folder kept/lab/<name>.")
    home = homes[0] if start is None else homes[0].parent / start / folder.name
    home.mkdir(parents=True, exist_ok=True)
    at_home = home.resolve() == folder.resolve()
    if not at_home:
        shutil.copy(folder / f"{folder.name}.json", home)
    (home / f"{folder.name}.csv").write_text(shorter(folder / f"{folder.name}.csv"), encoding="utf-8", newline="")
    for ending in (".png", ".svg") if start is None else ():
        picture = folder / f"{folder.name}{ending}"
        target = PICTURES / folder.name / picture.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, target)
        if at_home:
            picture.unlink()
    print(folder.name)


def shorter(table: Path) -> str:
    """A table with its fractions rounded as the papers keep them (`kept.rounded`)."""
    with table.open(encoding="utf-8", newline="") as lines:
        return csv_text([[shorter_cell(cell) for cell in row] for row in csv.reader(lines)], "\r\n")


def shorter_cell(text: str) -> str | int | float:
    for kind in (int, float):
        try:
            return kept.rounded(kind(text))
        except ValueError:
            continue
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what --out of `inlay lab` was")
    parser.add_argument("--start", help="seed-1, seed-2, ...: of another start than the one that is shown")
    args = parser.parse_args()
    for folder in sorted(path for path in args.folder.iterdir() if (path / f"{path.name}.png").is_file()):
        take(folder, args.start)


if __name__ == "__main__":
    main()
