"""Data of one's own on the command line: what is odd in it is one error, and what is nested has a path."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Typed = Callable[..., tuple[int, str, str]]
QUICK = ("--method", "bias", "--max-steps", "2", "--batch-size", "8")


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def nested(odd: Any = "w1 w6") -> list[dict[str, Any]]:
    """Thirty nested reviews of which the fifth may hold something else."""
    rows = [{"review": {"body": f"w{i % 2} w{i}"}, "about": {"mood": "ab"[i % 2]}} for i in range(30)]
    rows[4]["review"]["body"] = odd
    return rows


def test_nested_data_from_training_to_prediction(typed: Typed, text_model: Path, tmp_path: Path) -> None:
    data = lines(tmp_path / "nested.jsonl", nested())
    columns = ("--text", "review.body", "--label", "about.mood")
    status, _, err = typed("tune", "--model", text_model, "--data", data, *columns, *QUICK, "--out", tmp_path / "runs")
    assert status == 0, err
    (run,) = (tmp_path / "runs").glob("*-*")
    status, out, err = typed("predict", "--run", run, "--input", lines(tmp_path / "new.jsonl", nested()[:2]))
    assert status == 0, err
    assert [json.loads(line)["review"]["body"] for line in out.splitlines()] == ["w0 w0", "w1 w1"]
    bad = lines(tmp_path / "bad.jsonl", nested({"de": "w1"})[:6])
    status, out, err = typed("predict", "--run", run, "--input", bad)
    assert (status, out) == (2, "")
    assert "'bad.jsonl', row 5: 'review.body' holds an object, not a text" in " ".join(err.split())


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        (nested(), ("--text", "review", "--label", "about.mood"), "row 1: 'review' holds an object, not a text"),
        (nested(["w1"]), ("--text", "review.body", "--label", "about.mood"), "row 5: 'review.body' holds a list of 1"),
        (
            nested("\ud83d"),
            ("--text", "review.body", "--label", "about.mood"),
            "row 5: 'review.body' holds half a char",
        ),
        (nested("a\0"), ("--text", "review.body", "--label", "about.mood"), "row 5: 'review.body' holds a NUL"),
        ([{"messages": [{"role": "user", "content": "x"}]}] * 9, ("--label", "messages"), "'messages' holds chats"),
    ],
)
def test_what_is_no_text_is_one_error(
    typed: Typed, tmp_path: Path, rows: list[dict[str, Any]], options: tuple[str, ...], says: str
) -> None:
    data = lines(tmp_path / "odd.jsonl", rows)
    status, _, err = typed("tune", "--model", "embedded:minilm", "--data", data, *options, *QUICK)
    assert status == 2
    assert says in " ".join(err.split())
    assert "Traceback" not in err
