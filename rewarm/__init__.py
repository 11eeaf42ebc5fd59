"""Rewarm: work already done for a prompt is never done again, and a hit never changes an answer."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rewarm.accel import blas, compiled

if TYPE_CHECKING:
    from rewarm.cache import PrefixCache, layer_kinds
    from rewarm.errors import RewarmError
    from rewarm.loading import load
    from rewarm.session import Session
    from rewarm.values import Boundary

# Before anything imports mlx: afterwards it is too late for another BLAS.
blas.load()
# Before MLX compiles anything, or loads what it, or somebody else, has compiled before.
compiled.prepare()
# MLX's CUDA build plans for every shape, and raises once a process has met some hundred of them,
# however useful its plans are. A server meets a new length with nearly every prompt.
os.environ.setdefault("MLX_ENABLE_CACHE_THRASHING_CHECK", "0")

__version__ = "0.1.0"
__all__ = [
    "Boundary",
    "PrefixCache",
    "RewarmError",
    "Session",
    "__version__",
    "layer_kinds",
    "load",
]

_HOMES = {
    "Boundary": "rewarm.cache",
    "PrefixCache": "rewarm.cache",
    "RewarmError": "rewarm.errors",
    "Session": "rewarm.session",
    "layer_kinds": "rewarm.cache",
    "load": "rewarm.loading",
}


def __getattr__(name: str) -> Any:
    """mlx-lm takes seconds to import: only when something of it is used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'rewarm' has no attribute {name!r}")
    found = getattr(import_module(_HOMES[name]), name)
    globals()[name] = found
    return found
