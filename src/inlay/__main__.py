"""`python -m inlay` is `inlay`."""

from inlay.cli import main

main()
