"""Rewarm: work already done for a prompt is never done again, and a hit never changes an answer."""

from rewarm.accel import blas

# Before anything imports mlx: afterwards it is too late for another BLAS.
blas.load()

from rewarm.cache import Boundary, PrefixCache  # noqa: E402
from rewarm.errors import RewarmError  # noqa: E402
from rewarm.load import load  # noqa: E402
from rewarm.session import Session  # noqa: E402

__version__ = "0.1.0"
__all__ = ["Boundary", "PrefixCache", "RewarmError", "Session", "__version__", "load"]
