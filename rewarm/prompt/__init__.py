"""Chat to tokens and boundaries."""

from .chat import ChatRenderer, Message, Prompt

__all__ = ["ChatRenderer", "Message", "Prompt"]
