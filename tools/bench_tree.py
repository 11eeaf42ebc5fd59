"""The index alone: how long a match takes and what a token costs, beside mlx-lm's trie in one run.

python tools/bench_tree.py [--tokens 100000] [--node 64] [--rounds 30]
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from rewarm.cache.tree import WIDTH, Tree, encode

LONGEST = 8.0
"""Seconds for one row of the table: mlx-lm's trie takes seconds for a prompt that diverges."""


def build_tree(tokens: Any, node: int) -> Tree:
    tree = Tree()
    data = encode(tokens)
    at = tree.root
    for start in range(0, len(data), node * WIDTH):
        at = tree.add(at, data[start : start + node * WIDTH], "prefill")
    return tree


def build_trie(tokens: list[int]) -> Any:
    from mlx_lm.models.cache import PromptTrie  # after rewarm, which brings a faster BLAS

    trie = PromptTrie()
    trie.add("model", tokens, "value")
    return trie


def bytes_per_token(build: Callable[[], Any], tokens: int) -> float:
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    kept = build()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    return (after - before) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--node", type=int, default=64, help="tokens in a node")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    n = options.tokens
    tokens = np.random.default_rng(0).integers(0, 150_000, n, dtype=np.int32)
    listed = tokens.tolist()

    ours = bytes_per_token(lambda: build_tree(tokens, options.node), n)
    theirs = bytes_per_token(lambda: build_trie(listed), n)
    print(f"{n:,} tokens, nodes of {options.node}: {-(-n // options.node):,} nodes\n")
    print(f"index, bytes a token    rewarm {ours:6.1f}    mlx-lm's trie {theirs:6.1f}\n")

    tree, trie = build_tree(tokens, options.node), build_trie(listed)
    print(f"match, ms               {'rewarm':>14} {'':>8} {'mlx-lm':>14}     ratio")
    for share in (1.0, 0.999, 0.5, 0.01):
        asked = tokens.copy()
        if share < 1:
            asked[int(n * share)] = 150_001
        as_list = asked.tolist()
        mine, other = [], []
        until = time.perf_counter() + LONGEST
        while len(mine) < options.rounds and (len(mine) < 2 or time.perf_counter() < until):
            began = time.perf_counter()  # alternating: the machine's moods hit both
            shared = tree.walk(encode(asked)).shared
            middle = time.perf_counter()
            trie.search("model", as_list)
            mine.append((middle - began) * 1e3)
            other.append((time.perf_counter() - middle) * 1e3)
        name = "hit" if share == 1 else f"diverges at {share:.1%}"
        print(
            f"{name:<22} {np.median(mine):7.2f} median {np.max(mine):6.2f} max "
            f"{np.median(other):7.2f} median {np.median(other) / np.median(mine):8.1f}x"
            f"   shared {shared:,}"
        )


if __name__ == "__main__":
    main()
