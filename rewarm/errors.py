"""What can go wrong, by name. Every message says what was wrong, the value, and the way out."""


class RewarmError(Exception):
    """The base of every error that Rewarm raises on purpose."""


class InvalidPrompt(RewarmError, ValueError):
    """A prompt that no model can run: empty, or with tokens outside the vocabulary."""


class InvalidOption(RewarmError, ValueError):
    """An option with a value that means nothing."""


class UnsupportedModel(RewarmError, TypeError):
    """A model that offers no prompt cache at all."""


class ModelMismatch(RewarmError, ValueError):
    """A cache that was made for another model."""


class CacheClosed(RewarmError, RuntimeError):
    """A cache, or a lease of it, that was used after it was closed or released."""


class BrokenInvariant(RewarmError, AssertionError):
    """`cache.verify()` found the tree or its accounting inconsistent."""
