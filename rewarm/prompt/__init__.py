"""Chat to tokens and boundaries; generated tokens to messages."""

from .answer import Answer, Piece
from .boundaries import MessageEnd
from .chat import ChatRenderer, Prompt
from .messages import Message
from .template import checked_options

__all__ = [
    "Answer",
    "ChatRenderer",
    "Message",
    "MessageEnd",
    "Piece",
    "Prompt",
    "checked_options",
]
