"""The prefix cache: a tree of prompt state that a model can resume from."""

from . import layer_kinds
from .pins import Lease
from .prefix import PrefixCache
from .views.stats import Stats
from .worth import LRU, Retention, WorkPerByte

__all__ = ["LRU", "Lease", "PrefixCache", "Retention", "Stats", "WorkPerByte", "layer_kinds"]
