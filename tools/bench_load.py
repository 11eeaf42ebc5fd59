"""How long the page takes to show a full tree: from navigation to its first span, in chromium.

    .venv/bin/python tools/bench_load.py --nodes 100000

A server with the built-in model is started for each load, so that nothing was surveyed, learned or
kept by the browser before. Its tree is filled with spans that hold no rows: a hundred thousand
prompts would take an hour. With `--busy` an answer is streamed meanwhile.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import threading

import httpx
import numpy as np
from browser import browser

from rewarm import PrefixCache, load
from rewarm.cache.tree import Node, Tree, encode
from rewarm.engine import Engine, Loaded
from rewarm.options import EngineOptions, ServerOptions
from rewarm.server.serve import serve

MARKS = """(() => {
  const look = () => {
    if (document.querySelector('#tree .span')) window.drawn = performance.now();
    else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})()"""
"""Written into the page before its own scripts; `now` counts from the navigation."""
LOADED = "performance.getEntriesByType('navigation')[0].loadEventEnd"


def fill(cache: PrefixCache, nodes: int) -> None:
    """Wide and deep: a system prompt with thousands of users, and a few very long chats."""
    draw = np.random.default_rng(0)
    tree: Tree = cache.memory.tree(cache.namespace())
    made: list[Node] = [tree.add(tree.root, encode(np.arange(500, dtype=np.int32)), "prefill")]
    while len(made) < nodes:
        near = -1 - int(draw.exponential(20)) % len(made)
        parent = made[0] if draw.random() < 0.3 else made[near]
        tokens = draw.integers(0, 250, int(draw.integers(8, 60)))
        tokens[0] = len(made)
        made.append(tree.add(parent, encode(tokens.astype(np.int32)), "prefill"))
    for node in made:
        cache.memory.ledger.count(node)


def server(nodes: int) -> None:
    """A process of its own; says where it is once the tree is full."""

    def loaded() -> Loaded:
        found = load("pocket")
        cache = PrefixCache(found.model, memory="1GB")
        fill(cache, nodes)
        return Loaded(found.model, found.tokenizer, cache)

    options = ServerOptions(model_name="pocket", port=0)
    serve(Engine(loaded, EngineOptions()), options, lambda url: print(url, flush=True))


def chat(url: str) -> None:
    body = {"prompt": "The tide ", "max_tokens": 3000, "logit_bias": {"257": -100}}
    httpx.post(f"{url}/v1/completions", json=body, timeout=600)


def one_load(nodes: int, busy: bool) -> tuple[float, float]:
    reading, writing = os.pipe()
    child = os.posix_spawn(
        sys.executable,
        [sys.executable, __file__, "--serve", "--nodes", str(nodes)],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, writing, 1)],
    )
    os.close(writing)
    try:
        with os.fdopen(reading) as said, browser() as page:
            url = said.readline().strip()
            if not url:
                raise RuntimeError("the server did not start")
            page.open("about:blank")
            page.size(1280, 800)
            page.call("Page.addScriptToEvaluateOnNewDocument", source=MARKS)
            if busy:
                threading.Thread(target=chat, args=(url,), daemon=True).start()
            page.open(url)
            drawn = float(page.wait("window.drawn"))
            found = float(page.run(LOADED)), drawn
            if page.problems:
                raise RuntimeError(str(page.problems))
            return found
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="while an answer is streamed")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        server(asked.nodes)
        return
    found = []
    for _ in range(asked.rounds):
        found.append(one_load(asked.nodes, asked.busy))
        print(f"  page {found[-1][0]:5.0f} ms   tree {found[-1][1]:5.0f} ms", flush=True)
    page, tree = (statistics.median(times) for times in zip(*found, strict=True))
    print(f"{asked.nodes:,} nodes: the page in {page:.0f} ms, its tree in {tree:.0f} ms (median)")


if __name__ == "__main__":
    main()
