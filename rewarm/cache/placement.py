"""Placement: where checkpoints are taken.

What is taken is cheap; what is kept is retention's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rewarm.values import Boundary, Kind

WEIGHTS: dict[str, float] = {
    "system": 8.0,
    "mark": 8.0,
    "user": 4.0,
    "turn": 4.0,
    "junction": 4.0,
    "end": 1.0,
    "answer": 1.0,
    "sparse": 4.0,
}
"""The likelihood that a checkpoint of each kind is asked for again, against the end of a prompt. A
chat whose end was evicted goes on from a sparse one."""


class Point(NamedTuple):
    position: int
    kind: Kind


@dataclass(frozen=True)
class Shape:
    """A prompt as placement sees it. Its last token is left to the first decode step."""

    stop: int
    resume: int = 0
    junction: int = 0
    boundaries: Sequence[Boundary] = ()
    marks: Sequence[int] = ()


class Placement(Protocol):
    def points(self, shape: Shape) -> list[Point]:
        """Choose where to take checkpoints, in order, between `shape.resume` and `shape.stop`."""


@dataclass(frozen=True)
class ChatPlacement:
    """Checkpoints where chats resume: message ends, junctions, marks, the end; a few between."""

    sparse: int = 8192
    near: int = 8

    def points(self, shape: Shape) -> list[Point]:
        wanted: list[Point] = []
        wanted += [Point(p, "mark") for p in shape.marks]
        wanted += [Point(b.position, b.kind) for b in shape.boundaries if b.kind]
        if shape.junction > shape.resume:
            wanted.append(Point(shape.junction, "junction"))
        wanted.sort(key=lambda p: (p.position, -WEIGHTS[p.kind]))
        taken: list[Point] = []
        for point in wanted:
            # The earlier of two near points serves both; replaying the few tokens between is cheap.
            last = taken[-1].position if taken else shape.resume
            if last < point.position < shape.stop and (
                not last or point.position - last >= self.near
            ):
                taken.append(point)
        if shape.stop > shape.resume:
            # Never merged: an exact repeat must find its end.
            taken.append(Point(shape.stop, "end"))
        return self._with_sparse(taken, shape.resume)

    def _with_sparse(self, taken: list[Point], start: int) -> list[Point]:
        points: list[Point] = []
        for point in taken:
            points += [
                Point(p, "sparse")
                for p in range(start + self.sparse, point.position - self.near, self.sparse)
            ]
            points.append(point)
            start = point.position
        return points
