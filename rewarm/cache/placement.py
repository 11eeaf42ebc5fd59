"""Placement: choose where checkpoints are taken.

To take a checkpoint is cheap. Retention chooses which ones are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
"""The likelihood that a checkpoint of each kind is asked for again, relative to one at the end of a
prompt. A chat whose end was evicted goes on from a sparse one."""


class Point(NamedTuple):
    position: int
    kind: Kind


@dataclass(frozen=True)
class Shape:
    """The facts of a prompt for placement. Its last token is left to the first decode step."""

    stop: int
    resume: int = 0
    junction: int = 0
    boundaries: Sequence[Boundary] = ()
    marks: Sequence[int] = ()


def points(shape: Shape, *, sparse: int = 8192, near: int = 8) -> list[Point]:
    """Choose where to take checkpoints, in order, between `shape.resume` and `shape.stop`: at
    message ends, junctions, marks and the end, and every `sparse` tokens between them.

    Of two points closer than `near` tokens, only the earlier one is taken."""
    wanted = [Point(position, "mark") for position in shape.marks]
    wanted += [Point(b.position, b.kind) for b in shape.boundaries if b.kind]
    if shape.junction > shape.resume:
        wanted.append(Point(shape.junction, "junction"))
    wanted.sort(key=lambda p: (p.position, -WEIGHTS[p.kind]))
    taken: list[Point] = []
    for point in wanted:
        # Replaying the few tokens between two near points is cheap.
        last = taken[-1].position if taken else shape.resume
        if last < point.position < shape.stop and (not last or point.position - last >= near):
            taken.append(point)
    if shape.stop > shape.resume:
        # The end is always taken: an exact repeat resumes there.
        taken.append(Point(shape.stop, "end"))
    found: list[Point] = []
    start = shape.resume
    for point in taken:
        between = range(start + sparse, point.position - near, sparse)
        found += [*(Point(position, "sparse") for position in between), point]
        start = point.position
    return found
