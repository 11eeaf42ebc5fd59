"""The errors of a store on disk.

StoreError            something that the store could not do
├── StoreHeld         another process has the folder
├── StoreUnusable     no store can be kept in the folder
└── StoreBroken       the index turned out to be damaged: a restart is needed
Damaged               a file or an index that is not what was written
"""

from __future__ import annotations

from rewarm.errors import RewarmError


class StoreError(RewarmError, OSError):
    """Something that the store could not do."""


class StoreHeld(StoreError):
    """Another process has the folder open."""


class StoreUnusable(StoreError):
    """No store can be kept in the folder."""


class StoreBroken(StoreError):
    """The index turned out to be damaged while in use: nothing is read or written any more."""


class Damaged(Exception):
    """A file or an index is not what was written."""
