"""Methods over tasks on the page, and the filters by kind of data and family, in headless Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from test_rankings import IMAGES, benchmark
from test_report_browser import browser, pytestmark, sync, tab  # noqa: F401

from inlay.report.html import write_report
from recorded import finished, spec_of

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ranking of seven image tasks and one of five; five text tasks of which one lacks a method."""
    folder = tmp_path_factory.mktemp("ranked")
    benchmark(folder / "runs")
    benchmark(folder / "runs", IMAGES[:5], shots=16)
    for task in ("rte", "mrpc", "cola", "cb", "sst2"):
        for method in ("lora", "warp"):
            if (method, task) != ("warp", "cb"):
                finished(folder / "runs", spec_of(method, task=task, model="embedded:minilm"))
    return write_report(folder / "runs", folder / "report.html")


def test_rankings_are_drawn(tab: Page) -> None:  # noqa: F811
    """Marks at mean ranks, bars beside methods that do not differ, the pairs on demand, what is missing."""
    panels = tab.locator("#tasks .panel")
    assert panels.count() == 3
    assert panels.locator("svg[role=img]").count() == 2
    first = panels.first
    assert first.locator("svg .name").all_text_contents() == ["lora", "bias", "linear-probe"]
    marks = [box["x"] for mark in first.locator("svg .mark").all() if (box := mark.bounding_box())]
    assert marks == sorted(marks)
    assert panels.locator(".clique").count() == 1
    assert "5 tasks are too few for any pair of 3 methods to differ" in panels.nth(1).inner_text()
    first.locator("svg .mark").first.hover()
    assert tab.inner_text("#tip").split("\n") == ["lora", "mean rank 1.00", "differs from all"]
    first.locator("summary").click()
    first.locator("tbody td").first.wait_for()  # a table is filled when it is opened, a moment after the click
    cells = first.locator("tbody tr").first.locator("td").all_inner_texts()
    assert cells[:3] + cells[4:5] == ["lora", "bias", "7, 0, 0", "lora"]
    assert "Tasks: cifar10, dtd10" in first.inner_text()
    assert "Not ranked: 1 of 10 results is missing: warp on cb." in panels.last.inner_text()
    panels.last.locator("summary").click()
    panels.last.locator("tbody td").first.wait_for()
    assert panels.last.locator("tbody td").all_inner_texts() == ["cb", "warp"]


def test_filters_by_data_and_family(tab: Page) -> None:  # noqa: F811
    """They narrow the table and choose rankings; a ranking is never made again over a part of the methods."""
    options = tab.locator("select[data-key=family] option").all_inner_texts()
    assert options == ["all", "head", "low-rank", "prompt", "scale and shift"]
    tab.select_option("select[data-key=data]", "texts")
    assert tab.locator("#table tr.row").count() == 9
    assert tab.locator("#tasks .panel").count() == 1
    assert "Not ranked" in tab.inner_text("#tasks .panel")
    tab.select_option("select[data-key=data]", "images")
    tab.select_option("select[data-key=family]", "head")
    assert tab.locator("#table tr.row").count() == 12
    assert tab.locator("#tasks .panel").first.locator("svg .mark").count() == 3
    tab.select_option("select[data-key=data]", "texts")
    assert "No ranking for these filters." in tab.inner_text("#tasks")
    tab.select_option("select[data-key=family]", "")
    tab.select_option("select[data-key=kind]", "pair-classification")
    sync.expect(tab.locator("#table tr.row")).to_have_count(5)


@pytest.mark.parametrize("tab", [{"width": 375}], indirect=True)
def test_rankings_fit_a_phone(tab: Page) -> None:  # noqa: F811
    for summary in tab.locator("#tasks summary").all():
        summary.click()
    assert tab.evaluate("document.documentElement.scrollWidth") <= 375
    for plot in tab.locator("#tasks svg[role=img]").all():
        for name in plot.locator(".name").all():
            box = name.bounding_box()
            assert box is not None
            assert box["x"] >= 0
