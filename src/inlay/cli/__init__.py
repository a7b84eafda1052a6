"""The command line: one file a command, no logic of its own.

A command imports what is heavy when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import logging
import sys

MISTAKE = 2


def main() -> None:
    """Run `inlay`; a user's mistake is one line on stderr and status 2."""
    from inlay.cli.app import app
    from inlay.errors import InlayError

    # What takes long (fetching, converting) says so through the library's own logger.
    logger = logging.getLogger("inlay")
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.INFO)
    try:
        app(prog_name="inlay")
    except InlayError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(MISTAKE)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): nobody is left to tell.
        sys.stderr.close()
        sys.exit(0)
