"""The one thread that runs the model: requests in, tokens out."""

from .core import Core, Loaded
from .engine import Engine
from .loop import EngineStats
from .request import Request, Sink

__all__ = [
    "Core",
    "Engine",
    "EngineStats",
    "Loaded",
    "Request",
    "Sink",
]
