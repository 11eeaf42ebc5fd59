"""Rewarm: work already done for a prompt is never done again, and a hit never changes an answer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rewarm.accel import before_mlx

if TYPE_CHECKING:
    from rewarm.cache import PrefixCache as PrefixCache
    from rewarm.cache import layer_kinds as layer_kinds
    from rewarm.errors import RewarmError as RewarmError
    from rewarm.loading import load as load
    from rewarm.session import Session as Session
    from rewarm.values import Boundary as Boundary

before_mlx.watch()

_HOMES = {
    "Boundary": "rewarm.values",
    "PrefixCache": "rewarm.cache",
    "RewarmError": "rewarm.errors",
    "Session": "rewarm.session",
    "layer_kinds": "rewarm.cache",
    "load": "rewarm.loading",
}

__version__ = "0.1.0"
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    # mlx-lm takes seconds to import, so a room is imported when something of it is used.
    if name not in _HOMES:
        raise AttributeError(f"module 'rewarm' has no attribute {name!r}")
    found = getattr(import_module(_HOMES[name]), name)
    globals()[name] = found
    return found
