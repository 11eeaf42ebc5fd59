"""Take the pictures of the page in the README and in docs/page.md from a running server.

    .venv/bin/python tools/screenshot.py

It needs Debian's chromium, and the font Inter (`fonts-inter`) for pictures that look the same.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from browser import Browser, browser

DOCS = Path(__file__).parent.parent / "docs"
IDLE = "document.getElementById('stop').hidden"
QUESTIONS = (
    "What is the high tide?",
    "Please remember that my cabin is 12.",
    "What is my cabin?",
)
FORK = "Who is the harbour master?"


@contextmanager
def served(model: str) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "rewarm", "serve", model, "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--memory", "64MB"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            time.sleep(0.1)
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                continue
        else:
            raise RuntimeError("the server did not start")
        yield url
    finally:
        process.terminate()
        process.wait()


def ask(page: Browser, question: str) -> None:
    done = page.run("document.querySelectorAll('.turn .bar').length")
    page.run("document.getElementById('question').focus()")
    page.type(question)
    page.press("Enter")
    page.wait(f"{IDLE} && document.querySelectorAll('.turn .bar').length > {done}")
    time.sleep(1.5)  # until warm-ahead for the next turn is done


def fork(page: Browser, turn: int, question: str) -> None:
    edits = (
        "[...document.querySelectorAll('.turn.user button')].filter((b) => b.innerText === 'Edit')"
    )
    page.run(f"({edits})[{turn}].click()")
    page.run("document.querySelector('.turn.editing textarea').select()")
    page.type(question)
    page.press("Enter")
    page.wait(f"{IDLE} && document.querySelector('.turn:last-child .bar') !== null")
    time.sleep(3)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--out", type=Path, default=DOCS)
    asked = parser.parse_args()
    with served(asked.model) as url, browser() as page:
        page.open(url)
        page.size(1280, 800)
        for question in QUESTIONS:
            ask(page, question)
        fork(page, 2, FORK)
        page.run("document.activeElement.blur()")
        page.picture(asked.out / "page.png")
        page.dark()
        page.picture(asked.out / "page-dark.png")
        for problem in page.problems:
            print(problem, file=sys.stderr)


if __name__ == "__main__":
    main()
