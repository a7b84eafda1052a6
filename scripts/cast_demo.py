"""Record a real run in a terminal and write it as a GIF: docs/images/demo.gif.

    python scripts/cast_demo.py [--out docs/images/demo.gif]

The command runs in a pseudo-terminal and an empty folder. What it writes goes through a terminal emulator (pyte, in the
`site` extra), and each screen that differs is drawn with DejaVu Sans Mono, which ships with matplotlib. Waiting is cut
short, and the last line of the picture says so.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import pyte
from PIL import Image, ImageDraw, ImageFont

COLUMNS, LINES = 96, 24
COMMAND = (
    "inlay compare --model embedded:vit --task digits --methods linear-probe,full --shots 200 --epochs 2"
    " --batch-size 16 --seeds 3"
)
MOST_BYTES = 500_000
STEP = 0.25
"""Seconds between two pictures of the recording, at least."""
MOST_SCREENS = 50
LONGEST, LAST = 0.25, 8.0
"""Seconds that a picture is shown: at most, and the last one."""
SIZE, MARGIN = 13, 14
PAPER, INK = "#0f1720", "#d7dde3"
COLOURS = {
    "black": "#3b4754", "red": "#ff7b72", "green": "#7ee787", "brown": "#e3b341", "yellow": "#e3b341",
    "blue": "#79c0ff", "magenta": "#d2a8ff", "cyan": "#56d4dd", "white": "#d7dde3", "brightblack": "#7d8894",
}  # fmt: skip
Cell = tuple[str, str, bool]


@dataclass(frozen=True)
class Frame:
    """A screen of the terminal, and the seconds since the start."""

    seconds: float
    rows: tuple[tuple[Cell, ...], ...]


def record(command: list[str], folder: Path) -> tuple[list[Frame], float]:
    """Run the command in a terminal: every screen that differs from the one before, and how long it took."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    environment |= {"TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"}
    screen = pyte.Screen(COLUMNS, LINES)
    stream, decode = pyte.Stream(screen), codecs.getincrementaldecoder("utf-8")("replace").decode
    begin = time.monotonic()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment)
    os.close(theirs)
    frames: list[Frame] = []
    while True:
        ready, _, _ = select.select([ours], [], [], STEP)
        if ready:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # so a terminal says that its other end is closed
                part = b""
            if not part:
                break
            stream.feed(decode(part))
        now = time.monotonic() - begin
        if not frames or now - frames[-1].seconds >= STEP:
            keep(frames, Frame(now, look(screen)))
    took = time.monotonic() - begin
    keep(frames, Frame(took, look(screen)))
    os.close(ours)
    if process.wait():
        raise SystemExit(f"the command ended with status {process.returncode}")
    return frames, took


def keep(frames: list[Frame], frame: Frame) -> None:
    """Add a screen where it differs from the last one."""
    if not frames or frames[-1].rows != frame.rows:
        frames.append(frame)


def thin(frames: list[Frame]) -> list[Frame]:
    """As many of them as one watches with patience, the first and the last among them."""
    if len(frames) <= MOST_SCREENS:
        return frames
    return [frames[round(place * (len(frames) - 1) / (MOST_SCREENS - 1))] for place in range(MOST_SCREENS)]


def look(screen: pyte.Screen) -> tuple[tuple[Cell, ...], ...]:
    """What is on the screen."""
    found = []
    for line in range(LINES):
        cells = [screen.buffer[line][column] for column in range(COLUMNS)]
        found.append(tuple((cell.data, colour(cell.fg), cell.bold) for cell in cells))
    return tuple(found)


def colour(name: str) -> str:
    """A colour of the terminal as one of the picture."""
    return COLOURS.get(name) or (f"#{name}" if len(name) == 6 and name.isalnum() and name != "default" else INK)


class Painter:
    """Draws screens, all in the same size."""

    def __init__(self, title: str, note: str) -> None:
        fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
        self.fonts = {
            bold: ImageFont.truetype(fonts / f"DejaVuSansMono{'-Bold' if bold else ''}.ttf", SIZE)
            for bold in (False, True)
        }
        self.wide, self.high = self.fonts[False].getlength("M"), SIZE + 5
        self.head, self.note = wrap(f"$ {title}"), note

    def draw(self, frame: Frame | None, shown: int) -> Image.Image:
        """A picture: the command above, a screen of so many lines, the note below."""
        lines = len(self.head) + shown + 3
        size = round(COLUMNS * self.wide) + 2 * MARGIN, lines * self.high + 2 * MARGIN
        image = Image.new("RGB", size, PAPER)
        pen = ImageDraw.Draw(image)
        for number, line in enumerate(self.head):
            pen.text((MARGIN, MARGIN + number * self.high), line, COLOURS["green"], self.fonts[True])
        top = MARGIN + (len(self.head) + 1) * self.high
        for number, row in enumerate(frame.rows[:shown] if frame else ()):
            for column, (text, ink, bold) in enumerate(row):
                if text.strip():
                    place = MARGIN + column * self.wide, top + number * self.high
                    pen.text(place, text, ink, self.fonts[bold])
        below = MARGIN + (lines - 1) * self.high
        pen.text((MARGIN, below), self.note, COLOURS["brightblack"], self.fonts[False])
        return image


def wrap(text: str) -> list[str]:
    """A command over several lines, as one types it."""
    lines = [""]
    for word in text.split(" "):
        if len(lines[-1]) + len(word) + 3 > COLUMNS:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += (" " if lines[-1] else "") + word
    return lines


def write(frames: list[Frame], title: str, note: str, out: Path) -> None:
    """The GIF: small, because most of a screen stays the same and there are few colours."""
    shown = max(
        number + 1 for frame in frames for number, row in enumerate(frame.rows) if any(c[0].strip() for c in row)
    )
    painter = Painter(title, note)
    pictures = [painter.draw(None, shown), *(painter.draw(frame, shown) for frame in frames)]
    palette = pictures[-1].quantize(24)
    ends = [*(frame.seconds for frame in frames[1:]), frames[-1].seconds]
    spans = [min(LONGEST, end - frame.seconds) for frame, end in zip(frames, ends, strict=True)]
    waits = [1500, *(max(40, round(1000 * span)) for span in spans[:-1]), round(1000 * LAST)]
    pictures = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    out.parent.mkdir(parents=True, exist_ok=True)
    pictures[0].save(out, save_all=True, append_images=pictures[1:], duration=waits, loop=0, optimize=True)


def main() -> None:
    """Record, draw, check the size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "images" / "demo.gif")
    out = parser.parse_args().out
    command = [sys.executable, "-m", *COMMAND.split()]
    with tempfile.TemporaryDirectory() as folder:
        frames, took = record(command, Path(folder))
    write(thin(frames), COMMAND, "recorded from a real run on two cores of a CPU; waiting is cut short", out)
    print(f"{out}: {len(frames)} screens, {out.stat().st_size:,} bytes, of {took:.0f} s")
    if out.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{out} is larger than {MOST_BYTES:,} bytes.")


if __name__ == "__main__":
    main()
