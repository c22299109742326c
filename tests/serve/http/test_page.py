"""The chat page in a real browser: Debian's Chromium without a window."""

import shutil

import pytest
from PIL import Image

from .conftest import called, said, tool
from .test_faults import figure, until

sync_api = pytest.importorskip("playwright.sync_api")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs a Chromium; found none; install it"),
]


@pytest.fixture(scope="module")
def browsers():
    """The browser that runs, in a list: one that died is replaced."""
    with sync_api.sync_playwright() as playwright:
        yield (running := [playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])])
        running.pop().close()


@pytest.fixture
def browser(browsers):
    if not browsers[0].is_connected():
        browsers[0] = browsers[0].browser_type.launch(executable_path=BROWSER, args=["--no-sandbox"])
    return browsers[0]


@pytest.fixture
def opened(browser):
    """Open pages, closed with the test, which a busy machine may take long to show."""
    pages = []

    def one(**options):
        pages.append(browser.new_page(**options))
        pages[-1].set_default_timeout(120_000)
        return pages[-1]

    yield one
    for page in pages:
        page.close()


@pytest.fixture
def page(opened, server):
    """The page, opened; a request to anybody else than its server, or a fault of its own, fails the test."""
    page = opened()
    asked, faults = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda fault: faults.append(str(fault)))
    page.on("console", lambda line: faults.append(line.text) if line.type == "error" else None)
    page.goto(server.url)
    page.get_by_text("triax m").wait_for()
    yield page
    assert not [url for url in asked if not url.startswith((server.url, "data:"))]
    assert not [fault for fault in faults if "400" not in fault]


def type_in(page, text):
    page.locator("#input").fill(text)
    page.keyboard.press("Enter")


def test_an_answer_streams_in_and_its_thinking_folds(page, server):
    thought = "some thinking"
    length = server.post("/tokenize", {"text": thought}).json()["count"]
    name = server.script("p1", said("All is well.\n```\ncode\n```\nend", thought), hold_at=length)
    type_in(page, f"hello {name}")
    page.get_by_text(thought).wait_for()
    assert page.locator(".answer details[open]").count() == 1
    server.let_go("p1")
    page.get_by_text("in (0 cached)").wait_for()
    assert page.locator(".answer details[open]").count() == 0
    page.locator(".answer summary").click()
    assert page.get_by_text(thought).is_visible()
    assert page.locator(".answer pre").inner_text().strip() == "code"
    assert page.locator(".answer .text").inner_text().endswith("end")
    page.get_by_role("button", name="New talk").click()
    assert page.locator(".answer").count() == 0


def test_the_talk_goes_on_with_all_that_was_said(page, server):
    type_in(page, server.script("p2", said("first", "because")))
    page.get_by_text("in (0 cached)").wait_for()
    page.locator("#effort").select_option("low")
    type_in(page, server.script("p3", said("second")))
    page.get_by_text("second").wait_for()
    words = server.last()["words"]
    assert "because<|close|>think" in words
    assert ">first<|close|>response" in words
    assert "thinking_effort=low" in words


def test_escape_stops_an_answer(page, server):
    type_in(page, server.script("p4", said("word " * 3000), hold_at=30))
    page.get_by_text("word word").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("Stopped.").wait_for()
    until(lambda: figure(server, "triax_engine_running") == 0)
    type_in(page, server.script("p5", said("on it goes")))
    page.get_by_text("on it goes").wait_for()


def test_calls_are_shown_and_answered(page, server):
    import json

    page.get_by_role("button", name="Settings").click()
    page.locator("#tools").fill(json.dumps([tool("weather")]))
    page.get_by_role("button", name="Settings").click()
    type_in(page, server.script("p6", called(("weather", {"city": "Oslo"}))))
    page.locator(".call b", has_text="weather").wait_for()
    page.get_by_role("button", name="Send results").wait_for()  # the call is whole
    assert json.loads(page.locator(".call pre").inner_text()) == {"city": "Oslo"}
    page.locator(".call textarea").fill(server.script("p7", said("It rains.")))
    page.get_by_role("button", name="Send results").click()
    page.get_by_text("It rains.").wait_for()
    assert 'role="tool"' in server.last()["words"]


def test_pictures_are_sent(page, server, tmp_path):
    Image.new("RGB", (60, 30), "red").save(tmp_path / "red.png")
    page.locator("#file").set_input_files(tmp_path / "red.png")
    page.locator("#images img").wait_for()
    type_in(page, server.script("p8", said("A red one.")))
    page.get_by_text("A red one.").wait_for()
    assert [item[2] for item in server.last()["media"]] == [6]


def test_errors_are_shown_in_words(page, server):
    page.get_by_role("button", name="Settings").click()
    page.locator("#temperature").fill("7")
    type_in(page, "hi")
    page.locator(".error").wait_for()
    assert "temperature" in page.locator(".error").inner_text()
    assert page.locator("#send").is_visible()


def test_it_fits_a_phone_and_needs_no_mouse(opened, server):
    page = opened(viewport={"width": 360, "height": 640}, has_touch=True)
    page.goto(server.url)
    page.get_by_text("triax m").wait_for()
    type_in(page, server.script("p9", said("averylongwordwithoutanybreak" * 20, "hm")))
    page.get_by_text("averylongword").wait_for()
    page.get_by_text("in (0 cached)").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    reached = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"effort", "open", "clear", "input", "send", "SUMMARY"} <= reached
