"""Check every invariant of the trees and their accounting, and compare caches by a hash."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

from rewarm.errors import BrokenInvariant

from ..layout import Layout
from ..ledger import Ledger
from ..memory import Memory
from ..tree import WIDTH, Node, Tree


def verify(memory: Memory, layout: Layout) -> None:
    expected = Counter(node for pin in memory.pins.live for node in pin.node.path())
    checkpoints = Counter(id(c) for pin in memory.pins.live for c in pin.checkpoints)
    ledger = memory.ledger
    account = Ledger(ledger.budget, ledger.max_buffers)
    for tree in memory.trees.values():
        _check(tree.root.parent is None and not tree.root.key, "the root is not empty", tree.root)
        for node in [tree.root, *tree.nodes()]:
            _check_children(tree, node)
        for node in tree.nodes():
            account.count(node)
            _check_node(tree, node, layout)
            _check(node.pins == expected.pop(node, 0), f"pinned {node.pins} times", node)
            if node.checkpoint is not None:
                pinned = checkpoints.pop(id(node.checkpoint), 0)
                _check(node.checkpoint.pins == pinned, "checkpoint pins", node)
    if expected or checkpoints:
        raise BrokenInvariant("a lease pins what is not in the tree")
    if account.held != ledger.held:
        raise BrokenInvariant(f"held is {account.held}, the account says {ledger.held}")
    appraiser = memory.evictor.appraiser
    items = ((node, what) for node in memory.nodes() for what in appraiser.kinds(node))
    # Only what is leased may exceed a lowered budget.
    if ledger.held.total > ledger.budget and not all(appraiser.is_leased(*item) for item in items):
        raise BrokenInvariant(f"{ledger.held.total} bytes held, over {ledger.budget}")
    if ledger.held.buffers > ledger.max_buffers:
        raise BrokenInvariant(f"{ledger.held.buffers} buffers held, over {ledger.max_buffers}")
    memory.evictor.verify(memory.trees.values())


def _check_children(tree: Tree, node: Node) -> None:
    only = next(iter(node.children.values())) if len(node.children) == 1 else None
    _check(node.only is only, "another only child", node)
    for edge, child in node.children.items():
        _check(child.parent is node, "a child with another parent", child)
        _check(child.start == node.end, f"starts after a node that ends at {node.end}", child)
        key = child.key[:WIDTH] if tree.splits else child.key
        _check(edge == key, "filed under another key", child)


def _check_node(tree: Tree, node: Node, layout: Layout) -> None:
    _check(len(node.key) > 0 and len(node.key) % WIDTH == 0, "an empty or broken key", node)
    _check((node.rows is not None) == layout.has_rows, "rows missing, or too many", node)
    if node.rows is not None:
        span = (node.rows.start, node.rows.stop)
        _check(span == (node.start, node.end), f"holds the rows {span}", node)
    if node.window is not None:
        _check(layout.has_window, "a window without a window layer", node)
        span = (node.window.start, node.window.stop)
        _check(node.start <= span[0] < span[1] == node.end, f"holds the window {span}", node)
    if node.checkpoint is not None:
        has_state = node.checkpoint.state is not None
        _check(has_state == layout.has_state, "a checkpoint of another form", node)
    if not tree.splits:
        _check(node.origin == "prefill", "a decoded span in exact", node)


def _check(holds: bool, what: str, node: Node) -> None:
    if not holds:
        raise BrokenInvariant(f"node {node.start} to {node.end}: {what}")


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
