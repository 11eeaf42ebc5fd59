"""The scenario `index`: the cache's tree of tokens beside mlx-lm's trie, without a model."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Annotated

from mlx_lm.models.cache import PromptTrie

from rewarm.cache.tree import WIDTH, Node, Tree, encode
from rewarm.values import Tokens

from .bench import Bench
from .figures import Spread, milliseconds, random_tokens, ratios
from .result import Sheet
from .scenario import at_least, scenario

VOCABULARY = 150_000
NODE = 64
"""Tokens in a node."""

SHARES = (1.0, 0.999, 0.5, 0.01)
"""The share of the stored prompt after which the prompt that is looked up diverges."""

LONGEST = 8.0
"""Seconds for one row of the table. The trie takes seconds for a prompt that diverges early."""


@scenario(rounds=30)
def index(
    bench: Bench,
    tokens: Annotated[int, at_least(100, "Tokens of the stored prompt.")] = 100_000,
) -> None:
    """The index alone, beside mlx-lm's trie: bytes of a token, and the time of a match."""
    prompt = random_tokens(tokens, VOCABULARY)
    make_tree, make_trie = partial(_tree_of, prompt), partial(_trie_of, prompt)
    sizes = bench.result.sheet(
        f"the index of {tokens:,} tokens in nodes of {NODE}", "side", "bytes a token:.1f"
    )
    sizes.add("rewarm", _allocated(make_tree) / tokens)
    sizes.add("mlx-lm's trie", _allocated(make_trie) / tokens)
    tree, trie = make_tree(), make_trie()
    columns = ("prompt", "rewarm:.2f", "at most:.2f", "mlx-lm's trie:.2f", "times rewarm's")
    sheet = bench.result.sheet("a match, ms", *columns)
    for share in SHARES:
        asked = prompt.copy()
        asked[int(tokens * share) :] = VOCABULARY
        search: dict[str, Callable[[], object]] = {
            "rewarm": partial(_walk, tree, asked),
            "trie": partial(trie.search, "model", asked.tolist()),
        }
        took: dict[str, list[float]] = {side: [] for side in search}
        until = time.perf_counter() + LONGEST
        name = "a hit" if share == 1 else f"diverges at {share:.1%}"
        with bench.concluding(partial(_row, sheet, name, took)):
            for _, side in bench.in_turns(name, list(search), bench.rounds):
                if min(map(len, took.values())) < 2 or time.perf_counter() < until:
                    took[side].append(milliseconds(search[side]))


def _row(sheet: Sheet, name: str, took: dict[str, list[float]]) -> None:
    if all(took.values()):
        ours, theirs = Spread.of(took["rewarm"]), Spread.of(took["trie"])
        times = ratios(took["rewarm"], took["trie"])
        sheet.add(name, ours.median, ours.most, theirs.median, times)


def _walk(tree: Tree, tokens: Tokens) -> None:
    tree.walk(encode(tokens))


def _tree_of(tokens: Tokens) -> Tree:
    tree, data = Tree(), encode(tokens)
    at: Node = tree.root
    for start in range(0, len(data), NODE * WIDTH):
        at = tree.add(at, data[start : start + NODE * WIDTH], "prefill")
    return tree


def _trie_of(tokens: Tokens) -> PromptTrie:
    trie = PromptTrie()
    trie.add("model", tokens.tolist(), "value")
    return trie


def _allocated(make: Callable[[], object]) -> int:
    """Measure the bytes that an object takes, in Python's own memory."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    made = make()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del made
    return after - before
