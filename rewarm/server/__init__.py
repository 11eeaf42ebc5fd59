"""The HTTP server: OpenAI's and Anthropic's APIs over one engine."""

from .app import create_app
from .options import ServerOptions
from .serve import serve

__all__ = ["ServerOptions", "create_app", "serve"]
