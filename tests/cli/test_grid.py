"""Tables at any width: no line is too long, nothing is lost, names are whole; and text that would steer a terminal."""

from __future__ import annotations

import json
import random
import sys

import pytest
from rich.cells import cell_len

from inlay.cli import show
from inlay.cli.grid import NARROWEST, lay_out
from inlay.console import visible
from inlay.papers.commands.blocks import in_blocks
from pseudo_terminal import SETTINGS, attached

ALPHABET = ["a", "wort", "linear-probe", "0.3267", "runs/digits-vit-s0", "漢字", "e\u0301", "x" * 70, "95\u00a0%", ""]


def drawn(seed: int) -> tuple[list[str], list[list[str]]]:
    """A table of some size; headers and cells may be empty."""
    draw = random.Random(seed)

    def text(most: int) -> str:
        return " ".join(word for word in draw.choices(ALPHABET, k=draw.randrange(most)) if word)

    columns = [text(4) for _ in range(draw.randrange(1, 7))]
    return columns, [[text(7) for _ in columns] for _ in range(draw.randrange(4))]


@pytest.mark.parametrize("width", [1, 20, 40, 60, 80, 200])
def test_every_line_fits_and_every_letter_is_there(width: int) -> None:
    for seed in range(150):
        columns, rows = drawn(seed)
        lines = lay_out(columns, rows, width, right=(1,), whole=(0, 2) if seed % 2 else ())
        names = {row[0] for row in rows} if seed % 2 else set()
        assert all(cell_len(line.text) <= max(width, NARROWEST) or line.text in names for line in lines)
        printed = "".join(line.text for line in lines)
        for letter in {*"".join("".join(row) for row in rows)} - {" "}:
            assert printed.count(letter) >= sum("".join(row).count(letter) for row in rows)


def test_what_may_be_cut_is_cut_and_says_so() -> None:
    columns, rows = ("recipe", "what it is"), [("icl/figure-2", "Training loss of a transformer with many heads")]
    (line,) = [line.text for line in lay_out(columns, rows, 40, cut=(1,)) if "icl" in line.text]
    assert line.startswith("icl/figure-2  Training loss")
    assert line.endswith("…")
    assert cell_len(line) <= 40


@pytest.mark.parametrize("columns", [("", "lora"), ("", ""), ("   ", "a b"), ("x",)])
@pytest.mark.parametrize("rows", [0, 1, 2])
def test_headers_and_cells_may_be_empty(columns: tuple[str, ...], rows: int) -> None:
    for setting in SETTINGS:
        for cell in ("", "0.5"):
            with attached(setting) as (out, err):
                show.table(columns, [[cell] * len(columns)] * rows, right=(1,), cut=(0,))
                in_blocks(columns, [[cell] * len(columns)] * rows, names=1)
            assert out.text
            assert err.text == ""


HOSTILE = "a\x1b]0;owned\x07\x1b[2Jb\rc\x9b31md\u202ee\u2028f\udc80"
SHOWN = r"a\x1b]0;owned\x07\x1b[2Jb\x0dc\u009b31md\u202ee\u2028f\udc80"


def test_control_characters_are_made_visible_and_other_text_is_left_alone() -> None:
    assert visible(HOSTILE) == SHOWN
    kept = "Zürich\t漢字 🇨🇭 می‌خواهم\nline ± 0.5"
    assert visible(kept) == kept


def test_a_line_of_json_stays_the_same_json() -> None:
    line = json.dumps({"label": HOSTILE}, ensure_ascii=False)
    assert json.loads(visible(line)) == {"label": HOSTILE}


def test_nothing_that_is_printed_steers_the_terminal() -> None:
    """Whatever `show` prints, on terminals and in pipes; at the end of a line, where a cell's own blanks are not."""
    for setting in SETTINGS:
        with attached(setting) as (out, err):
            show.table((HOSTILE, "b"), [(HOSTILE, HOSTILE)], title=HOSTILE, broken=(0,))
            show.answer(HOSTILE)
            show.say(HOSTILE)
            show.mistake(ValueError(HOSTILE))
            sys.stderr.flush()
        for text in (out.text, err.text):
            bare = text.replace("\x1b[1m", "").replace("\x1b[0m", "")
            assert r"\x1b]0;owned\x07" in bare.replace("\n", "")
            assert not {*bare} & {*HOSTILE} - {*"abcdef owned[]0;2J31m"}, setting.name
