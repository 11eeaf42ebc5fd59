"""Chat to tokens and boundaries; generated tokens to messages."""

from .messages import Message
from .parse.answer import Answer, Piece
from .render.boundaries import MessageEnd
from .render.renderer import ChatRenderer, Prompt
from .render.template import checked_options

__all__ = [
    "Answer",
    "ChatRenderer",
    "Message",
    "MessageEnd",
    "Piece",
    "Prompt",
    "checked_options",
]
