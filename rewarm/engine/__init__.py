"""The one thread that runs the model: requests in, tokens out."""

from .core import Core, EngineParts
from .engine import Engine
from .loop import EngineStats
from .messages import PromptPath
from .request import Request, Sink

__all__ = [
    "Core",
    "Engine",
    "EngineParts",
    "EngineStats",
    "PromptPath",
    "Request",
    "Sink",
]
