"""The report in a real browser: headless Chromium, with no network and no errors."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from test_inside import predictions_of

from inlay.report.charts import drawing as charts
from inlay.report.collect import collect
from inlay.report.html import write_report
from inlay.tasks import TaskSchema
from recorded import failed, finished, spec_of

sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, which is not installed")

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NASTY = "<script>window.caught = 1</script><img src=x onerror='window.caught = 2'>"
SCHEMA = TaskSchema("digits", "image-classification", ("image",), ("accuracy",), ("a", "b")).to_json()
CARD = '# a card\n\n```python\nbase = load("./eye")\nmodel = restore(base, "this/folder")\n```\n'
COST = {"bias": (0.80, 5_000), "lora": (0.9, 20_000), "norm": (0.7, 9_000), "linear-probe": (0.6, 500)}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four methods on one task with three seeds, one of them in two variants; another task; a failure; a picture."""
    folder = tmp_path_factory.mktemp("report")
    for seed in range(3):
        for number, (method, (value, trained)) in enumerate(COST.items()):
            uneven = (
                value + seed / 100 + number * (seed - 1) ** 2 / 1000
            )  # without any spread no test finds a difference
            run = finished(
                folder / "runs",
                spec_of(method, seed),
                uneven,
                portrait__parameters__trained=trained,
                chance={"answer": "<b>3</b>", "examples": 50, "metrics": {"accuracy": 0.2}},
                tables=predictions_of({1, 4, 5 + number}) if method in ("bias", "lora") else None,
                task__schema=SCHEMA if method == "bias" else {},
            )
            run.adapter.mkdir(exist_ok=True)
            (run.adapter / "README.md").write_text(CARD)
            finished(folder / "earlier", spec_of(method, seed), value - 0.2 + seed / 50)
        finished(folder / "runs", spec_of("lora", seed, learning_rate=0.1), 0.5, metrics__validation__accuracy=0.2)
    finished(folder / "runs", spec_of("bias", task=NASTY, shots=16), 0.5)
    failed(folder / "runs", spec_of("full"), f"out of memory {NASTY}")
    facts = {"what": "cka", "sentence": NASTY, "command": [], "spec": spec_of().to_json()}
    charts.keep(folder / "runs" / "explain", "cka", charts.blank(), ("a",), [(1,)], facts)
    return write_report(folder / "runs", folder / "report.html", earlier=collect(folder / "earlier"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests."""
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(browser: Browser, page: Path, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The page in a new tab, wide and light unless a test says otherwise; anything it complains of fails the test."""
    wish = getattr(request, "param", {})
    context = browser.new_context(
        viewport={"width": wish.get("width", 1280), "height": 900}, color_scheme=wish.get("scheme", "light")
    )
    tab = context.new_page()
    troubles: list[str] = []
    tab.on("console", lambda message: troubles.append(message.text))
    tab.on("pageerror", lambda error: troubles.append(str(error)))
    tab.on(
        "request",
        lambda asked: None if asked.url.startswith(("file:", "data:")) else troubles.append(f"asked for {asked.url}"),
    )
    tab.goto(page.as_uri())
    tab.wait_for_selector("html[data-ready]")
    yield tab
    assert troubles == []
    context.close()


def column(tab: Page, cell: str) -> list[str]:
    """What one column says, from top to bottom."""
    return tab.locator(f"#table tbody tr.row {cell}").all_inner_texts()


def test_what_it_shows(tab: Page) -> None:
    """The table with its tags, every plot, the picture, the failure; and nothing from a name or error is run."""
    assert tab.locator("#table tbody tr.row").count() == 6
    assert tab.locator("#table thead th[scope=col]").count() >= 8
    assert tab.locator("#table tbody th[scope=row]").count() == 7  # the majority class has no runs to open
    assert tab.locator("#table .tag.best").count() == 1  # the other comparison has a single row
    assert tab.locator("#table .tag.set").all_inner_texts() == ["chosen"]
    assert tab.locator("#table tr.reference th").all_inner_texts() == ["majority class (<b>3</b>)"]
    assert "0.2000" in tab.locator("#table tr.reference").inner_text()
    for section in ("cost", "seeds", "curves"):
        assert tab.locator(f"#{section} svg[role=img]").count() == 2
        assert tab.locator(f"#{section} svg[role=img] .mark").count() >= 5
    assert tab.locator("#cost .front").first.get_attribute("d").count("H") >= 2
    assert tab.evaluate("document.querySelector('#explanations img').naturalWidth") > 100
    assert NASTY in tab.locator("#lost pre").inner_text()
    assert NASTY in tab.locator("#explanations figcaption").inner_text()
    assert tab.evaluate("window.caught") is None


def test_what_is_wrong(tab: Page) -> None:
    """Scores, matrix, calibration and mistakes of the method that is chosen; names are text."""
    inside = tab.locator("#inside")
    assert inside.locator("select option").all_inner_texts() == [
        "lora (learning rate 0.001) (digits · embedded:vit · all examples)",
        "bias (digits · embedded:vit · all examples)",
    ]
    assert inside.locator(".matrix thead th").all_inner_texts()[1:] == ["cat", "dog", "<i>eel</i>"]
    cells = [int(cell) if cell != "·" else 0 for cell in inside.locator(".matrix td").all_inner_texts()]
    assert sum(cells) == 90
    assert sum(cells[::4]) == 90 - 9
    assert all(box["width"] > 20 for cell in inside.locator(".matrix td").all() if (box := cell.bounding_box()))
    assert "Expected calibration error" in inside.inner_text()
    assert inside.locator(".plot circle.mark").count() == 5
    inside.locator(".plot circle.mark").first.hover()
    assert "right" in tab.inner_text("#tip")
    assert inside.locator(".mistake").count() == 3
    inside.locator(".mistake").last.scroll_into_view_if_needed()
    sync.expect(inside.locator(".mistake img").last).to_have_js_property("complete", True)
    assert tab.evaluate("[...document.querySelectorAll('.mistake img')].pop().naturalWidth") == 30
    assert "wrong with 3 of 3 seeds" in inside.locator(".mistake").first.inner_text()
    first = inside.locator(".mistakes").inner_text()
    tab.select_option("#inside-row", label="bias (digits · embedded:vit · all examples)")
    assert inside.locator(".mistakes").inner_text() != first


def test_how_to_load_it(tab: Page) -> None:
    """The code of the run that is chosen, with its own folder in it, to be copied."""
    part = tab.locator("#load")
    named = "(digits · embedded:vit · all examples)"
    assert part.locator("option").all_inner_texts() == [f"bias, seed {seed} {named}" for seed in range(3)]
    short, card = part.locator(".cmd code").all_inner_texts()
    assert short.splitlines()[2].startswith('model = inlay.load("runs/digits-vit-bias-s0-')
    assert short.splitlines()[3] == 'print(model.predict(["photo.jpg"], probabilities=True))'
    assert 'restore(base, "runs/digits-vit-bias-s0-' in card
    assert '/adapter")' in card
    assert "put its path in place of ./eye" in part.inner_text()
    part.locator("select").select_option(index=2)
    assert "bias-s2-" in part.locator(".cmd code").first.inner_text()
    part.get_by_role("button", name="Copy this code").first.click()
    sync.expect(part.get_by_role("button", name="Copy this code").first).to_have_text(re.compile("Copied|Selected"))


def test_what_changed_since(tab: Page) -> None:
    """The table beside the earlier folder, and its sentence at the top."""
    assert tab.locator("#against h2").inner_text() == "Against earlier"
    rows = tab.locator("#against tbody tr")
    assert rows.count() == 5
    assert "only there" not in tab.inner_text("#against")
    assert rows.last.inner_text().split("\t")[-2] == "new"
    assert "Against earlier:" in tab.inner_text("#findings")


def test_sorting_with_the_mouse_and_the_keyboard(tab: Page) -> None:
    """A header sorts, again turns round, and says which way; Enter does as a click does, and the focus stays."""
    header = tab.get_by_role("button", name="Parameters")
    header.click()
    sizes = column(tab, "td:nth-child(6)")
    assert sizes[:2] == ["500", "1k"]
    assert "Parameters" in tab.locator("th[aria-sort=ascending]").inner_text()
    header.press("Enter")
    assert column(tab, "td:nth-child(6)")[:3] == ["20k", "9k", "5k"]
    assert "Parameters" in tab.locator("th[aria-sort=descending]").inner_text()
    assert tab.evaluate("document.activeElement.dataset.key") == "trained"
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.get_by_role("button", name="Method", exact=True).click()
    assert column(tab, ".method") == sorted(column(tab, ".method"))


def test_filtering(tab: Page) -> None:
    """Search, a choice and the chosen variants: the table and the plots follow; nothing found is said."""
    tab.fill("#search", "lora")
    sync.expect(tab.locator("#table tr.row")).to_have_count(2)
    assert set(column(tab, ".method")) == {"lora"}
    assert tab.locator("#seeds svg[role=img]").count() == 1
    tab.check("#chosen")
    assert tab.locator("#table tr.row").count() == 1
    assert "1 of 6 rows, 3 runs" in tab.inner_text("#shown")
    tab.fill("#search", "nothing like this")
    tab.wait_for_selector("#table .empty")
    assert tab.locator("#cost svg[role=img]").count() == 0
    tab.fill("#search", "")
    tab.uncheck("#chosen")
    tab.select_option("select[data-key=method]", "bias")
    sync.expect(tab.locator("#table tr.row")).to_have_count(2)
    assert set(column(tab, ".method")) == {"bias"}


def test_rows_open_to_runs_and_commands(tab: Page) -> None:
    """Every seed with its command, which the button copies."""
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    button = tab.locator("#table .open", has_text="norm")
    button.press("Enter")
    assert button.get_attribute("aria-expanded") == "true"
    assert tab.locator(".detail .run").count() == 3
    tab.locator(".detail .copy").nth(1).click()
    sync.expect(tab.locator(".detail .copy").nth(1)).to_have_text("Copied")
    copied = tab.evaluate("navigator.clipboard.readText()")
    assert copied == "inlay tune --model embedded:vit --task digits --method norm --seed 1 --learning-rate 0.001"
    button.click()
    assert tab.locator(".detail").count() == 0


def test_the_whole_row_opens(tab: Page) -> None:
    """A click anywhere in it, as the text above the table says; its button once, not twice; not to select a text."""
    row = tab.locator("#table tr.row", has_text="norm")
    button, cell = row.locator(".open"), row.locator("td").nth(2)
    cell.click()
    assert button.get_attribute("aria-expanded") == "true"
    assert tab.locator(".detail .run").count() == 3
    cell.click()
    assert button.get_attribute("aria-expanded") == "false"
    assert tab.locator(".detail").count() == 0
    button.click()
    assert tab.locator(".detail .run").count() == 3
    tab.locator(".detail .facts").first.click()
    assert tab.locator(".detail .run").count() == 3, "what is open is there to be read"
    button.press("Enter")
    assert tab.locator(".detail").count() == 0
    box = row.locator("td").first.bounding_box()
    assert box is not None
    tab.mouse.move(box["x"] + 2, box["y"] + box["height"] / 2)
    tab.mouse.down()
    tab.mouse.move(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2, steps=4)
    tab.mouse.up()
    assert not tab.evaluate("getSelection().isCollapsed")
    assert tab.locator(".detail").count() == 0


def test_plots_answer(tab: Page) -> None:
    """A mark tells of itself to the pointer and to the arrow keys; the axis can be chosen."""
    plot = tab.locator("#cost svg[role=img]").first
    plot.locator(".mark").last.hover()
    assert "on the front" in tab.inner_text("#tip")
    tab.mouse.move(5, 5)
    assert tab.locator("#tip").is_hidden()
    plot.focus()
    plot.press("ArrowRight")
    first = tab.inner_text("#tip")
    plot.press("ArrowRight")
    assert first.startswith("linear-probe")
    assert tab.inner_text("#tip") != first
    tab.select_option("#axis", "memory")
    assert "peak memory" in tab.locator("#cost figcaption").first.inner_text()
    assert not tab.is_checked("#log")
    tab.select_option("#curve", "loss")
    assert "training loss" in tab.locator("#curves figcaption").first.inner_text()


@pytest.mark.parametrize("tab", [{"scheme": "light"}, {"scheme": "dark"}], indirect=True)
def test_both_themes(tab: Page) -> None:
    """The system's wish is followed; the button overrides it; text stands out from what is behind it."""

    def paper() -> int:
        return sum(map(int, tab.evaluate("getComputedStyle(document.body).backgroundColor").strip("rgb()").split(",")))

    dark = tab.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert (paper() < 200) == dark
    tab.click("#theme")
    assert paper() > 600
    tab.click("#theme")
    assert paper() < 200
    tab.click("#theme")
    assert (paper() < 200) == dark


@pytest.mark.parametrize("tab", [{"width": 375}, {"width": 375, "scheme": "dark"}], indirect=True)
def test_on_a_phone(tab: Page) -> None:
    """The page does not scroll sideways, with a row open and a tip shown; plots fit."""
    tab.locator("#table .open").first.click()
    assert tab.evaluate("document.documentElement.scrollWidth") <= 375
    assert all(box["width"] <= 375 for plot in tab.locator("svg[role=img]").all() if (box := plot.bounding_box()))
    tab.locator("#seeds .mark").last.hover()
    tip = tab.locator("#tip").bounding_box()
    assert tip is not None
    assert tip["x"] >= 0
    assert tip["x"] + tip["width"] <= 375
