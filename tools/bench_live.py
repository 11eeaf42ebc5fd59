"""What an open page costs: CPU time, and the decode rate with `/v1/live` polled and without.

The page asks `/v1/live` every second, and for the tree every other one where something has changed.
What that takes of a core is what it can take from the decode rate; unlike the rate, it can be
measured on a machine that others use.

.venv/bin/python tools/bench_live.py --rounds 6
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

ANSWER = 400


def decode_rate(url: str, polls_a_second: float) -> float:
    """Tokens a second of one stream, while somebody polls (or not)."""
    over = threading.Event()

    def poll() -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            while polls_a_second and not over.wait(1 / polls_a_second):
                client.get("/v1/live").raise_for_status()

    poller = threading.Thread(target=poll)
    poller.start()
    times = []
    body = {
        "prompt": "The tide ",
        "max_tokens": ANSWER,
        "stream": True,
        "logit_bias": {"257": -100},
    }
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    over.set()
    poller.join()
    return (len(times) - 1) / (times[-1] - times[0])


def cpu_seconds(pid: int) -> float:
    """Of all threads that are alive, to the nanosecond: ticks are longer than a poll."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def cost_of(pid: int, ask: Callable[[], object], times: int, before: Callable[[], object]) -> float:
    """Milliseconds of CPU time that a question takes, without what happens before it."""
    spent = 0.0
    for _ in range(times):
        before()
        begun = cpu_seconds(pid)
        ask()
        spent += cpu_seconds(pid) - begun
    return spent / times * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--polls", type=float, default=1.0, help="a second")
    parser.add_argument("--model", default="pocket")
    given = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "rewarm", "serve", given.model, "--port", port]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        for i in range(70):  # so that every list is full
            body = {"prompt": f"{i} and a few words more", "max_tokens": 1}
            httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        with httpx.Client(base_url=url, timeout=60) as client:

            def change() -> None:
                body = {"prompt": f"{time.perf_counter()} and more", "max_tokens": 1}
                client.post("/v1/completions", json=body).raise_for_status()
                time.sleep(0.05)  # what is done when the answer has been sent

            live = cost_of(server.pid, lambda: client.get("/v1/live"), 200, lambda: None)
            tree = cost_of(server.pid, lambda: client.get("/v1/cache?limit=250"), 50, change)
        page = live * given.polls + tree / 2
        print(
            f"CPU time of the server: {live:.2f} ms a poll, {tree:.2f} ms a tree that has changed; "
            f"a page takes {page / 1e3:.2%} of a core at most"
        )
        ratios = []
        for i in range(given.rounds):
            order = (0.0, given.polls) if i % 2 else (given.polls, 0.0)
            rates = {polls: decode_rate(url, polls) for polls in order}
            ratios.append(rates[given.polls] / rates[0.0])
            print(f"{rates[0.0]:.1f} tokens/s alone, {rates[given.polls]:.1f} polled")
        print(f"polled / alone: {statistics.median(ratios):.3f} (median of {given.rounds})")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
