"""Names, notes and errors from records and files that were written by somebody else, shown by the commands."""

from __future__ import annotations

from pathlib import Path

import pytest

import recorded
from pseudo_terminal import SETTINGS, type_in

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A finished and a failed run whose records hold escape sequences wherever a text may stand."""
    out = tmp_path / "runs"
    recorded.finished(
        out,
        recorded.spec_of(f"bias{HOSTILE}", model=f"m{HOSTILE}", task=f"t{HOSTILE}", settings={f"k{HOSTILE}": HOSTILE}),
        task__notes=[f"note {HOSTILE}"],
        task__source=HOSTILE,
        backbone__source=HOSTILE,
        versions={"python": HOSTILE},
    )
    recorded.failed(out, recorded.spec_of("lora"), f"why {HOSTILE}")
    recorded.finished(out, recorded.spec_of("norm")).folder.rename(out / f"named-{HOSTILE}")
    return out


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_no_command_hands_them_to_the_terminal(setting, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs.parent)
    for words in (("list",), ("show", "t-0-owned"), ("show", "digits-vit-lora"), ("show", "named-"), ("rm", "nowhere")):
        printed = type_in(setting, "runs", *words)
        text = (printed.out + printed.err).replace("\x1b[1m", "").replace("\x1b[0m", "")
        assert not {*text} & {"\x1b", "\x07", "\x9b"}, (words, text)
        assert "Traceback" not in text
        if words != ("list",):
            assert "owned" in text
