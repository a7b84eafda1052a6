"""What a run of the tests left out, in one line a cause, and how to have it; in CI, a skip that nothing excuses fails.

`INLAY_CI=<target of make>` is the mode of CI: the name says which target is running. A skip is excused where no machine
of CI has what it needs, or where another target of `.ci/run` runs the same tests with what they need.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Cause:
    """Why tests are skipped: what is missing, which reasons say so, and how to have it."""

    what: str
    reasons: str  # a regular expression that the reason of a skip matches
    remedy: str
    target: str = ""  # the target of make that runs these tests in CI
    excused: bool = False  # no machine of CI can run these


# The first that fits: "no GPU, and Triton's interpreter is not on" is about the interpreter, which needs no GPU.
CAUSES = (
    Cause("Triton's interpreter", "TRITON_INTERPRET|Triton's interpreter", "make test-kernels", target="test-kernels"),
    Cause("an NVIDIA GPU", "needs a (GPU|CUDA device)", "make test on a machine with one", excused=True),
    Cause("Ray", "needs Ray", "make test-real", target="test-real"),
    Cause("Chromium", "needs Chromium", "make test-real, after: apt-get install chromium", target="test-real"),
    Cause("timm", "needs timm", "make test-real", target="test-real"),
    Cause("torchao", "torchao is not installed", "make test-real", target="test-real"),
    Cause("W&B, MLflow or trackio", "needs (wandb|mlflow|trackio)", "make test-real", target="test-real"),
    Cause("the real models and data in ../shared", r"\.\./shared", "the maintainers have them", excused=True),
    Cause("PEFT's own tests", "checkout of PEFT", "make test-peft PEFT=<a checkout of PEFT>", excused=True),
    Cause("embedded models, fetched once", "hub or the package index", "a network, once"),
    Cause("a package of the extra `dev`", "could not import|is not installed", "make env"),
    Cause("JPEG 2000 in Pillow", "JPEG 2000", "another build of Pillow"),
    Cause(
        "another system or user",
        "fork|this kernel|the kernel's|root may write|another user's identity|there is a GPU here|on a GPU",
        "no action needed",
        excused=True,
    ),
)
UNKNOWN = Cause("something that tests/skips.py does not know", "", "see the reasons: pytest -rs")

LEFT_OUT = pytest.StashKey[int]()


def cause_of(reason: str) -> Cause:
    """The cause that a skip's reason speaks of."""
    return next((cause for cause in CAUSES if re.search(cause.reasons, reason)), UNKNOWN)


def is_excused(cause: Cause, running: str) -> bool:
    """Whether CI may skip it in this target: nothing can run it there, or another target does."""
    return cause.excused or cause.target not in ("", running)


def skipped(config: pytest.Config) -> list[tuple[Cause, bool, str]]:
    """Every skip: its cause, whether a whole file was skipped, and where with the reason."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    found = []
    for report in reporter.stats.get("skipped", []) if reporter else []:
        path, line, reason = report.longrepr
        reason = reason.removeprefix("Skipped: ")
        where = f"{os.path.relpath(path, config.rootpath)}:{line}: {reason}"
        found.append((cause_of(reason), isinstance(report, pytest.CollectReport), where))
    return found


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Workers of xdist count what they leave out: the process that reports does not see it."""
    config = items[0].config
    config.stash[LEFT_OUT] = config.stash.get(LEFT_OUT, 0) + len(items)
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Every worker leaves out the same tests."""
    config = node.config  # type: ignore[attr-defined]
    config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skip that nothing excuses fails the run."""
    running = os.environ.get("INLAY_CI", "")
    if running and any(not is_excused(cause, running) for cause, _, _ in skipped(session.config)):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Iterator[None]:  # a wrapper: what it prints comes last
    yield
    lines = list(_table(config))
    if lines:
        terminalreporter.section("not run here, and how to run it", sep="-")
        for line in lines:
            terminalreporter.line(line)
    running = os.environ.get("INLAY_CI", "")
    wrong = [where for cause, _, where in skipped(config) if running and not is_excused(cause, running)]
    if wrong:
        terminalreporter.section(f"skipped, and `make {running}` has to run it in CI", sep="=", red=True)
        for where, count in Counter(wrong).items():
            terminalreporter.line(f"{where} ({count}x)" if count > 1 else where)


def _table(config: pytest.Config) -> Iterator[str]:
    """One line a cause, the most frequent first."""
    tests: Counter[Cause] = Counter()
    files: Counter[Cause] = Counter()
    for cause, whole, _ in skipped(config):
        (files if whole else tests)[cause] += 1
    rows = [
        (_counted(tests[cause], files[cause]), f"needs {cause.what}", cause.remedy)
        for cause in sorted(tests.keys() | files.keys(), key=lambda each: (-tests[each], each.what))
    ]
    left_out = config.stash.get(LEFT_OUT, 0)
    if left_out and config.option.markexpr == "not slow" and not config.option.keyword:
        rows.append((_counted(left_out, 0), "long checks", "make test-all"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for count, what, remedy in rows:
        yield f"{count:>{widths[0]}}  {what:<{widths[1]}}  {remedy}"


def _counted(tests: int, files: int) -> str:
    """`3 tests and 1 file`: how many tests a skipped file has is not known."""
    parts = [f"{number} {word}{'s' * (number != 1)}" for number, word in ((tests, "test"), (files, "file")) if number]
    return " and ".join(parts)
