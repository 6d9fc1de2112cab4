"""The chat page in a headless Chromium: a chat, a stop, a key, a lost pipeline.

Needs playwright (the extra ``browser``) and a Chromium on the PATH, such as Debian's
chromium-headless-shell. ``FLOWSPEC_SCREENSHOTS=docs/img`` keeps pictures of the page there.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flowspec.cluster import Cluster, Setup
from flowspec.gateway.keys import ApiKeys
from flowspec.gateway.settings import Settings
from flowspec.model.weights.directory import default_pair
from flowspec.transport.connections.server import PrivateBroker
from tests.e2e.conftest import MODEL
from tests.gateway.conftest import gateway_at
from tests.served import toy_pipeline

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(
    (
        found
        for name in ("chromium-headless-shell", "chromium", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)
SECONDS = 30_000.0  # in ms, as playwright counts
QUESTION = "What is the capital of France, and what is it known for?"

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
    pytest.mark.live,
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of a browser without memory; requests to anywhere but its gateway fail the test."""
    context = browser.new_context(viewport={"width": 1100, "height": 700})
    page = context.new_page()
    page.set_default_timeout(SECONDS)
    errors: list[str] = []
    outside: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "request",
        lambda request: (
            None
            if request.url.startswith(("http://127.0.0.1:", "data:"))
            else outside.append(request.url)
        ),
    )
    yield page
    context.close()
    assert errors == []
    assert outside == []


def wait_for(page: Page, role: str, text: str) -> None:
    """Wait until the element of ``role`` says ``text``."""
    page.locator(f"[role={role}]").filter(has_text=text).wait_for()


def keep_picture(page: Page, name: str) -> None:
    folder = os.environ.get("FLOWSPEC_SCREENSHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a pipeline of the demo's model, or of the packaged pair where that was not fetched."""
    models = (str(MODEL), "smollm2-head+ngram") if MODEL.is_file() else default_pair()
    with Cluster(Setup(*models, 2)) as cluster:
        yield cluster.url


def test_a_chat_is_streamed_kept_and_counted(page: Page, url: str) -> None:
    with gateway_at(Settings(url)) as web:
        page.goto(str(web.base_url))
        wait_for(page, "status", "tokens of context")
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Most tokens").fill("48")
        page.get_by_label("Message").fill(QUESTION)
        page.keyboard.press("Enter")
        figures = page.locator(".turn.assistant .figures")
        figures.wait_for()
        counted = r"\d+ tokens, [\d.]+ tokens/s, \d+ guessed \(\d+%\)"
        assert re.fullmatch(counted, figures.inner_text())
        (model,) = web.get("/v1/models").json()["data"]
        request = {
            "model": model["id"],
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 48,
            "temperature": 0,
        }
        expected = web.post("/v1/chat/completions", json=request).json()
        answer = page.locator(".turn.assistant").first
        assert expected["choices"][0]["message"]["content"] in (answer.text_content() or "")
        page.get_by_label("Message").fill("And the capital of Italy?")
        page.get_by_role("button", name="Send").click()
        page.locator(".turn.assistant .figures").nth(1).wait_for()
        keep_picture(page, "chat")
        page.reload()
        assert page.locator(".turn").count() == 4, "the browser keeps the chat"
        page.get_by_role("button", name="New chat").first.click()
        assert page.locator(".turn").count() == 0
        page.locator("#chats .open").nth(1).click()
        assert page.locator(".turn").count() == 4


def test_an_answer_can_be_stopped(page: Page, url: str) -> None:
    with gateway_at(Settings(url)) as web:
        page.goto(str(web.base_url))
        page.get_by_label("Most tokens").fill("960")
        page.get_by_label("Message").fill("Write a long story about a small town by the sea.")
        page.keyboard.press("Enter")
        page.locator(".turn.assistant").filter(has_text=re.compile(r"\S")).wait_for()
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("stopped", exact=True).wait_for()
        assert page.get_by_role("button", name="Send").is_visible()
        keep_picture(page, "chat-stopped")


def test_a_lost_pipeline_is_said_and_the_question_is_not_lost(page: Page) -> None:
    with (
        PrivateBroker() as broker,
        gateway_at(Settings(broker.url, name="toy")) as web,
        toy_pipeline(broker.url) as cluster,
    ):
        page.goto(str(web.base_url))
        wait_for(page, "status", "ready")
        cluster.leases["verify-2"].release()
        while web.get("/ready").status_code == 200:
            page.wait_for_timeout(100)
        page.get_by_label("Message").fill("Is anybody there?")
        page.keyboard.press("Enter")
        wait_for(page, "alert", "No answer: the pipeline is not complete: verify-2 has no")
        wait_for(page, "status", "pipeline lost")
        assert page.get_by_label("Message").input_value() == "Is anybody there?"
        assert page.locator(".turn").count() == 0
        keep_picture(page, "chat-lost")


def test_a_key_is_asked_for_and_kept_in_the_tab(page: Page) -> None:
    with PrivateBroker() as broker, toy_pipeline(broker.url):
        settings = Settings(broker.url, name="toy", keys=ApiKeys(["sk-of-the-test"]))
        with gateway_at(settings) as web:
            page.goto(str(web.base_url))
            wait_for(page, "status", "this gateway needs an API key")
            page.get_by_label("API key").fill("sk-of-the-test")
            page.get_by_label("API key").press("Tab")
            wait_for(page, "status", "ready")
            page.reload()
            wait_for(page, "status", "ready")
            assert page.evaluate("localStorage.getItem('flowspec.key')") is None
