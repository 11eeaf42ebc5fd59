"""A person uses the page at `/`, in Debian's chromium without a window."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rewarm.server.admin.page import FILES
from tests.server.servers import Running, running
from tests.server.test_cache_view import fill
from tools.browser import Browser, browser, find_chromium

NO_BROWSER = "no chromium: install Debian's package `chromium`"


def in_a_browser(test: Any) -> Any:
    """Mark a test that needs a browser: it is one of the integration tests."""
    skipped = pytest.mark.skipif(find_chromium() is None, reason=NO_BROWSER)
    return pytest.mark.integration(skipped(test))


ROOT = Path(__file__).parents[2]

BARS = """[...document.querySelectorAll('.turn .bar')].map((bar) => Object.fromEntries(
  [...bar.children].map((part) => [part.className, Number(part.style.flexGrow)])))"""
TURNS = "[...document.querySelectorAll('.turn > .text')].map((text) => text.innerText)"
SPANS = "document.querySelectorAll('#tree .span').length"


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture
def page(window: Browser) -> Iterator[Browser]:
    """Give the test a browser, and check before and after it that nothing went wrong."""
    window.problems.clear()
    yield window
    assert window.problems == []


@contextmanager
def shown(page: Browser, **options: Any) -> Iterator[Running]:
    """Start a server for all tests of the page."""
    with running(**options) as started:
        yield started
        page.run("sessionStorage.clear()")
        page.open("about:blank")


@pytest.fixture
def server(page: Browser) -> Iterator[Running]:
    with shown(page) as started:
        yield started


def opened(page: Browser, server: Running, width: int = 1300, height: int = 850) -> None:
    page.open(server.url)
    page.size(width, height)
    page.dark(False)
    page.wait("document.getElementById('state').textContent === 'ready'")


def ask(page: Browser, server: Running, question: str, answer: str) -> None:
    """Type a question, and wait for its answer."""
    answered = len(page.run(BARS))
    with server.says(f"Let me see.</think>{answer}<|end|>"):
        page.run("document.getElementById('question').focus()")
        page.type(question)
        page.press("Enter")
        page.wait(f"({BARS}).length === {answered + 1}")
    server.settle()


def seen(page: Browser, server: Running) -> dict[str, Any]:
    """Return the server's tree, once the page shows it."""
    with server.client() as http:
        body: dict[str, Any] = http.get("/v1/cache", params={"limit": 400}).json()
    tokens = f"{body['tokens']:,} tokens in {body['entries']:,} spans"
    page.wait(f"document.getElementById('tree-sum').textContent.startsWith('{tokens}')")
    return body


@in_a_browser
def test_a_turn_is_answered_and_its_bar_says_what_was_reused(
    page: Browser, server: Running
) -> None:
    opened(page, server)
    ask(page, server, "Where is the boat?", "At the quay.")
    assert page.run(TURNS) == ["Where is the boat?", "At the quay."]
    (first,) = page.run(BARS)
    assert set(first) == {"new"}
    folded = "document.querySelector('.turn.assistant details')"
    assert page.run(f"{folded}.open") is False
    assert page.run(f"{folded}.querySelector('.text').textContent") == "Let me see."
    ask(page, server, "And the crane?", "Broken.")
    second = page.run(BARS)[1]
    assert second["reused"] > second["new"] > 0
    sent = server.engine.requests[-1]
    assert sum(second.values()) == len(sent.tokens)


@in_a_browser
def test_an_edited_turn_is_a_fork_and_the_old_branch_stays(page: Browser, server: Running) -> None:
    opened(page, server)
    ask(page, server, "Where is the boat?", "At the quay.")
    ask(page, server, "And the crane?", "Broken.")
    page.run("document.querySelectorAll('.turn.user .tools button')[1].click()")
    page.run("document.querySelector('.turn.editing textarea').select()")
    page.type("And the ferry?")
    with server.says("Hm.</think>Gone.<|end|>"):
        page.press("Enter")
        page.wait("document.querySelector('.turn:last-child .bar') !== null")
    assert page.run(TURNS) == ["Where is the boat?", "At the quay.", "And the ferry?", "Gone."]
    fork = page.run(BARS)[-1]
    assert fork["reused"] > fork["new"]
    server.settle()
    seen(page, server)
    parts = page.run("document.querySelectorAll('#tree rect.lit').length")
    assert parts > 0
    page.click(".turn.user button[aria-label='The branch before']")
    assert page.run(TURNS)[-2:] == ["And the crane?", "Broken."]


@in_a_browser
def test_the_tree_has_every_span_and_says_which_message_it_is(
    page: Browser, server: Running
) -> None:
    opened(page, server)
    ask(page, server, "Where is the boat?", "At the quay.")
    nodes = seen(page, server)["tree"]["nodes"]
    assert page.run(SPANS) == sum(1 for node in nodes if node["tokens"])
    wide = page.run(
        "[...document.querySelectorAll('#tree rect.body')].map((r) => r.width.baseVal.value)"
    )
    tokens = [node["tokens"] for node in nodes if node["tokens"]]
    labels = page.run(
        "[...document.querySelectorAll('#tree .span')].map((s) => s.getAttribute('aria-label'))"
    )
    assert any(label.startswith("user · Where is the boat?") for label in labels)
    assert any("checkpoint: system" in label for label in labels)
    # The width of a span shows its tokens, so the widest one has the most.
    assert f"{max(tokens)} tokens" in labels[wide.index(max(wide))]
    checkpoints = sum(1 for node in nodes if node["checkpoint"])
    assert page.run("document.querySelectorAll('#tree .point').length") == checkpoints


@in_a_browser
def test_the_tree_is_walked_with_the_keyboard(page: Browser, server: Running) -> None:
    opened(page, server)
    ask(page, server, "Where is the boat?", "At the quay.")
    seen(page, server)
    here = "document.querySelector('#tree .here')?.id"
    page.run("document.getElementById('tree').focus()")
    first = page.run(here)
    page.press("ArrowRight")
    second = page.run(here)
    assert first != second
    assert (
        page.run("document.getElementById('tree').getAttribute('aria-activedescendant')") == second
    )
    detail = page.run("document.getElementById('tree-detail').textContent")
    assert "tokens from" in detail
    page.press("ArrowLeft")
    assert page.run(here) == first
    page.press("ArrowRight")
    page.press("Enter")
    page.wait("!document.getElementById('tree-up').hidden")
    page.wait(f"{SPANS} > 0 && document.getElementById('{first}') === null")
    page.press("Escape")
    page.wait(f"document.getElementById('{first}') !== null")


@in_a_browser
def test_everything_can_be_reached_with_the_tab_key(page: Browser, server: Running) -> None:
    opened(page, server)
    ask(page, server, "Where is the boat?", "At the quay.")
    reached = []
    for _ in range(24):
        page.press("Tab")
        reached.append(
            page.run("document.activeElement.id || document.activeElement.textContent.trim()")
        )
    assert {"question", "send", "fresh", "tree", "Edit", "Again"} <= set(reached)
    unnamed = page.run(
        """[...document.querySelectorAll('button, textarea, input, svg[role=img], [role=tree]')]
        .filter((e) => !e.hidden && !(e.textContent.trim() || e.labels?.length
          || e.getAttribute('aria-label'))).map((e) => e.outerHTML)"""
    )
    assert unnamed == []


@in_a_browser
def test_an_answer_can_be_stopped(page: Browser, server: Running) -> None:
    opened(page, server)
    with server.says("word " * 2000):
        page.run("document.getElementById('question').focus()")
        page.type("Go on.")
        page.press("Enter")
        page.wait("document.querySelector('.turn.assistant details .text').textContent.length > 20")
        page.click("#stop")
        page.wait("!document.getElementById('send').hidden")
    server.settle()
    assert "Stopped." in page.run("document.querySelector('.turn.assistant').innerText")
    ask(page, server, "And now?", "Here.")
    assert page.run(TURNS)[-1] == "Here."


@in_a_browser
def test_the_api_key_is_asked_for_and_kept_in_the_tab(page: Browser) -> None:
    with shown(page, api_key="right") as server:
        page.open(server.url)
        page.size(1300, 850)
        page.wait("document.getElementById('key-dialog').open")
        page.type("wrong")
        page.press("Enter")
        page.wait("document.getElementById('key-note').textContent.includes('Try again')")
        page.wait("document.getElementById('key-dialog').open")
        page.type("right")
        page.press("Enter")
        page.wait("document.getElementById('state').textContent === 'ready'")
        ask(page, server, "Where is the boat?", "At the quay.")
        page.open(server.url)
        page.wait("document.getElementById('state').textContent === 'ready'")
        assert page.run("localStorage.length") == 0
        assert page.run("document.cookie") == ""
    # Chromium writes every 401 to its console.
    page.problems = [p for p in page.problems if "401" not in p]


@in_a_browser
@pytest.mark.parametrize("key", [None, "right"])
def test_the_line_to_paste_is_answered_by_this_server(page: Browser, key: str | None) -> None:
    curl, bash = shutil.which("curl"), shutil.which("bash")
    if curl is None or bash is None:
        pytest.skip("needs curl and bash")
    with shown(page, api_key=key, model_name="the harbour's") as server:
        page.open(server.url)
        page.run(f"sessionStorage.setItem('rewarm.key', {key!r})" if key else "0")
        opened(page, server)
        line = page.run("document.getElementById('curl').textContent")
        assert "right" not in line
        environment = {**os.environ, "REWARM_API_KEY": key or ""}
        done = subprocess.run([bash, "-c", line], capture_output=True, env=environment)
        sent = json.loads(done.stdout)
        assert sent["object"] == "chat.completion", sent
        assert sent["model"] == "the harbour's"
        page.click("#copy")
        page.wait("['Copied', 'Selected'].includes(document.getElementById('copy').textContent)")
    page.problems = [p for p in page.problems if "401" not in p]


@in_a_browser
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone_in_light_and_dark(page: Browser, server: Running, dark: bool) -> None:
    opened(page, server, 390, 844)
    page.dark(dark)
    ask(page, server, "Where is the boat?", "At the quay.")
    for view in ("chat", "cache"):
        page.click(f"nav button[data-view={view}]")
        wide = "document.documentElement.scrollWidth"
        assert page.run(wide) == 390
        assert page.run(f"document.getElementById('{view}').getBoundingClientRect().width") == 390
    seen(page, server)
    for element in ("body", "article h2", ".bar .new", "#tree-sum"):
        style = f"getComputedStyle(document.querySelector('{element}'))"
        ink, ground = (
            page.run(f"{style}.color"),
            page.run("getComputedStyle(document.body).backgroundColor"),
        )
        assert (brightness(ink) > brightness(ground)) is dark


def brightness(colour: str) -> float:
    parts = [float(part) for part in colour.strip("rgba()").split(",")[:3]]
    return sum(parts)


@in_a_browser
def test_the_last_requests_say_why_they_missed(page: Browser, server: Running) -> None:
    opened(page, server)
    ask(page, server, "Where is the boat?", "At the quay.")
    ask(page, server, "And the crane?", "Broken.")
    page.wait("document.querySelectorAll('#requests tbody .bar').length === 2")
    rows = page.run("[...document.querySelectorAll('#requests tbody tr')].map((r) => r.innerText)")
    assert "nothing like it was here" in rows[1]
    assert all(row.split("\t")[-1].strip() for row in rows)
    assert page.run("document.getElementById('rate').textContent").endswith("%")
    assert "of 64 MB memory" in page.run("document.getElementById('bytes').innerText")


@in_a_browser
def test_a_hidden_page_asks_for_nothing(page: Browser, server: Running) -> None:
    opened(page, server)
    counts = "performance.getEntriesByType('resource').length"
    page.run(
        "Object.defineProperty(document, 'hidden', {value: true}),"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.run("new Promise((done) => setTimeout(done, 300))")  # until requests under way have ended
    before = page.run(counts)
    page.run("new Promise((done) => setTimeout(done, 2500))")
    assert page.run(counts) == before


@in_a_browser
def test_a_hundred_thousand_nodes_are_a_few_hundred_spans(page: Browser, server: Running) -> None:
    fill(server, 100_000)
    opened(page, server)
    page.wait(f"{SPANS} > 100")
    assert page.run(SPANS) <= 1000
    assert page.run("document.querySelectorAll('#tree .merged').length") > 0
    sent = page.run(
        "performance.getEntriesByType('resource').filter((e) => e.name.includes('/v1/cache'))"
        ".map((e) => e.encodedBodySize)"
    )
    assert 0 < max(sent) < 400_000
    httpx.delete(f"{server.url}/v1/cache", timeout=60)


def test_the_page_and_the_mark_of_types_are_in_the_wheel(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"rewarm/server/admin/page/{name}" for name in FILES} <= set(names)
    assert "rewarm/py.typed" in names


def test_nothing_inline_and_nothing_from_elsewhere() -> None:
    with running() as server, server.client() as http:
        page = http.get("/")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        for name in FILES:
            path = "/" if name == "index.html" else f"/page/{name}"
            reply = http.get(path)
            assert reply.headers["content-security-policy"] == policy
            again = http.get(path, headers={"If-None-Match": reply.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            outside = re.findall("https?://[^/\"']+", reply.text)
            assert set(outside) <= {"http://www.w3.org"}  # a name, not a place
        assert http.get("/page/__init__.py").status_code == 404


def test_the_files_need_no_key_and_name_no_model() -> None:
    with running(api_key="right", model_name="secret-model") as server:
        http: Any = httpx.Client(base_url=server.url)
        for name in FILES:
            reply = http.get("/" if name == "index.html" else f"/page/{name}")
            assert reply.status_code == 200
            assert "secret-model" not in reply.text
        assert http.get("/v1/cache").status_code == 401
