"""Bind a cache to its model, and notice when the model changes."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rewarm.errors import ModelMismatch
from rewarm.values import Namespace

from .identity import Description, Watch, execution, keeps_memos, run_once
from .layer_kinds import leaves
from .model import MakeCaches

_unknown = itertools.count(1)


class Binding:
    """Gives the namespace that a model's state is kept in, and notices when the model changes.

    Without an identity, the namespace is valid only in this process and for the model as it is.
    """

    def __init__(
        self, model: Any, blank: MakeCaches, *, kv: str, adapter: str, exact: bool, chunk: int
    ) -> None:
        self.model = model
        self.blank = blank
        self._exact, self._chunk = exact, chunk
        # A folder may be moved, so its path is no name. The model's identity covers its content.
        named = "" if Path(adapter).is_dir() else adapter
        self.namespace = Namespace("", named, kv, _form_of(blank()))
        self.start_anew()

    def start_anew(self) -> None:
        """Take a new namespace: nothing is shared with what was computed before."""
        self.namespace = replace(self.namespace, base=f"unknown {next(_unknown)}")
        self._watch = Watch(self.model)

    def is_same(self) -> bool:
        """True where the model's modules still hold the same objects.

        Some models replace values whenever they run. Such a change does not count.
        """
        changes = set(self._watch.changes())
        if not changes:
            return True
        besides = self._watch.besides
        before = Watch(self.model, besides)
        run_once(self.model, self.blank)
        written = set(before.changes())
        if changes <= written:
            self._watch = Watch(self.model, besides | written)
        return changes <= written

    def describe(self) -> Description:
        """Describe the model as it is now. Call it on a thread that may run the model."""
        if keeps_memos(self.model):
            run_once(self.model, self.blank)
        self._watch = Watch(self.model, self._watch.besides)
        return Description.of(self.model)

    def identified(self, description: Description) -> Namespace:
        """Return the namespace of a described model. This is slow, because it reads all weights."""
        base = description.identity(execution(exact=self._exact, chunk=self._chunk))
        return replace(self.namespace, base=base)

    def check(self, other: Any) -> None:
        """Raise unless another model object computes the same."""
        if keeps_memos(other):
            run_once(other, self.blank)
        mine, theirs = (self.identified(d) for d in (self.describe(), Description.of(other)))
        if mine != theirs:
            raise ModelMismatch(
                f"this cache was made for another model ({type(self.model).__module__}): "
                "make one for this model with PrefixCache(model)"
            )


def _form_of(caches: Sequence[Any]) -> str:
    """Digest the classes of a model's caches, and their settings."""
    plain = (bool, int, float, str, type(None))
    described = [
        f"{type(c).__qualname__} "
        + repr(
            sorted((k, v) for k, v in getattr(c, "__dict__", {}).items() if isinstance(v, plain))
        )
        for c in leaves(list(caches))
    ]
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]
