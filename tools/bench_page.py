"""What an open page costs: the decode rate with its polling and without, in turns.

    .venv/bin/python tools/bench_page.py --turns 24 --times 10

One long answer is streamed; every few seconds the polling is turned on or off. The poller asks as
the page does: `/v1/live` every second, and `/v1/cache` at most every other one, when that says that
something has changed. In both halves another client sends a short new prompt every second, so that
there is always a change.

`--times 10` asks ten times as often, and divides the loss by ten: on a machine with other work the
cost of one poll a second is less than the noise.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from bench_server import make_model, running, stream, text
from rich.progress import track

EVERY, TREE_EVERY = 1.0, 2.0
ANSWER = 30_000


class Repeated(threading.Thread):
    """Does something now and then while it is wanted."""

    def __init__(self, do: Callable[[], object], every: float = EVERY) -> None:
        super().__init__(daemon=True)
        self.do, self.every, self.wanted = do, every, threading.Event()

    def run(self) -> None:
        while True:
            self.wanted.wait()
            began = time.perf_counter()
            self.do()
            time.sleep(max(0.0, self.every - (time.perf_counter() - began)))


class Poller:
    def __init__(self, url: str, times: int) -> None:
        self.tree_every = TREE_EVERY / times
        self.http = httpx.Client(base_url=url, timeout=60)
        self.seen: object = None
        self.drawn = 0.0
        self.tag = ""
        self.polls = self.trees = 0

    def poll(self) -> None:
        cache = self.http.get("/v1/live").json()["cache"]
        changes = [cache[k] for k in ("hits", "misses", "tokens", "checkpoints", "evictions")]
        self.polls += 1
        if changes == self.seen or time.perf_counter() - self.drawn < self.tree_every:
            return
        self.seen, self.drawn = changes, time.perf_counter()
        reply = self.http.get("/v1/cache?limit=250", headers={"If-None-Match": self.tag})
        self.tag = reply.headers["etag"]
        self.trees += reply.status_code == 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=5.0, help="of one turn")
    parser.add_argument("--prompts", type=int, default=300, help="that are in the tree before")
    parser.add_argument("--times", type=int, default=1, help="as often as the page")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        with running("rewarm", Path(folder)) as client:
            for _ in track(range(asked.prompts), "filling the tree", transient=True):
                stream(client, text(200), 1)
            print(f"{client.get('/v1/cache').json()['entries']:,} spans in the tree")
            measure(client, asked.turns, asked.seconds, asked.times)


def measure(client: httpx.Client, turns: int, seconds: float, times_as_often: int) -> None:
    url = str(client.base_url)
    poller = Poller(url, times_as_often)
    other = httpx.Client(base_url=url, timeout=60)
    polling = Repeated(poller.poll, EVERY / times_as_often)
    asking = Repeated(lambda: stream(other, text(60), 1))
    times: list[float] = []

    def read() -> None:
        body = {"prompt": text(40), "max_tokens": ANSWER, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())

    threading.Thread(target=read, daemon=True).start()
    polling.start()
    asking.start()
    asking.wanted.set()
    time.sleep(3)
    rates: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(turns):
        polled = turn % 4 in (1, 2)  # a drift over time is the same for both
        if polled:
            polling.wanted.set()
        else:
            polling.wanted.clear()
        time.sleep(0.5)
        began = time.perf_counter()
        time.sleep(seconds)
        ended = time.perf_counter()
        rate = sum(began < t <= ended for t in list(times)) / (ended - began)
        rates[polled].append(rate)
        print(f"  {'polled' if polled else 'alone ':6}  {rate:7.1f} tokens/s", flush=True)
    polling.wanted.clear()
    asking.wanted.clear()
    time.sleep(2 * EVERY)  # what they have begun
    ratios = [p / a for p, a in zip(rates[True], rates[False], strict=True)]
    means = {polled: statistics.mean(found) for polled, found in rates.items()}
    lost = 1 - statistics.median(ratios)
    print(
        f"{poller.polls} polls, {poller.trees} trees; {means[True]:.1f} tokens/s polled, "
        f"{means[False]:.1f} alone: median of pairs {1 - lost:.3f}; "
        f"a page costs {lost / times_as_often:.2%}"
    )


if __name__ == "__main__":
    main()
