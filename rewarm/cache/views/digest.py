"""One hash of what a cache knows, to compare caches that had the same calls."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from ..tree import Node, Tree


def digest(trees: Iterable[Tree]) -> str:
    """Hash every path, with its origins and cuts, and the kinds and places of checkpoints.

    No byte of a payload counts, nor the order in which nodes came. What tells processes and
    ranks apart is left out: the same calls give the same digest in each.
    """
    found = []
    for tree in trees:
        if tree.root.children:
            name = tree.namespace
            found.append((name.salt, name.adapter, name.kv, _digest_of(tree)))
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()


def _digest_of(tree: Tree) -> str:
    found = hashlib.sha256()
    todo: list[Node] = [tree.root]
    while todo:
        node = todo.pop()
        kind = node.checkpoint.kind if node.checkpoint is not None else ""
        # Nodes come in the order of the tree, so the start of one tells its parent.
        found.update(f"{node.start} {len(node.key)} {node.origin} {kind} ".encode() + node.key)
        todo += [node.children[edge] for edge in sorted(node.children)]
    return found.hexdigest()
