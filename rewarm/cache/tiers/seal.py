"""The seal of a payload. It proves that the payload is whole, and what it belongs to.

Every payload carries a label and a checksum over everything. The label names the path by a digest
of everything that must be equal: the namespace, every token before, and in `exact` every cut
before. The payload holds its own tokens as well. So what a tier gives back is used only where it
is what was asked for.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import xxhash

from rewarm.values import Kind, Namespace, Origin

from ..find import Query
from ..payload import PackedState, Rows, chained
from ..tree import WIDTH, Node, agreement
from .base import Offer, Sealed
from .codec import pack_rows, pack_state, unpack_rows, unpack_state

FORMAT = 3
"""The version of payloads below memory. Payloads of another version are never found."""

LABEL, TOKENS, SEAL = "label", "tokens", "seal"

What = Literal["rows", "window", "state"]


class BrokenSeal(Exception):
    """A payload that is damaged, or not what was asked for."""


@dataclass(frozen=True)
class PathPayload:
    """A payload with its place in a path."""

    what: What
    start: int
    """The first token that it holds rows for. A state begins and ends at its position."""
    ends: Mapping[int, Origin]
    """The ends of the spans that it was made of, in order, and their origins."""
    value: Rows | PackedState
    kind: Kind | None = None
    """The kind of checkpoint that a state is."""

    @property
    def stop(self) -> int:
        return max(self.ends)


@lru_cache(1024)
def digest_of(namespace: Namespace) -> str:
    """Return the name of a namespace below memory. It does not reveal the salt."""
    text = json.dumps({**asdict(namespace), "format": FORMAT}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class PathDigest:
    """Digests of the beginnings of one path. Each costs only the tokens since the last one."""

    def __init__(self, path: Offer | Query) -> None:
        self.data = path.data
        self._cuts = np.asarray(path.cuts, np.int64)
        self._known = {0: hashlib.blake2b(digest_of(path.namespace).encode(), digest_size=16)}
        self._lock = threading.Lock()

    def at(self, position: int) -> str:
        with self._lock:
            nearest = max(p for p in self._known if p <= position)
            found = self._known[nearest].copy()
            found.update(self.data[nearest * WIDTH : position * WIDTH])
            self._known[position] = found.copy()
        found.update(self._cuts[self._cuts <= position].tobytes())
        return found.hexdigest()


def payloads(offer: Offer, known: int = 0, most: float = math.inf) -> Iterator[PathPayload]:
    """Yield the payloads that the end of an offered path can be restored from.

    `known` is the number of tokens whose rows the tier has already. `most` is the number of bytes
    up to which the rows of several spans are one payload."""
    groups: list[dict[Node, Rows]] = []
    size, packing = 0, None
    for node in (node for node in offer.path if node.end > known):
        rows = node.rows.part(known, node.end) if isinstance(node.rows, Rows) else None
        if rows is None:
            continue
        size += rows.nbytes
        if size > most or rows.packing != packing:
            groups.append({})
            size, packing = rows.nbytes, rows.packing
        groups[-1][node] = rows
    for group in groups:
        whole = chained([*group.values()])
        yield PathPayload("rows", whole.start, {node.end: node.origin for node in group}, whole)
    for node in offer.path:
        if isinstance(node.window, Rows):
            ends = {node.end: node.origin}
            yield PathPayload("window", node.window.start, ends, node.window)
    last = offer.path[-1]
    if last.checkpoint is not None and isinstance(last.state, PackedState):
        ends = {last.end: last.origin}
        yield PathPayload("state", last.end, ends, last.state, last.checkpoint.kind)


def sealed_payload(path: PathDigest, payload: PathPayload) -> Sealed:
    """Seal a payload of a path."""
    value, start = payload.value, payload.start
    arrays, form = pack_rows(value) if isinstance(value, Rows) else pack_state(value)
    label = {
        "path": path.at(start),
        "what": payload.what,
        "start": start,
        "ends": [*payload.ends.items()],
        "kind": payload.kind,
        "form": form,
    }
    tokens = path.data[start * WIDTH : payload.stop * WIDTH]
    arrays[LABEL] = np.frombuffer(json.dumps(label).encode(), np.uint8)
    arrays[TOKENS] = np.frombuffer(tokens, np.uint8)
    return stamped(arrays)


def sealed(offer: Offer) -> list[Sealed]:
    """Seal all payloads of an offered path, for a tier that keeps each path by itself."""
    path = PathDigest(offer)
    return [sealed_payload(path, payload) for payload in payloads(offer)]


def stamped(arrays: Sealed) -> Sealed:
    return {**arrays, SEAL: np.frombuffer(_checksum(arrays), np.uint8)}


def is_whole(arrays: Sealed) -> bool:
    """True where a payload is as it was sealed, whatever it belongs to."""
    return SEAL in arrays and arrays[SEAL].tobytes() == _checksum(arrays)


class Unsealer:
    """Checks and unpacks the payloads of one prompt. Safe to use from threads."""

    def __init__(self, query: Query) -> None:
        self._query = query
        self._path = PathDigest(query)

    def piece(self, arrays: Sealed) -> PathPayload:
        """Check and unpack one payload. Raises `BrokenSeal`."""
        try:
            if not is_whole(arrays):
                raise BrokenSeal("its checksum is another")
            return self._checked(arrays, json.loads(arrays[LABEL].tobytes()))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise BrokenSeal(f"it cannot be read ({error})") from error

    def _checked(self, arrays: Sealed, label: dict[str, Any]) -> PathPayload:
        what, start = label["what"], label["start"]
        if start > self._query.length or label["path"] != self._path.at(start):
            raise BrokenSeal("it belongs to another path")
        ends = self._ours(arrays[TOKENS].tobytes(), start, label["ends"])
        layers = len(self._query.layout.groups[what])
        value: Rows | PackedState
        if what == "state":
            value = unpack_state(arrays, label["form"])
            if not isinstance(value.skeleton, (list, tuple)) or len(value.skeleton) != layers:
                raise BrokenSeal("it is the state of another model")
        else:
            rows = unpack_rows(arrays, label["form"])
            if (rows.start, rows.stop) != (start, label["ends"][-1][0]):
                raise BrokenSeal("it holds other rows than its label says")
            if len(rows.packing.counts) != layers:
                raise BrokenSeal("it holds the rows of another model")
            part = rows.part(start, max(ends))
            if part is None:
                raise BrokenSeal("it holds no rows")
            value = part
        return PathPayload(what, start, ends, value, label["kind"])

    def _ours(self, tokens: bytes, start: int, ends: list[Any]) -> dict[int, Origin]:
        """Return the spans that the prompt shares: in `exact`, whole chunks of its own cuts."""
        query = self._query
        if len(tokens) != (ends[-1][0] - start) * WIDTH:
            raise BrokenSeal("its label does not fit it")
        if not tokens:  # a state: the path's digest covers all of it
            return {start: ends[-1][1]}
        upto = start + agreement(tokens, query.data[start * WIDTH :])
        own = iter([cut for cut in query.cuts if cut > start])
        ours: dict[int, Origin] = {}
        for stop, origin in ends:
            if query.reuse == "exact" and (stop > upto or stop != next(own, None)):
                break
            ours[min(stop, upto)] = origin
            if stop >= upto:
                break
        if max(ours, default=0) <= start:
            raise BrokenSeal("the prompt goes another way there")
        return ours


def _checksum(arrays: Sealed) -> bytes:
    found = xxhash.xxh3_128()
    for name in sorted(arrays.keys() - {SEAL}):
        array = np.ascontiguousarray(arrays[name])
        found.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        if array.nbytes:
            found.update(array.reshape(-1).view(np.uint8).data)
    return found.digest()
