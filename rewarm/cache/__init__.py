"""The heart: a tree of prompt state that any mlx-lm model can resume from."""

from .lease import Cut, Lease, Match
from .placement import Boundary, ChatPlacement, Placement, Point, Shape
from .prefix import PrefixCache
from .retention import LRU, Retention, WorkPerByte
from .views.stats import Stats

__all__ = [
    "LRU",
    "Boundary",
    "ChatPlacement",
    "Cut",
    "Lease",
    "Match",
    "Placement",
    "Point",
    "PrefixCache",
    "Retention",
    "Shape",
    "Stats",
    "WorkPerByte",
]
