"""The engine runs the model on one thread: it takes requests and gives tokens."""

from .core import Core, EngineParts
from .engine import Engine
from .loop import EngineStats
from .messages import PromptPath
from .request import Request, Sink

__all__ = ["Core", "Engine", "EngineParts", "EngineStats", "PromptPath", "Request", "Sink"]
