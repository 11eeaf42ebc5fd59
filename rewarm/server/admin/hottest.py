"""The prefixes that requests resumed from most, as far as the cache still has them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from rewarm.cache import PrefixCache
from rewarm.values import Boundary, Tokens

from ..work import Run

MOST = 128
MOST_TOKENS = 1_000_000
"""Of all of them together: 4 MB."""
LABEL_TOKENS = 48
LABEL = 36
"""Characters of each end of a label."""


@dataclass
class Prefix:
    """A prefix that requests resumed from."""

    salt: str | None
    prompt: Tokens
    """One token more than the prefix: a prompt that would resume at its end."""
    boundaries: Sequence[Boundary]
    kind: str | None
    hits: int = 0
    nbytes: int = 0
    used: float = 0.0
    tier: str | None = None
    """Where it was when it was last looked for."""
    _label: str | None = None

    @property
    def tokens(self) -> int:
        return len(self.prompt) - 1

    def label(self, tokenizer: Any) -> str:
        """Its first and its last words."""
        if self._label is None:
            prefix = self.prompt[:-1]
            begins, ends = (
                " ".join(str(tokenizer.decode(part, skip_special_tokens=True)).split())
                for part in (prefix[:LABEL_TOKENS].tolist(), prefix[-LABEL_TOKENS:].tolist())
            )
            short = self.tokens <= LABEL_TOKENS
            self._label = ends[:LABEL] if short else f"{begins[:LABEL]} … {ends[-LABEL:]}"
        return self._label


class Hottest:
    """Bounded in number and in size. Safe to use from several threads."""

    def __init__(self, most: int = MOST, most_tokens: int = MOST_TOKENS) -> None:
        self._most, self._most_tokens = most, most_tokens
        self._prefixes: OrderedDict[tuple[str | None, int], Prefix] = OrderedDict()
        self._tokens = 0
        self._lock = threading.Lock()

    def resumed(self, run: Run) -> None:
        """A request went on from what was stored."""
        report = run.report
        if report is None or not report.match.resume:
            return
        at, salt = report.match.resume, run.request.salt
        key = (salt, xxhash.xxh3_64_intdigest(run.prompt.tokens[:at].tobytes()))
        with self._lock:
            prefix = self._prefixes.get(key)
            if prefix is None:
                prompt = run.prompt.tokens[: at + 1].copy()
                boundaries = [b for b in run.prompt.boundaries if b.position <= at]
                prefix = self._prefixes[key] = Prefix(salt, prompt, boundaries, report.resumed_at)
                self._tokens += len(prompt)
            prefix.hits += 1
            prefix.nbytes = report.restored_bytes
            prefix.used = time.time()
            self._prefixes.move_to_end(key)
            while len(self._prefixes) > self._most or self._tokens > self._most_tokens:
                self._drop(next(iter(self._prefixes)))

    def held(self, cache: PrefixCache, most: int) -> list[Prefix]:
        """Those that a request could still resume from; what is gone is forgotten.

        May wait for the cache's lock."""
        with self._lock:
            ranked = sorted(self._prefixes.items(), key=lambda i: (-i[1].hits, -i[1].used))
        found: list[Prefix] = []
        for key, prefix in ranked:
            if len(found) == most:
                break
            match = cache.match(prefix.prompt, prefix.salt, prefix.boundaries)
            if match.resume < prefix.tokens:
                with self._lock:
                    self._drop(key)
                continue
            prefix.tier = match.tier
            found.append(prefix)
        return found

    def forget(self) -> None:
        with self._lock:
            self._prefixes.clear()
            self._tokens = 0

    def _drop(self, key: tuple[str | None, int]) -> None:
        prefix = self._prefixes.pop(key, None)
        if prefix is not None:
            self._tokens -= len(prefix.prompt)
