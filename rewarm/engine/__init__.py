"""The one thread that runs the model: requests in, tokens out."""

from .engine import Engine, EngineOptions, EngineStats, Loaded
from .request import Alternative, Finish, Report, Request, Sampled, Sampling, Sink

__all__ = [
    "Alternative",
    "Engine",
    "EngineOptions",
    "EngineStats",
    "Finish",
    "Loaded",
    "Report",
    "Request",
    "Sampled",
    "Sampling",
    "Sink",
]
