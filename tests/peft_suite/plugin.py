"""The pytest plugin: PEFT's test files as they are, run with another method than LoRA.

Every test that PEFT parametrises with LoRA's config gets ours in its place; what has no LoRA in its parameters is left
out. A test passes, or it ends in an `InlayError` that `refusals.toml` knows and gives a reason for: it is then reported
as skipped, with that reason. Anything else is a deviation, and fails.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REFUSALS = Path(__file__).with_name("refusals.toml")
OFFLINE = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--inlay-method", required=True, help="the method that stands in LoRA's place, or lora")
    parser.addoption("--inlay-report", default=None, help="a JSON file for the counts")


def pytest_configure(config: pytest.Config) -> None:
    if OFFLINE:  # the hub's library reads it when it is imported, which is after this
        folder = tempfile.TemporaryDirectory(prefix="peft-suite-")
        config.add_cleanup(folder.cleanup)
        os.environ["HF_HUB_CACHE"] = folder.name
    config.pluginmanager.register(Suite(config), "inlay-suite")


class Everything(dict[str, int]):
    """PEFT's record of what was fetched from the hub already: all of it, so that nothing is asked for."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> int:
        return 0


class Suite:
    """One run, with one method."""

    def __init__(self, config: pytest.Config) -> None:
        import inlay  # noqa: F401  (registers the methods with PEFT)
        from peft_suite import models, stand_ins

        self.method: str = config.getoption("--inlay-method")
        self.report: str | None = config.getoption("--inlay-report")
        table = tomllib.loads(REFUSALS.read_text(encoding="utf-8"))
        self.refusals = [entry for entry in table["refused"] if self.method in entry.get("methods", [self.method])]
        self.adjusted = [entry for entry in table["adjusted"] if self.method in entry["methods"]]
        # Of what is left out, LoRA itself is kept from what needs the hub alone.
        self.elsewhere = [
            entry
            for entry in table["left_out"]
            if self.method in entry.get("methods", [self.method])
            and (OFFLINE if "needs_hub" in entry else self.method != stand_ins.CONTROL)
        ]
        self.stand_in = stand_ins.StandIn(self.method)
        self.stand_in.stir_what_is_put_in()
        self.counts: Counter[str] = Counter()
        self.deviations: list[dict[str, str]] = []
        self.refused: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        if OFFLINE:
            models.write_cache(Path(os.environ["HF_HUB_CACHE"]))
        self._prepare(Path(config.rootpath))

    @staticmethod
    def _prepare(checkout: Path) -> None:
        """What PEFT's test files need when they are imported."""
        sys.path.insert(0, str(checkout))
        _stand_in_for_diffusers()
        import tests.testing_utils as utils  # PEFT's

        if OFFLINE:
            utils._HUB_MODEL_ACCESSES = Everything()
            utils.load_cat_image = _picture

    # ---- what is run

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        marks = metafunc.definition.own_markers
        for place, mark in enumerate(marks):
            if mark.name != "parametrize":
                continue
            names, values, *rest = mark.args
            listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
            test = metafunc.definition.nodeid
            more = next((entry["settings"] for entry in self.adjusted if re.search(entry["tests"], test)), {})
            plain = metafunc.module.__name__.endswith("test_config")  # the class itself is tested there
            rows = self.stand_in.rows(listed, values, more, plain)
            if rows is not None:
                marks[place] = pytest.mark.parametrize(names, rows, *rest).mark

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept, dropped = [], []
        for item in items:
            parameters = getattr(getattr(item, "callspec", None), "params", {})
            ours = any(self.stand_in.is_ours(value) for value in parameters.values())
            reason = next((entry["reason"] for entry in self.elsewhere if re.search(entry["tests"], item.nodeid)), None)
            if ours and reason is not None:
                self.left_out[reason] += 1
            (kept if ours and reason is None else dropped).append(item)
        if dropped:
            config.hook.pytest_deselected(items=dropped)
        items[:] = kept

    # ---- what comes of it

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
        report: pytest.TestReport = yield
        if report.failed and call.excinfo is not None:
            entry = self._refusal(item.nodeid, call.excinfo.value)
            if entry is not None:
                self.refused[entry["reason"]] += 1
                report.outcome = "skipped"
                report.longrepr = (str(item.path), 0, f"refused: {entry['reason']}")
                return report
        if report.failed:
            about = "" if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}"
            self.deviations.append({"test": item.nodeid, "error": about[:500]})
        elif report.skipped:
            self.counts["skipped by PEFT"] += 1
        elif report.when == "call":
            self.counts["passed"] += 1
        return report

    def _refusal(self, test: str, error: BaseException) -> dict[str, Any] | None:
        """The entry of the table for an error of ours, also where PEFT's test expected an error in other words."""
        from inlay.errors import InlayError

        seen: BaseException | None = error
        while seen is not None and not isinstance(seen, InlayError):
            seen = seen.__cause__ or seen.__context__
        if seen is None:
            return None
        for entry in self.refusals:
            if re.search(entry["says"], str(seen)) and re.search(entry.get("tests", ""), test):
                return entry
        return None

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.report is None:
            return
        import peft

        found = {
            "method": self.method,
            "peft": peft.__version__,
            "passed": self.counts["passed"],
            "skipped_by_peft": self.counts["skipped by PEFT"],
            "deviations": self.deviations,
            "refused": dict(sorted(self.refused.items())),
            "left_out": dict(sorted(self.left_out.items())),
        }
        Path(self.report).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _stand_in_for_diffusers() -> None:
    """PEFT's shared test code imports Diffusers, and none of the tests that are run here uses it."""
    try:
        import diffusers  # noqa: F401
    except ImportError:
        module = ModuleType("diffusers")
        module.__spec__ = ModuleSpec("diffusers", None)
        module.StableDiffusionPipeline = type("StableDiffusionPipeline", (), {})  # type: ignore[attr-defined]
        sys.modules["diffusers"] = module


def _picture() -> Any:
    import numpy
    from PIL import Image

    return Image.fromarray(numpy.arange(64 * 48 * 3, dtype=numpy.uint32).reshape(64, 48, 3).astype("uint8"))
