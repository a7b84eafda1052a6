"""The command line: one file a command, no logic of its own.

A command imports what is heavy when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import errno
import gc
import io
import logging
import sys

MISTAKE = 2
# They warn, when they are imported, of kernels that this machine cannot use. `inlay doctor` says what works.
CHATTY = ("torchao", "bitsandbytes.backends.cpu.ops", "torch.utils._pytree")
RARELY = 100  # collections of younger objects between two of the oldest, in place of 10


def main() -> None:
    """Run `inlay`; a user's mistake is one line on stderr and status 2."""
    from inlay.cli import show
    from inlay.cli.app import app
    from inlay.console import has_colour
    from inlay.errors import InlayError

    # Torch and Transformers are a million objects that stay. A command that looks through them all for garbage again
    # and again while it imports them begins later.
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, RARELY)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may lack a character: no reason to stop
    # Panels for a person; plain text for a pipe, and where nothing may be coloured.
    app.rich_markup_mode = "rich" if has_colour(sys.stdout) and has_colour(sys.stderr) else None
    # What takes long (fetching, converting) says so through the library's own logger.
    logger = logging.getLogger("inlay")
    logger.handlers[:] = [News()]
    logger.setLevel(logging.INFO)
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        app(prog_name="inlay")
    except InlayError as error:
        show.mistake(error)
        sys.exit(MISTAKE)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): nobody is left to tell.
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        show.mistake(
            InlayError(f"{str(error.filename)[:60]}... is longer than a file's name can be. Give a shorter one.")
        )
        sys.exit(MISTAKE)


class News(logging.Handler):
    """What the library logs, told like all other news."""

    def emit(self, record: logging.LogRecord) -> None:
        """Tell one of them."""
        from inlay.cli import show

        show.say(self.format(record))
