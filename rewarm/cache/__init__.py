"""The prefix cache: a tree of prompt state that a model can resume from."""

from . import layer_kinds
from .lease import Lease
from .placement import Point, Shape
from .prefix import PrefixCache
from .retention import LRU, Retention, WorkPerByte
from .views.stats import Stats

__all__ = [
    "LRU",
    "Lease",
    "Point",
    "PrefixCache",
    "Retention",
    "Shape",
    "Stats",
    "WorkPerByte",
    "layer_kinds",
]
