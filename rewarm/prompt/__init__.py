"""Chat to tokens and boundaries; generated text to messages."""

from .answer import Answer
from .chat import ChatRenderer, Message, Prompt

__all__ = ["Answer", "ChatRenderer", "Message", "Prompt"]
