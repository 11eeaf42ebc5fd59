"""All trees of one cache, by namespace."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from rewarm.values import Namespace

from .tree import ChunkTree, Tree

MOST_EMPTY = 16
"""Trees among which empty ones are not looked for."""


class Forest(dict[Namespace, Tree]):
    def __init__(self, *, chunked: bool) -> None:
        super().__init__()
        self._kind = ChunkTree if chunked else Tree
        self._most = MOST_EMPTY

    def of(self, namespace: Namespace, used: Collection[Tree] = ()) -> Tree:
        """The tree of a namespace. Empty ones are dropped now and then, unless they are `used`: or
        salts would pile up."""
        if namespace not in self and len(self) >= self._most:
            ids = {id(tree) for tree in used}
            for known, tree in list(self.items()):
                if not tree.root.children and id(tree) not in ids:
                    del self[known]
            self._most = 2 * len(self) + MOST_EMPTY
        return self.setdefault(namespace, self._kind(namespace))

    def known(self, namespace: Namespace) -> Tree:
        """The tree of a namespace; an empty one that is not kept, where there is none."""
        return self.get(namespace) or self._kind(namespace)

    def rename(self, base: str) -> None:
        """Give all of them another identity of what computes."""
        trees = list(self.values())
        self.clear()
        for tree in trees:
            tree.namespace = replace(tree.namespace, base=base)
            self[tree.namespace] = tree

    def take_apart(self) -> None:
        """Free what all trees hold at once."""
        for tree in self.values():
            tree.clear()
        self.clear()
