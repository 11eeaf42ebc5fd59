"""The errors that Rewarm raises. Each message says what was wrong, with the value, and what to do.

RewarmError
├─ InvalidPrompt (ValueError)
│  └─ ContextExceeded
├─ InvalidOption (ValueError)
├─ CannotLoad (ValueError)
├─ NotPrivate (OSError)
├─ UnsupportedModel (TypeError)
├─ ModelMismatch (ValueError)
├─ CacheClosed (RuntimeError)
├─ BrokenInvariant (AssertionError)
├─ QueueFull (RuntimeError)
├─ NotReady (RuntimeError)
└─ EngineFault
"""


class RewarmError(Exception):
    """The base of every error that Rewarm raises on purpose."""


class InvalidPrompt(RewarmError, ValueError):
    """A prompt cannot be run: it is empty, say, or has tokens outside the vocabulary."""


class InvalidOption(RewarmError, ValueError):
    """An option has a value that cannot be used."""


class CannotLoad(RewarmError, ValueError):
    """The files of a model are not complete, or do not belong together."""


class NotPrivate(RewarmError, OSError):
    """Another user made a folder or file, or can change it."""


class UnsupportedModel(RewarmError, TypeError):
    """A model offers no prompt cache at all."""


class ModelMismatch(RewarmError, ValueError):
    """A cache was made for another model."""


class CacheClosed(RewarmError, RuntimeError):
    """A cache was used after it was closed, or a lease after it was released."""


class BrokenInvariant(RewarmError, AssertionError):
    """`cache.verify()` found the tree, or its count of bytes, inconsistent."""


class ContextExceeded(InvalidPrompt):
    """A prompt leaves no room for an answer in the model's context."""


class QueueFull(RewarmError, RuntimeError):
    """Too many requests wait already."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds after which the client may try again."""


class NotReady(RewarmError, RuntimeError):
    """The engine is loading, failing, or stopped."""


class EngineFault(RewarmError):
    """The model failed on a request that was valid."""
