"""What a run ran on: versions, machine, commit. Nothing heavy is imported that is not loaded already."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("inlay", "torch", "transformers", "peft", "accelerate", "datasets", "safetensors", "numpy")


def versions() -> dict[str, Any]:
    """Versions of the packages that shape a result, and the machine they ran on, as plain data."""
    found: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    found |= {"cpu": _cpu(), "cores": os.cpu_count(), "threads": None, "gpu": None, "commit": _commit()}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            found["gpu"] = torch.cuda.get_device_name(0)
            found["cuda"] = torch.version.cuda
    return found


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@functools.cache
def _commit() -> str | None:
    """The commit of inlay's own checkout, with `+` when it was edited. A copy of a checkout without its history, or
    with an older one, as on a rented machine, is told by the variable INLAY_COMMIT; None when inlay is an installed
    package.

    Asked once: what a process runs is what it has loaded, and a folder of many runs need not wait for git each time.
    """
    told, root = os.environ.get("INLAY_COMMIT"), Path(__file__).resolve().parents[3]
    if told or not (root / ".git").exists():
        return told or None
    try:
        commit, changes = (
            subprocess.run(["git", "-C", root, *command], capture_output=True, text=True, check=True, timeout=10).stdout
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.strip() + ("+" if changes.strip() else "")
