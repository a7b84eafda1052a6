"""`inlay doctor` says what is here and what is missing, and asks nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from inlay.workflow import doctor

# A connection, or a question for an address, ends the process.
ALONE = """
import os, sys
def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo") and arguments:
        os.write(2, f"asked the network: {event}".encode())
        os._exit(77)
sys.addaudithook(refuse)
from inlay.cli import main
sys.argv = ["inlay", "doctor", *sys.argv[1:]]
main()
"""


def asked(cache: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"INLAY_CACHE": str(cache), "HF_HOME": str(cache / "hub"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", ALONE, *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def test_all_that_is_here_is_told_without_a_network(tmp_path: Path) -> None:
    (tmp_path / "cache" / "models").mkdir(parents=True)
    (tmp_path / "cache" / "models" / "some").write_bytes(b"x" * 2048)
    done = asked(tmp_path / "cache", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    found = {(each["topic"], each["name"]): each for each in told["findings"]}
    assert told["healthy"] is True
    assert found["packages", "torch"]["value"] == metadata.version("torch")
    assert found["system", "python"]["value"].startswith(".".join(map(str, sys.version_info[:3])))
    assert found["models", "embedded:vit"]["state"] == "ok"
    assert found["models", "embedded:minilm"]["state"] == "note", "the cache is empty"
    assert "fetched at first use" in found["models", "embedded:minilm"]["remedy"]
    assert f"{tmp_path / 'cache'} (2 KiB)" in found["caches", "inlay"]["value"]
    assert "HF_HUB_OFFLINE is set" in found["network", "hub"]["value"]
    assert ("network", "the Hugging Face hub") not in found
    assert asked(tmp_path, "--network").returncode == 77, "the hook sees a connection"


def test_what_is_missing_or_too_old_is_told_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metadata of an inlay that wants what is not here; the packages are the real ones."""
    folder = tmp_path / "inlay-9.9.dist-info"
    folder.mkdir()
    wants = ("numpy<1", "no-such-thing>=2", 'never-here; python_version < "3"', 'no-such-ray; extra == "ray"', "rich")
    lines = ["Metadata-Version: 2.4", "Name: inlay", "Version: 9.9", *(f"Requires-Dist: {each}" for each in wants)]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    findings = doctor.examine()
    found = {(each.topic, each.name): each for each in findings}
    assert found["packages", "inlay"].value == "9.9"
    assert found["packages", "numpy"].state == found["packages", "no-such-thing"].state == "missing"
    assert found["packages", "numpy"].value == f"{metadata.version('numpy')}, but <1 is needed"
    assert found["packages", "no-such-thing"].remedy == "pip install 'no-such-thing>=2'"
    assert found["packages", "rich"].state == "ok"
    assert ("packages", "never-here") not in found
    assert "pip install 'inlay[ray]'" in found["extras", "ray"].remedy
    assert not doctor.healthy(findings)


def test_a_table_for_people(typed: Callable[..., tuple[int, str, str]]) -> None:
    status, table, news = typed("doctor")
    assert status == 0, table
    assert "packages\ttorch\tok\t" in table
    assert "All is here that inlay needs" in news
