"""The seal of a payload. It proves that the payload is whole, and what it belongs to.

Every payload carries a label and a checksum over everything. The label names the path by a digest
of everything that must be equal: the namespace, every token before, and in `exact` every cut
before. The payload holds its own tokens as well. So what a tier gives back is used only where it
is what was asked for.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import xxhash

from rewarm.values import Kind, Namespace, Origin

from ..find import Query
from ..payload import PackedState, Rows, chained
from ..tree import WIDTH, agreement
from .base import Offer, Sealed, Span
from .codec import pack_rows, pack_state, unpack_rows, unpack_state

FORMAT = 3
"""The version of payloads below memory. Payloads of another version are never found."""

LABEL, TOKENS, SEAL = "label", "tokens", "seal"

What = Literal["rows", "window", "state"]


class BrokenSeal(Exception):
    """A payload that is damaged, or not what was asked for."""


@dataclass(frozen=True)
class FetchedPayload:
    """A payload that was checked, cut to the path that was asked for."""

    what: What
    start: int
    stops: tuple[int, ...]
    """The ends of the spans that it was made of."""
    origins: tuple[Origin, ...]
    value: Rows | PackedState
    kind: Kind | None
    """The kind of checkpoint that a state is."""

    @property
    def stop(self) -> int:
        return self.stops[-1]


def digest_of(namespace: Namespace) -> str:
    """Return the name of a namespace below memory. It does not reveal the salt."""
    text = json.dumps({**asdict(namespace), "format": FORMAT}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class PathDigest:
    """Digests of the beginnings of one path. Each costs only the tokens since the last one."""

    def __init__(self, namespace: Namespace, data: bytes, cuts: Sequence[int]) -> None:
        self._data = data
        self._cuts = np.asarray(cuts, np.int64)
        self._known = {0: hashlib.blake2b(digest_of(namespace).encode(), digest_size=16)}
        self._lock = threading.Lock()

    def at(self, position: int) -> str:
        with self._lock:
            nearest = max(p for p in self._known if p <= position)
            found = self._known[nearest].copy()
            found.update(self._data[nearest * WIDTH : position * WIDTH])
            self._known[position] = found.copy()
        found.update(self._cuts[self._cuts <= position].tobytes())
        return found.hexdigest()


@dataclass(frozen=True)
class OfferedPayload:
    """A payload of an offered path, not sealed yet."""

    what: What
    spans: tuple[Span, ...]
    """The spans that it lies in. A state lies in the span whose end it is at."""
    value: Rows | PackedState

    @property
    def tokens(self) -> tuple[int, int] | None:
        """The first token that it holds rows for, and the end."""
        return (self.value.start, self.value.stop) if isinstance(self.value, Rows) else None


def payloads(offer: Offer, known: int = 0, most: int | None = None) -> Iterator[OfferedPayload]:
    """Yield the payloads that the end of an offered path can be restored from.

    `known` is the number of tokens whose rows the tier has already. `most` is the number of bytes
    up to which the rows of several spans are one payload."""
    groups: list[list[tuple[Span, Rows]]] = []
    size = 0
    for span in offer.path:
        rows = span.rows.part(known, span.end) if span.rows and span.end > known else None
        if rows is None:
            continue
        size += rows.nbytes
        is_full = most is not None and size > most
        if not groups or is_full or rows.packing != groups[-1][0][1].packing:
            groups.append([])
            size = rows.nbytes
        groups[-1].append((span, rows))
    for group in groups:
        whole = chained([rows for _, rows in group])
        assert whole is not None
        yield OfferedPayload("rows", tuple(span for span, _ in group), whole)
    for span in offer.path:
        if span.window is not None:
            yield OfferedPayload("window", (span,), span.window)
    if offer.path[-1].state is not None:
        yield OfferedPayload("state", offer.path[-1:], offer.path[-1].state)


class Sealer:
    """Seals the payloads of one offered path."""

    def __init__(self, offer: Offer) -> None:
        self.receipt = offer.receipt
        self._data = offer.data
        self._path = PathDigest(offer.namespace, self._data, offer.cuts)

    def sealed(self, payload: OfferedPayload) -> Sealed:
        value, last = payload.value, payload.spans[-1]
        if isinstance(value, Rows):
            arrays, form = pack_rows(value)
            start, stop = value.start, value.stop
        else:
            arrays, form = pack_state(value)
            start = stop = last.end
        label = {
            "path": self._path.at(start),
            "what": payload.what,
            "start": start,
            "ends": [[min(span.end, stop), span.origin] for span in payload.spans],
            "kind": last.kind if payload.what == "state" else None,
            "form": form,
        }
        tokens = self._data[start * WIDTH : stop * WIDTH]
        arrays[LABEL] = np.frombuffer(json.dumps(label).encode(), np.uint8)
        arrays[TOKENS] = np.frombuffer(tokens, np.uint8)
        return stamped(arrays)


def sealed(offer: Offer) -> list[Sealed]:
    """Seal all payloads of an offered path, for a tier that keeps each path by itself."""
    seal = Sealer(offer)
    return [seal.sealed(payload) for payload in payloads(offer)]


def stamped(arrays: Sealed) -> Sealed:
    return {**arrays, SEAL: np.frombuffer(_checksum(arrays), np.uint8)}


def is_whole(arrays: Sealed) -> bool:
    """True where a payload is as it was sealed, whatever it belongs to."""
    return SEAL in arrays and arrays[SEAL].tobytes() == _checksum(arrays)


class Unsealer:
    """Checks and unpacks the payloads of one prompt. Safe to use from threads."""

    def __init__(self, query: Query) -> None:
        self._query = query
        self._path = PathDigest(query.namespace, query.data, query.cuts)

    def piece(self, arrays: Sealed) -> FetchedPayload:
        """Check and unpack one payload. Raises `BrokenSeal`."""
        try:
            if not is_whole(arrays):
                raise BrokenSeal("its checksum is another")
            return self._checked(arrays, json.loads(arrays[LABEL].tobytes()))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise BrokenSeal(f"it cannot be read ({error})") from error

    def _checked(self, arrays: Sealed, label: dict[str, Any]) -> FetchedPayload:
        what, start = label["what"], label["start"]
        if start > self._query.length or label["path"] != self._path.at(start):
            raise BrokenSeal("it belongs to another path")
        stops, origins = self._ours(arrays[TOKENS].tobytes(), start, label["ends"])
        value: Rows | PackedState
        if what == "state":
            value = unpack_state(arrays, label["form"])
            if not isinstance(value.skeleton, (list, tuple)) or (
                len(value.skeleton) != len(self._query.layout.groups["state"])
            ):
                raise BrokenSeal("it is the state of another model")
        else:
            rows = unpack_rows(arrays, label["form"])
            if (rows.start, rows.stop) != (start, label["ends"][-1][0]):
                raise BrokenSeal("it holds other rows than its label says")
            if len(rows.packing.counts) != len(self._query.layout.groups[what]):
                raise BrokenSeal("it holds the rows of another model")
            part = rows.part(start, stops[-1])
            if part is None:
                raise BrokenSeal("it holds no rows")
            value = part
        return FetchedPayload(what, start, stops, origins, value, label["kind"])

    def _ours(
        self, tokens: bytes, start: int, ends: list[Any]
    ) -> tuple[tuple[int, ...], tuple[Origin, ...]]:
        """Return the spans that the prompt shares: in `exact`, whole chunks of its own cuts."""
        query = self._query
        if len(tokens) != (ends[-1][0] - start) * WIDTH:
            raise BrokenSeal("its label does not fit it")
        if not tokens:  # a state: the path's digest covers all of it
            return (start,), (ends[-1][1],)
        upto = start + agreement(tokens, query.data[start * WIDTH :])
        own = iter([cut for cut in query.cuts if cut > start])
        stops: list[int] = []
        origins: list[Origin] = []
        for stop, origin in ends:
            if query.reuse == "exact" and (stop > upto or stop != next(own, None)):
                break
            stops.append(min(stop, upto))
            origins.append(origin)
            if stop >= upto:
                break
        if not stops or stops[-1] <= start:
            raise BrokenSeal("the prompt goes another way there")
        return tuple(stops), tuple(origins)


def _checksum(arrays: Sealed) -> bytes:
    found = xxhash.xxh3_128()
    for name in sorted(arrays.keys() - {SEAL}):
        array = np.ascontiguousarray(arrays[name])
        found.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        if array.nbytes:
            found.update(array.reshape(-1).view(np.uint8).data)
    return found.digest()
