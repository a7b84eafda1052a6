"""Texts that come in pieces: folded, in columns, one below the other, into a pipe."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rich.cells import cell_len

from inlay.cli.streams import Answers, Beside, Folding, Stacked, answers
from pseudo_terminal import PIPE, SETTINGS, Setting, attached

TEXT = (
    "Arr, matey! The Black Gull be the finest ship\n\n    on the seven seas, says "
    "Captain-Salt-of-the-Skull-Island-Treasure 日本語日本語日本語日本語日本語 end."
)
OTHER = " No.\nIndeed not."


def pieces(text: str, size: int) -> list[str]:
    return [text[begin : begin + size] for begin in range(0, len(text), size)]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("width", [20, 33, 120])
def test_folded_whatever_the_pieces(size: int, width: int) -> None:
    whole, parts = Folding(width), Folding(width)
    whole.add(TEXT)
    for piece in pieces(TEXT, size):
        parts.add(piece)
    for each in (whole, parts):
        each.end()
    assert (parts.lines, parts.line) == (whole.lines, whole.line)
    lines = [*whole.lines, whole.line]
    assert all(cell_len(line) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(TEXT.split())
    assert "" in lines, "an empty line stays"
    if width == 120:
        assert lines[2].startswith("    on the seven"), "so does what begins further in"


def shown(setting: Setting, names: tuple[str, ...], write: Callable[[Answers], None]) -> str:
    with attached(setting) as (out, _):
        found = answers(names)
        write(found)
        found.close()
    return out.text


def two(found: Answers) -> None:
    for number in range(max(len(TEXT), len(OTHER))):
        for side, text in ((0, TEXT), (1, OTHER)) if found.together else ():
            if number < len(text):
                found.add(side, text[number])
    if not found.together:
        for side, text in ((0, TEXT), (1, OTHER)):
            for piece in pieces(text, 5):
                found.add(side, piece)


def test_two_columns_where_there_is_room_else_one_below_the_other() -> None:
    for setting in SETTINGS[:-1]:
        assert setting.columns is not None
        lines = shown(setting, ("compressed prompt", "full prompt"), two).replace("\x1b[1m", "").replace("\x1b[0m", "")
        assert all(cell_len(line) <= setting.columns for line in lines.split("\n"))
        head = lines.split("\n")[0]
        if setting.columns >= 80:
            assert head.split() == ["compressed", "prompt", "full", "prompt"]
            place = head.index("full")
            assert lines.split("\n")[2][place:].strip() == "No."
            assert lines.split("\n")[3][place:].strip() == "Indeed not."
        else:
            assert head == "compressed prompt"
            assert "full prompt\nNo.\nIndeed not.\n" in lines


def test_a_line_is_printed_when_both_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = Beside(("one", "two"), 80)
    capsys.readouterr()
    found.add(0, "a\nb\nc\n")
    assert capsys.readouterr().out == ""
    found.add(1, "d\ne")
    assert capsys.readouterr().out.split() == ["a", "d"]
    found.close()
    assert capsys.readouterr().out.split() == ["b", "e", "c"]


def test_a_single_answer_is_seen_while_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    found = Stacked(("compressed prompt",), 60)
    found.add(0, " The end is")
    assert capsys.readouterr().out == "The end"
    found.add(0, " near")
    assert capsys.readouterr().out == " is"
    found.close()
    assert capsys.readouterr().out == " near\n"


def test_nothing_steers_the_terminal() -> None:
    for setting in SETTINGS:
        for names in (("one",), ("one", "two")):
            text = shown(setting, names, lambda found: [found.add(0, "a \x1b]0;owned\x07\rb"), None][1])
            assert "\x1b]" not in text
            assert "\\x1b]0;owned\\x07" in text
            assert "\r" not in text


def test_a_pipe_gets_the_text_as_it_is() -> None:
    assert shown(PIPE, ("one",), lambda found: found.add(0, TEXT)) == f"{TEXT}\n"
    table = shown(PIPE, ("one", "two"), two).splitlines()
    assert table[0] == "model sees\tand writes"
    assert table[2] == "two\tNo. Indeed not."
