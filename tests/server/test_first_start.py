"""A server has compiled what a request needs before it says that it is ready."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.accel.test_compiled import pytestmark  # noqa: F401
from tests.machine import Machine

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
FACTS = "You work at the harbour.\nharbour master: Ingrid Falk\nisland ferry: 14:20"
SYSTEM = {"role": "system", "content": FACTS}
QUESTION = {"role": "user", "content": "When is the island ferry?"}  # the README's
LONGER = {"role": "user", "content": "When is the island ferry? " * 40}


@contextmanager
def served(machine: Machine) -> Iterator[httpx.Client]:
    """Start the server that `make run` starts."""
    shown = machine.folder / "shown"
    with shown.open("wb") as out:
        command = [sys.executable, "-m", "rewarm", "serve", "--port", "0"]
        process = subprocess.Popen(command, env=machine.env(), stdout=out, stderr=out)
        try:
            while "line to paste" not in shown.read_text():
                assert process.poll() is None, shown.read_text()
                time.sleep(0.05)
            url = re.search(r"http://127.0.0.1:\d+", shown.read_text())
            assert url is not None
            with httpx.Client(base_url=url[0], timeout=120) as client:
                yield client
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0


def post(client: httpx.Client, path: str, **body: Any) -> httpx.Response:
    reply = client.post(path, json={"max_tokens": 48, **body})
    assert reply.status_code == 200, reply.text
    return reply


def ask_in_every_way(client: httpx.Client) -> None:
    first = [SYSTEM, QUESTION]
    answer = post(client, CHAT, messages=first, max_tokens=256).json()["choices"][0]["message"]
    assert answer["content"] == "14:20"
    post(client, CHAT, messages=[*first, answer, QUESTION], stream=True)
    post(client, CHAT, messages=[SYSTEM, LONGER])
    filters: tuple[dict[str, Any], ...] = (
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"min_p": 0.1},
        {"top_k": 20},
        {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"logprobs": True, "top_logprobs": 5, "logit_bias": {"5": 2}},
        {"n": 2, "seed": 3, "stop": ["ferry"]},
    )
    for options in filters:
        post(client, CHAT, messages=first, **({"temperature": 1.0} | options))
    post(client, MESSAGES, model="pocket", system=FACTS, messages=[QUESTION])
    post(client, "/v1/completions", prompt="a", max_tokens=4)
    with ThreadPoolExecutor(3) as pool:
        for messages in ([QUESTION], first, [SYSTEM, LONGER]):
            pool.submit(post, client, CHAT, messages=messages)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_no_compiler_runs_once_a_server_is_ready_and_none_at_the_next_start(
    machine: Machine,
) -> None:
    with served(machine) as client:
        before_ready = machine.compiled
        ask_in_every_way(client)
        assert machine.compiled == before_ready > 0
    machine.restart()
    with served(machine) as client:
        ask_in_every_way(client)
    assert machine.compiled == before_ready
