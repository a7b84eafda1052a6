"""Texts that come in pieces, on a terminal: folded to its width, one below the other or in two columns; into a pipe as
they are. Nothing that was printed is drawn over: of two columns a line is printed when both have it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.cells import cell_len, chop_cells

from inlay.cli import show
from inlay.cli.grid import GAP, LONGEST, NARROWEST, join_cells
from inlay.console import has_colour, visible

WIDE = 80  # a terminal of so many characters has room for two columns


class Folding:
    """Text in lines of at most `width`, ended at blanks: `lines` are whole, `line` is the last so far."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.lines: list[str] = []
        self.line = self._gap = self._word = ""

    def add(self, text: str) -> None:
        """Some more of it. A word is placed when it is whole, a long one in parts."""
        for character in text:
            if character == "\n":
                self._place()
                self.lines.append(self.line)
                self.line = self._gap = ""
            elif character.isspace():
                self._place()
                self._gap += "    " if character == "\t" else " "
            else:
                self._word += character
                if cell_len(self._word) >= LONGEST:
                    self._place()

    def end(self) -> None:
        """Nothing more comes."""
        self._place()

    def _place(self) -> None:
        if not self._word:
            return
        if cell_len(self.line + self._gap + self._word) <= self.width:
            self.line += self._gap + self._word
        else:
            if self.line:
                self.lines.append(self.line)
            *whole, self.line = chop_cells(self._word, self.width)
            self.lines += whole
        self._gap = self._word = ""


class Answers:
    """The answers of one or two sides while they are written."""

    together = False
    """Whether both sides should be written by turns."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def add(self, side: int, piece: str) -> None:
        """A piece of a side's answer."""
        raise NotImplementedError

    def close(self) -> None:
        """All answers are whole."""
        raise NotImplementedError


class Stacked(Answers):
    """One answer below the other, on a terminal. A single one has no heading."""

    def __init__(self, names: Sequence[str], width: int) -> None:
        super().__init__(names)
        self.width = max(width, NARROWEST)
        self._side = -1

    def add(self, side: int, piece: str) -> None:
        if side != self._side:
            self._end()
            self._side = side
            self._folding, self._lines, self._shown, self._begun = Folding(self.width), 0, 0, False
            if len(self.names) > 1:
                print(_bold(self.names[side]))
        piece = visible(piece)
        if not self._begun:
            piece = piece.lstrip()
            self._begun = bool(piece)
        self._folding.add(piece)
        self._show()

    def close(self) -> None:
        self._end()

    def _show(self) -> None:
        for line in self._folding.lines[self._lines :]:
            print(line[self._shown :])
            self._shown = 0
        self._lines = len(self._folding.lines)
        print(self._folding.line[self._shown :], end="", flush=True)
        self._shown = len(self._folding.line)

    def _end(self) -> None:
        if self._side >= 0:
            self._folding.end()
            self._show()
            print("\n" if len(self.names) > 1 else "", flush=True)


class Beside(Answers):
    """Two answers in two columns."""

    together = True

    def __init__(self, names: Sequence[str], width: int) -> None:
        super().__init__(names)
        self.share = (width - GAP) // 2
        self._foldings = [Folding(self.share) for _ in names]
        self._begun = [False for _ in names]
        self._printed = 0
        self._print(names, bold=True)
        self._print(["─" * self.share for _ in names])

    def add(self, side: int, piece: str) -> None:
        piece = visible(piece)
        if not self._begun[side]:
            piece = piece.lstrip()
            self._begun[side] = bool(piece)
        self._foldings[side].add(piece)
        self._until(min(len(each.lines) for each in self._foldings))

    def close(self) -> None:
        for each in self._foldings:
            each.end()
            each.lines.append(each.line)
        self._until(max(len(each.lines) for each in self._foldings))
        print(flush=True)

    def _until(self, count: int) -> None:
        for number in range(self._printed, count):
            self._print([each.lines[number] if number < len(each.lines) else "" for each in self._foldings])
        self._printed = max(self._printed, count)

    def _print(self, cells: Sequence[str], bold: bool = False) -> None:
        (line,) = join_cells([[cell] for cell in cells], [self.share] * len(cells), ())
        print(_bold(line) if bold else line, flush=True)


class Piped(Answers):
    """Into a pipe: a single answer as it comes, two of them as a table when they are whole."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._texts = ["" for _ in names]

    def add(self, side: int, piece: str) -> None:
        if len(self.names) == 1:
            print(visible(piece), end="", flush=True)
        self._texts[side] += piece

    def close(self) -> None:
        if len(self.names) == 1:
            print(flush=True)
        else:
            show.table(("model sees", "and writes"), list(zip(self.names, self._texts, strict=True)))


def answers(names: Sequence[str]) -> Answers:
    """Where answers of these sides go: to this terminal, or into this pipe."""
    if not sys.stdout.isatty():
        return Piped(names)
    width = show.terminal_width()
    return Beside(names, width) if len(names) == 2 and width >= WIDE else Stacked(names, width)


def _bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m" if has_colour(sys.stdout) else text
