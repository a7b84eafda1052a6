"""Files of requests: what is valid JSON is read; the rest has one clear error, before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hosts import TEXTS, call, write
from typer.testing import CliRunner

from inlay import InlayError
from inlay.cli.app import app
from inlay.serve.hosting import host
from inlay.serve.running import serving
from inlay.serve.settings import ServiceSettings
from inlay.workflow.answer import answer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
GOOD = '{"task": "cola", "sentence": "w6"}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("requests"), TEXTS)


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ('{"task": ["cola"], "sentence": "w6"}', r"line 2.*Known: cb, cola, sst, stsb\."),
        ('{"task": {"a": 1}, "sentence": "w6"}', r"line 2.*Known: cb, cola, sst, stsb\."),
        ('{"task": "ccb", "premise": "w6"}', r"line 2.*'ccb'.*Known: cb, cola, sst, stsb\."),
        ('{"task": "cola", "sentence": "\\ud800"}', "line 2.*surrogate"),
        ('{"task": "cola", "sentence": "w6", "id": NaN}', "line 2.*number"),
        ("[" * 100_000, "line 2"),
    ],
)
def test_what_cannot_be_answered(folder: Path, tmp_path: Path, second: str, says: str) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(f"{GOOD}\n{second}\n")
    with pytest.raises(InlayError, match=says):
        answer(folder, file)


def test_what_is_valid_is_read_and_comes_back(folder: Path, tmp_path: Path) -> None:
    """Any character in a string, a mark of the byte order, empty lines; every field, whatever it holds."""
    given = [
        {"task": "cola", "sentence": "w6\u2028w7\u0085w8\x1c"},
        {"task": "cola", "sentence": "w6", "id": {"a": [1, None]}, "note": None, "seen": False, "score": "mine"},
    ]
    file, output = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    text = "\r\n\n".join(json.dumps(each, ensure_ascii=False) for each in given)
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    found = answer(folder, file, output)
    assert [{key: each[key] for key in wanted} for each, wanted in zip(found, given, strict=True)] == given
    assert isinstance(found[1]["predicted_score"], float)
    # What is written can be read again as requests.
    assert len(answer(folder, output)) == 2
    with serving(host(folder, batch=4), ServiceSettings(port=0)) as address:
        status, said = call(address, "/predict", given)
        assert status == 200
        assert [list(each) for each in said] == [list(each) for each in found]


@pytest.mark.parametrize("size", ["nan", "inf", "-1", "0"])
def test_a_size_that_is_none(folder: Path, size: str) -> None:
    found = CliRunner().invoke(app, ["serve", "--adapter", str(folder), "--port", "0", "--max-body", size])
    assert isinstance(found.exception, InlayError)
    assert "max_body" in str(found.exception)
