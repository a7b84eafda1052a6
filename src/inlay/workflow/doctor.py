"""What `inlay doctor` finds: versions, devices, caches, models, extras, and what to do about what is missing.

It fetches nothing, and asks the network only when told to.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from inlay.backbones.embedded import CARDS, PREFIX, present
from inlay.fetch import cache_root

State = Literal["ok", "note", "missing"]
EXTRAS = {
    "serve": "inlay serve: tasks and prompts over HTTP",
    "ray": "--engine ray: a comparison on a cluster",
    "timm": "models of timm",
    "heif": "images in HEIC, as telephones take them",
}
HOSTS = {"the Hugging Face hub": "huggingface.co"}
PATIENCE = 5.0  # seconds until a host that does not answer is taken for unreachable


@dataclass(frozen=True)
class Diagnosis:
    """One line. `missing` is what inlay does not work without; a `note` is what only some commands want."""

    topic: str
    name: str
    state: State
    value: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        """Plain data."""
        return asdict(self)


def examine(network: bool = False) -> list[Diagnosis]:
    """Everything, in the order in which it is printed; `network` also asks whether the hosts answer."""
    parts: tuple[Callable[[], Iterator[Diagnosis]], ...] = (_system, _packages, _devices, _models, _caches, _extras)
    return [finding for part in parts for finding in part()] + list(_network(network))


def healthy(findings: list[Diagnosis]) -> bool:
    """Whether all is here that inlay needs."""
    return all(finding.state != "missing" for finding in findings)


def _system() -> Iterator[Diagnosis]:
    yield Diagnosis("system", "python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield Diagnosis("system", "system", "ok", f"{platform.system()} {platform.release()} on {platform.machine()}")
    yield Diagnosis("system", "cores", "ok", str(os.cpu_count() or "unknown"))
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang", "cl"))), None)
    yield Diagnosis("system", "C compiler", "ok", compiler or "none; only torch.compile wants one")


def _packages() -> Iterator[Diagnosis]:
    """inlay, and what it requires: is it here, and of a version that it takes?"""
    try:
        yield Diagnosis("packages", "inlay", "ok", metadata.version("inlay"))
    except metadata.PackageNotFoundError:
        remedy = "pip install inlay, or pip install -e . in its checkout"
        yield Diagnosis("packages", "inlay", "missing", "runs from a folder and is not installed", remedy)
        return
    for requirement in _requirements():
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield _package(requirement)


def _package(requirement: Requirement) -> Diagnosis:
    wanted = f"pip install '{requirement.name}{requirement.specifier}'"
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Diagnosis("packages", requirement.name, "missing", "not installed", wanted)
    if not requirement.specifier.contains(version, prereleases=True):
        value = f"{version}, but {requirement.specifier} is needed"
        return Diagnosis("packages", requirement.name, "missing", value, wanted)
    return Diagnosis("packages", requirement.name, "ok", version)


def _requirements() -> list[Requirement]:
    return [Requirement(line) for line in metadata.requires("inlay") or ()]


def _devices() -> Iterator[Diagnosis]:
    try:
        import torch
    except Exception as error:  # a broken installation can raise anything, and is what this command is for
        yield Diagnosis(
            "devices", "cpu", "missing", f"torch cannot be imported: {error}", "pip install --force-reinstall torch"
        )
        return
    yield Diagnosis("devices", "cpu", "ok", f"{torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        why = "this torch has no CUDA" if torch.version.cuda is None else f"none that CUDA {torch.version.cuda} can use"
        yield Diagnosis("devices", "cuda", "ok", f"no GPU ({why}); everything runs on the CPU")
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        yield Diagnosis("devices", f"cuda:{index}", "ok", f"{facts.name}, {_bytes(facts.total_memory)}")
    if torch.backends.mps.is_available():
        yield Diagnosis("devices", "mps", "note", "Apple's GPU", "inlay was not tried on it")


def _models() -> Iterator[Diagnosis]:
    for name, card in CARDS.items():
        place = present(name)
        if place is not None:
            value = "ships with inlay" if card.package is None else f"{place} ({_bytes(_size(place))})"
            yield Diagnosis("models", PREFIX + name, "ok", value)
        elif card.package is None:
            yield Diagnosis("models", PREFIX + name, "missing", "not in this installation", "install inlay again")
        else:
            remedy = f"fetched at first use, with a network: {card.summary}"
            yield Diagnosis("models", PREFIX + name, "note", "not on this machine", remedy)


def _caches() -> Iterator[Diagnosis]:
    from huggingface_hub import constants

    for name, place in (("inlay", cache_root()), ("Hugging Face hub", Path(constants.HF_HUB_CACHE))):
        value = f"{place} ({_bytes(_size(place))})" if place.is_dir() else f"{place} (empty)"
        existing = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
        if not os.access(existing, os.W_OK):
            variable = "INLAY_CACHE" if name == "inlay" else "HF_HOME"
            remedy = f"set {variable} to a folder of your own"
            yield Diagnosis("caches", name, "note", f"{place}: no permission to write", remedy)
            continue
        yield Diagnosis("caches", name, "ok", f"{value}, {_bytes(shutil.disk_usage(existing).free)} free")


def _extras() -> Iterator[Diagnosis]:
    """The optional parts, by the packages that inlay's own metadata asks for them."""
    try:
        requirements = _requirements()
    except metadata.PackageNotFoundError:
        return
    for extra, purpose in EXTRAS.items():
        asked = [each for each in requirements if each.marker and _asks(each, extra)]
        lacking = [each.name for each in asked if _package(each).state == "missing"]
        if lacking:
            remedy = f"for {purpose}: pip install 'inlay[{extra}]'"
            yield Diagnosis("extras", extra, "note", f"without {', '.join(lacking)}", remedy)
        else:
            yield Diagnosis("extras", extra, "ok", purpose)


def _asks(requirement: Requirement, extra: str) -> bool:
    named = re.findall(r"extra\s*==\s*['\"]([^'\"]+)", str(requirement.marker))
    return canonicalize_name(extra) in map(canonicalize_name, named)


def _network(ask: bool) -> Iterator[Diagnosis]:
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    said = "HF_HUB_OFFLINE is set: only caches are used" if offline else "allowed (HF_HUB_OFFLINE is not set)"
    yield Diagnosis("network", "hub", "note" if offline else "ok", said, "unset it to fetch models and data" * offline)
    if not ask:
        return
    for name, host in HOSTS.items():
        try:
            socket.create_connection((host, 443), timeout=PATIENCE).close()
        except OSError as error:
            remedy = "embedded:vit, embedded:resnet and what is in the caches work without it"
            yield Diagnosis("network", name, "note", f"{host} does not answer: {error}", remedy)
        else:
            yield Diagnosis("network", name, "ok", f"{host} answers")


def _size(folder: Path) -> int:
    """The bytes of the files below a folder, links not followed; a file that goes away meanwhile counts nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:
                continue
    return total


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def to_json(findings: list[Diagnosis]) -> dict[str, Any]:
    """What `--json` prints."""
    return {"healthy": healthy(findings), "findings": [finding.to_json() for finding in findings]}
