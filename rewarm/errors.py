"""What can go wrong, by name. Every message says what was wrong, the value, and the way out."""


class RewarmError(Exception):
    """The base of every error that Rewarm raises on purpose."""


class InvalidPrompt(RewarmError, ValueError):
    """A prompt that no model can run: empty, or with tokens outside the vocabulary."""


class InvalidOption(RewarmError, ValueError):
    """An option with a value that means nothing."""


class CannotLoad(RewarmError, ValueError):
    """A model that is not complete, or not what it says it is."""


class NotPrivate(RewarmError, OSError):
    """A folder or file that somebody else made, or can change."""


class UnsupportedModel(RewarmError, TypeError):
    """A model that offers no prompt cache at all."""


class ModelMismatch(RewarmError, ValueError):
    """A cache that was made for another model."""


class CacheClosed(RewarmError, RuntimeError):
    """A cache, or a lease of it, that was used after it was closed or released."""


class BrokenInvariant(RewarmError, AssertionError):
    """`cache.verify()` found the tree or its accounting inconsistent."""


class ContextExceeded(InvalidPrompt):
    """A prompt that leaves no room for an answer in the model's context."""


class QueueFull(RewarmError, RuntimeError):
    """Too many requests wait already."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds after which it may be worth to try again."""


class NotReady(RewarmError, RuntimeError):
    """The engine is loading, failing, or stopped."""


class EngineFault(RewarmError):
    """A request that failed inside the model, through no fault of whoever sent it."""
