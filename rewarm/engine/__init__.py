"""The one thread that runs the model: requests in, tokens out."""

from .engine import Engine, EngineStats, Loaded
from .request import Request, Sink

__all__ = [
    "Engine",
    "EngineStats",
    "Loaded",
    "Request",
    "Sink",
]
