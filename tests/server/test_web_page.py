"""A person's way: upstream's web page in Chromium, a message, and the answer streamed from a packed model."""

from __future__ import annotations

import gzip
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import Server, serving

ANSWER_TIMEOUT_MS = 120_000
N_PREDICT = 24


def page_of(server: Server) -> str | None:
    """The page's HTML; None if the server was built without."""
    request = urllib.request.Request(server.url + "/", headers={"Accept-Encoding": "gzip"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return gzip.decompress(reply.read()).decode()
    except urllib.error.HTTPError:
        return None


@pytest.fixture
def browser() -> Any:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Chromium is not installed (apt install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def test_a_message_is_answered_from_the_pack(model: Path, quarter: list[str], tmp_path: Path, browser: Any) -> None:
    sampling = ["--n-predict", str(N_PREDICT), "--metrics"]
    with serving(tmp_path, model, *quarter, *sampling, "--ui") as server:
        if page_of(server) is None:
            pytest.skip("this build has no web page: Node or npm was not there when it was built")
        page = browser.new_page()
        page.set_default_timeout(ANSWER_TIMEOUT_MS)
        page.goto(server.url)
        box = page.get_by_role("textbox").first
        box.fill("Hello there")
        with page.expect_response(lambda reply: reply.url.endswith("/chat/completions")) as reply:
            box.press("Enter")

        page.get_by_label("User message with actions").get_by_text("Hello there").wait_for()
        answer = page.get_by_label("Assistant message with actions")
        answer.get_by_role("button", name="Copy").first.wait_for()  # shown when the answer is complete
        events = reply.value.text()
        assert reply.value.headers["content-type"].startswith("text/event-stream")
        assert events.count("data: ") > N_PREDICT // 2
        assert len(answer.inner_text()) > N_PREDICT // 2
        assert server.counter("misses_total") > 0
