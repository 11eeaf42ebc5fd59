"""Traces: recorded requests, with their tokens or with hashes of blocks of tokens.

Three formats are read, each as `.json`, `.jsonl` or gzipped:
- Mooncake's: a line for each request, `timestamp` (ms), `input_length`, `hash_ids` of 512 tokens
  each, the last one of the remaining tokens;
- coding-agent sessions: a file for each session, `requests` with `t` (s), `in` and `hash_ids` of
  `block_size` tokens each, without the remaining tokens. Hashes are compared inside a file only;
- tokens: a line for each request, `timestamp` (s) and `tokens`.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rewarm.errors import InvalidOption
from rewarm.values import Boundary, Tokens

MOONCAKE_BLOCK = 512

Blocks = npt.NDArray[np.int32]


@dataclass(frozen=True)
class TraceRequest:
    """One prompt, as numbers of blocks. A number stands for its block and all blocks before it, so
    equal numbers mean equal prefixes. As tokens, a block is its number repeated."""

    time: float
    session: int
    blocks: Blocks
    block_size: int
    length: int
    """The tokens of the prompt. The last block may be cut short."""
    system: int = 0
    """The tokens of the system prompt and the tools, where the trace says so."""
    turn: int = 0
    """The position where the message before the last one ends, where the trace says so."""
    waits: bool = False
    """A person reads the answer, which is no tool call."""

    def tokens(self) -> Tokens:
        return np.repeat(self.blocks, self.block_size)[: self.length].astype(np.int32, copy=False)

    @property
    def whole(self) -> int:
        """The end of the last whole block. The trace does not say how the rest goes on."""
        return self.length // self.block_size * self.block_size

    def boundaries(self) -> list[Boundary]:
        """Give the ends of this prompt's messages, rounded down to blocks."""
        found: list[Boundary] = []
        if 0 < self.system < self.whole:
            found.append(Boundary(self.system // self.block_size * self.block_size, "system"))
        if self.system < self.turn < self.whole:
            found.append(Boundary(self.turn // self.block_size * self.block_size, "turn"))
        if self.whole:
            found.append(Boundary(self.whole, "user"))
        return [b for b in found if b.position]


class _Numbers:
    """The numbers of blocks. Equal blocks after equal beginnings have the same number."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, Any], int] = {}
        self._last: list[Any] = []
        self._last_numbers: list[int] = []

    def of(self, blocks: list[Any]) -> Blocks:
        # Most requests repeat most of the previous one.
        same = 0
        for ours, theirs in zip(blocks, self._last, strict=False):
            if ours != theirs:
                break
            same += 1
        numbers = self._last_numbers[:same]
        above = numbers[-1] if numbers else -1
        for block in blocks[same:]:
            above = self._known.setdefault((above, block), len(self._known))
            numbers.append(above)
        self._last, self._last_numbers = blocks, numbers
        return np.asarray(numbers, dtype=np.int32)


@dataclass(frozen=True)
class Trace:
    """Requests in the order of time."""

    name: str
    requests: list[TraceRequest]

    @property
    def prompt_tokens(self) -> int:
        return sum(r.length for r in self.requests)

    @property
    def blocks(self) -> int:
        return sum(len(r.blocks) for r in self.requests)

    @cached_property
    def trie_tokens(self) -> int:
        """The number of distinct tokens over all prompts: the size of their trie."""
        sizes: dict[int, int] = {}
        for r in self.requests:
            if len(r.blocks):
                whole = len(r.blocks) - 1
                sizes.update(dict.fromkeys(r.blocks[:whole].tolist(), r.block_size))
                last = int(r.blocks[-1])
                sizes[last] = max(sizes.get(last, 0), r.length - whole * r.block_size)
        return sum(sizes.values())


def read(paths: Sequence[Path], stagger: float = 0.0, seed: int = 0) -> Trace:
    """Read all files as one trace. With `stagger`, sessions begin at random moments within so many
    seconds, instead of all at once."""
    files = list(_files(paths))
    if not files:
        raise InvalidOption(f"no trace in {', '.join(map(str, paths))}: give files, or a folder")
    numbers, draw = _Numbers(), random.Random(seed)
    requests: list[TraceRequest] = []
    for i, path in enumerate(files):
        found = list(_requests(path, i, numbers))
        later = draw.uniform(0, stagger) if stagger else 0.0
        requests += [replace(r, time=r.time + later) for r in found]
    if not requests:
        raise InvalidOption(f"{files[0]} holds no requests of a known format")
    requests.sort(key=lambda r: r.time)  # stable: requests of one moment stay in order
    name = files[0].name.split(".")[0] if len(files) == 1 else f"{len(files)} sessions"
    return Trace(name, requests)


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(p for p in path.iterdir() if ".json" in "".join(p.suffixes))
        elif path.is_file():
            yield path
        else:
            raise InvalidOption(f"{str(path)!r} is neither a file nor a folder")


def _requests(path: Path, session: int, numbers: _Numbers) -> Iterator[TraceRequest]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        text = lines.read()
    try:
        document = json.loads(text)
    except json.JSONDecodeError:
        document = [json.loads(line) for line in text.splitlines() if line.strip()]
    if isinstance(document, dict) and "requests" in document:
        yield from _session(document, session, numbers)
        return
    for line in document if isinstance(document, list) else [document]:
        if "tokens" in line:
            tokens = [int(t) for t in line["tokens"]]
            yield TraceRequest(
                float(line.get("timestamp", 0)), session, numbers.of(tokens), 1, len(tokens)
            )
        elif "hash_ids" in line:
            length, ids = int(line["input_length"]), list(line["hash_ids"])
            # A block that is cut short is another one than the whole block of a longer prompt.
            if length < len(ids) * MOONCAKE_BLOCK:
                ids[-1] = ("cut", ids[-1])
            yield TraceRequest(
                line["timestamp"] / 1e3, session, numbers.of(ids), MOONCAKE_BLOCK, length
            )


def _session(document: dict[str, Any], session: int, numbers: _Numbers) -> Iterator[TraceRequest]:
    size = int(document["block_size"])
    system = int(document.get("tool_tokens", 0)) + int(document.get("system_tokens", 0))
    before = 0
    for i, line in enumerate(document["requests"]):
        length = int(line["in"])
        ids: list[Any] = [(session, block) for block in line["hash_ids"]]
        if length > len(ids) * size:
            ids.append((session, "rest", i))
        length = min(length, len(ids) * size)
        yield TraceRequest(
            float(line["t"]),
            session,
            numbers.of(ids),
            size,
            length,
            system=system,
            turn=before if before < length else 0,
            waits=line.get("stop") == "end_turn",
        )
        before = length + int(line.get("out", 0))
