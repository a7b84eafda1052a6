"""`python -m inlay` is `inlay`: what lies in the working folder is not imported."""

import os
import sys

# Python puts the working folder first on its path here. It stays only where inlay itself was imported from it.
if sys.path[0] in ("", os.getcwd()) and not os.path.samefile(os.path.dirname(os.path.dirname(__file__)), os.getcwd()):
    del sys.path[0]

from inlay.cli import main

main()
