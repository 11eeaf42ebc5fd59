"""What polling `/v1/live` costs: the decode rate with it and without, in turns, and CPU time.

.venv/bin/python tools/bench_live.py --rounds 6
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import threading
import time

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
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
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
        before = cpu_seconds(server.pid)
        with httpx.Client(base_url=url, timeout=60) as client:
            for _ in range(500):
                client.get("/v1/live").raise_for_status()
        each = (cpu_seconds(server.pid) - before) / 500
        print(f"CPU time of the server: {each * 1e3:.2f} ms a poll")
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
