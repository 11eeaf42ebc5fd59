"""Stop sequences, found in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Passed(NamedTuple):
    text: str
    stop: str | None = None


class Stops:
    """Lets text through up to the first stop sequence, and nothing of that.

    The first is the one that is complete first; of two that end together, the longer one. So it
    does not matter how the text is cut into pieces.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._stops = sorted({s for s in stops if s}, key=len, reverse=True)
        self._held = ""

    def feed(self, text: str) -> Passed:
        if not self._stops:
            return Passed(text)
        text = self._held + text
        ends = [(at + len(s), i) for i, s in enumerate(self._stops) if (at := text.find(s)) >= 0]
        if ends:
            end, first = min(ends)
            stop = self._stops[first]
            self._held = ""
            return Passed(text[: end - len(stop)], stop)
        keep = max(_begun(text, s) for s in self._stops)
        self._held = text[len(text) - keep :]
        return Passed(text[: len(text) - keep])

    def flush(self) -> str:
        """The text that was held back because a stop sequence might have begun."""
        text, self._held = self._held, ""
        return text


def _begun(text: str, stop: str) -> int:
    """The length of the text's end that may be the beginning of a stop sequence."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0
