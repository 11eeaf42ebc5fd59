"""A server that is killed or stopped, and started again on the same disk."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.sets import SOAK

QUIET = (0.1, 0.5)
"""Seconds without a request before the engine has state written: first what is sure to be asked for
again, then all of it."""
IMPATIENT = f"""
from rewarm.engine import engine
engine.QUIET = {QUIET}
from rewarm.cli.app import main
main()
"""


@contextmanager
def served(folder: Path, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    with log.open("w") as out:
        arguments = ("serve", "--port", "0", "--disk", str(folder))
        server = subprocess.Popen(
            [sys.executable, "-c", IMPATIENT, *arguments], stdout=out, stderr=out
        )
        try:
            while (url := re.search(r"http://127.0.0.1:\d+", log.read_text())) is None:
                assert server.poll() is None, log.read_text()
                time.sleep(0.05)
            yield server, url[0]
        finally:
            server.kill()
            server.wait()


def ask(url: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 8}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
    found: dict[str, Any] = reply
    return found


@pytest.mark.parametrize("way", ["killed", "stopped"] if SOAK else ["killed"])
def test_a_server_goes_on_where_the_last_one_was(way: str, tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "You know the tides. " * 40}]
    with served(tmp_path / "disk", tmp_path / "first") as (server, url):
        for number in range(3):
            chat.append({"role": "user", "content": f"When is high tide on day {number}?"})
            reply = ask(url, chat)
            chat.append({"role": "assistant", "content": "At noon."})
        again = ask(url, chat[:-1])["rewarm"]
        if way == "killed":
            wait_until_idle_work_is_done(tmp_path / "disk")
            server.kill()
        else:
            server.send_signal(signal.SIGINT)
        server.wait(60)
    with served(tmp_path / "disk", tmp_path / "second") as (server, url):
        after = ask(url, chat[:-1])
        assert after["choices"] == reply["choices"]
        assert after["rewarm"]["resume"]["tier"] == "disk"
        lost = again["cached_tokens"] - after["rewarm"]["cached_tokens"]
        assert lost <= again["cached_tokens"] // 100


def wait_until_idle_work_is_done(folder: Path) -> None:
    """Wait until nothing has been written for longer than the engine waits for quiet."""
    last, since = -1, time.monotonic()
    while time.monotonic() - since < 4 * QUIET[-1]:
        files = len(list(folder.rglob("*.safetensors")))
        if files != last:
            last, since = files, time.monotonic()
        time.sleep(0.05)
