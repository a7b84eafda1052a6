"""FSDP in two processes: the parameters of every method of our own are sharded, with the gradients of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sharded

from inlay.methods.registry import all_methods


@pytest.mark.slow
def test_every_method_of_our_own_is_sharded(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-W", "ignore", sharded.__file__, str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    tried = {line.split()[0] for line in done.stdout.splitlines()}
    assert tried == {name for name, method in all_methods().items() if method.tuner}
