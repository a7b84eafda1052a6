"""The page of a service, in a browser: what is served, and each tried by its kind, in every kind of service."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hosts import TEXTS, call, write

from inlay.serve.adapters import Adapters
from inlay.serve.hosting import host
from inlay.serve.prompts import Prompts
from inlay.serve.running import serving
from inlay.serve.settings import ServiceSettings
from loras import TEMPLATE, base_model, lora
from prompted import adapter, decoder

sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, which is not installed"),
]
if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 860}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that may say nothing wrong, and ask nobody but the service."""
    page = browser.new_page(viewport=DESK)
    wrong: list[str] = []
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda asked: None if "127.0.0.1" in asked.url or asked.url[:5] == "data:" else wrong.append(asked.url),
    )
    yield page
    page.close()
    assert [each for each in wrong if "the server responded with a status of 4" not in each] == []


@contextmanager
def shown(page: Page, service: Any, **settings: Any) -> Iterator[str]:
    """A service and its page, which is left before the service ends: it asks for live numbers as long as it is open."""
    with serving(service, ServiceSettings(port=0, **settings)) as address:
        page.goto(address)
        yield address
        page.goto("about:blank")


def ask(page: Page, name: str, text: str) -> str:
    """Choose one, fill in every field, and send it; what is answered."""
    page.locator("#list button", has=page.get_by_text(name, exact=True)).click()
    for each in page.locator("#form textarea").all():
        each.fill(text)
    if page.locator("#most").count():
        page.fill("#most", "6")
    page.locator("#form .go").click()
    page.wait_for_selector("#answer .facts, #answer .error", timeout=20_000)
    return str(page.locator("#answer").inner_text()).strip()


def fits(page: Page) -> None:
    """On a phone nothing is wider than the screen."""
    page.set_viewport_size(PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.set_viewport_size(DESK)


def test_adapters_by_their_kinds(page: Page, tmp_path: Path) -> None:
    base, place = base_model(tmp_path / "bert-base"), tmp_path / "loras"
    lora(base, place / "topics", labels=6)
    lora(base, place / "value", labels=1)
    lora(base, place / "tagger", "TOKEN_CLS", 3)
    lora(base, place / "<b>odd", labels=2, use_dora=True)
    with shown(page, Adapters([str(place)])) as address:
        page.wait_for_selector("#list button")
        assert page.locator("#list .name").all_inner_texts() == ["tagger", "topics", "value", "./bert-base"]
        said = call(address, "/predict", {"model": "topics", "text": "w3 w4", "probabilities": True})[1]
        found = ask(page, "topics", "w3 w4")
        assert found.startswith(said["label"])
        assert page.locator(".share").count() == 6
        assert f"{100 * said['score']:.1f} %" in found
        assert f"topics at {said['adapter']['revision']}" in found
        said = call(address, "/predict", {"model": "tagger", "tokens": ["w3", "w4"]})[1]
        found = ask(page, "tagger", "w3 w4")
        assert all(each in found for each in said["tags"])
        said = call(address, "/predict", {"model": "value", "text": "w3 w4"})[1]
        assert f"{said['value']:.3f}"[:5] in ask(page, "value", "w3 w4")
        assert "16 numbers" in ask(page, "./bert-base", "w3 w4")
        page.locator("#refused summary").click()
        assert "<b>odd" in page.locator("#refused").inner_text()
        assert "it is a DoRA" in page.locator("#refused").inner_text()
        page.wait_for_selector("#numbers b:text-is('7')", timeout=15_000)
        fits(page)
        # One that comes while the page is open.
        shutil.copytree(place / "topics", place / "new")
        page.wait_for_selector("#list button:has-text('new')", timeout=15_000)


def test_texts_that_are_written_and_a_token(page: Page, tmp_path: Path) -> None:
    base = base_model(tmp_path / "llama-base", "llama", "causal-lm", chat_template=TEMPLATE)
    lora(base, tmp_path / "loras" / "support", "CAUSAL_LM")
    token = "a-token-of-some-length"
    with shown(page, Adapters([str(tmp_path / "loras")]), token=token) as address:
        asked = {"model": "support", "prompt": "w3 w5", "max_tokens": 6, "temperature": 0}
        said = call(address, "/v1/completions", asked, headers={"Authorization": f"Bearer {token}"})[1]
        page.wait_for_selector("#token")
        page.fill("#token", token)
        page.locator("#locked .go").click()
        page.wait_for_selector("#list button")
        found = ask(page, "support", "w3 w5")
        assert found.startswith(said["choices"][0]["text"].strip())
        assert f"{said['usage']['completion_tokens']} tokens" in found
        page.select_option("#as", "chat/completions")
        page.locator("#form .go").click()
        page.wait_for_selector("#answer .facts")
        page.fill("#most", "100000")
        page.locator("#form .go").click()
        page.wait_for_selector("#answer .error")
        assert "at most 512" in page.locator("#answer").inner_text()
        fits(page)


def test_tasks_and_prompts(page: Page, tmp_path: Path) -> None:
    with shown(page, host(write(tmp_path, TEXTS), batch=8)) as address:
        page.wait_for_selector("#list button")
        said = call(address, "/predict", {"task": "cb", "premise": "w3", "hypothesis": "w3"})[1]
        assert ask(page, "cb", "w3").startswith(f"{said['label']} ({100 * said['score']:.1f} %)")
        fits(page)
    model = decoder(tmp_path / "model", "llama")
    adapter(model, tmp_path / "prompts" / "legal")
    with shown(page, Prompts(tmp_path / "prompts", model=str(model))) as address:
        page.wait_for_selector("#list button")
        said = call(address, "/generate", {"prompt": "legal", "text": "w3", "max_tokens": 6})[1]
        assert ask(page, "legal", "w3").startswith(said["text"].strip())
        assert "6 tokens" in ask(page, "(no prompt)", "w3") or "end" in page.locator("#answer").inner_text()
