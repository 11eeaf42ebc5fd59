"""Worth: what can be evicted, what each of it saves, and the policies that weigh it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, Protocol

from .placement import WEIGHTS
from .tree import Checkpoint, Node, Payload, Tree

What = Literal["leaf", "checkpoint", "window"]

UNMARKED_WINDOW = 0.05
"""How likely a window outside every checkpoint is asked for, against one inside."""

LEFT_BEHIND = 1 / 8
"""How likely a chat goes back to a checkpoint that it has left behind, against its last one."""

WAY_BACK = 1 / 2
"""The same where memory has room for a few chats only: their ends are soon gone then, and they go
on from what is left."""

FARTHEST = 64
"""Nodes that are looked at around one: a bound on the work, not on what is right."""


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that can be evicted: a leaf with all it holds, a checkpoint, or a window."""

    what: What
    tree: Tree
    node: Node
    saves: int
    """Tokens that a hit would have to compute again without it."""
    weight: float
    nbytes: int
    """What goes with it: for a leaf also the rows above that help nobody without it."""
    hits: int
    last_used: int
    abandoned: bool = False
    """Whether its chat has left it behind, and goes on from a later checkpoint."""

    @property
    def warm(self) -> bool:
        """Whether nobody has asked for it yet."""
        checkpoint = self.node.checkpoint
        if self.what == "leaf":
            return self.node.warm and (checkpoint is None or checkpoint.warm)
        return self.what == "checkpoint" and checkpoint is not None and checkpoint.warm

    @property
    def waits(self) -> bool:
        """Whether its chat waits for a person."""
        return self.node.waits


class Retention(Protocol):
    """A policy. What goes first has the least worth for its age, in these parts because an index
    can keep them: only time passes, and chats come and go, without a change to an item."""

    def worth(self, item: Item) -> float:
        """What it is worth the moment it is used."""

    def last_used(self, item: Item) -> float:
        """The moment from which its age is counted."""

    def age_penalty(self, item: Item) -> float:
        """How much older it counts than it is, in crowds: one crowd is as many requests as there
        are chats in memory."""

    def abandoned_discount(self, crowd: int) -> float:
        """What is left of the worth of a place that its chat has left behind, where a crowd is so
        large; 0 where it is not known."""


class WorkPerByte:
    """Work saved per byte, for how likely it is asked for again (docs/retention.md)."""

    newcomer = 2.0
    """Something that nobody came back to is likelier than others to stay so."""
    person = 4.0
    """A person takes longer than a tool."""

    def worth(self, item: Item) -> float:
        return item.saves * item.weight / max(item.nbytes, 1)

    def last_used(self, item: Item) -> float:
        return item.last_used

    def age_penalty(self, item: Item) -> float:
        return (0.0 if item.hits else self.newcomer) + (self.person if item.waits else 0.0)

    def abandoned_discount(self, crowd: int) -> float:
        return min(max(2 / crowd, LEFT_BEHIND), WAY_BACK) if crowd else LEFT_BEHIND


class LRU:
    """The baseline: least recently used first."""

    def worth(self, item: Item) -> float:
        return 1.0

    def last_used(self, item: Item) -> float:
        return item.last_used

    def age_penalty(self, item: Item) -> float:
        return 0.0

    def abandoned_discount(self, crowd: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Appraiser:
    """Finds what of a node can be evicted, and what it would cost."""

    reach: int = 0
    """Tokens before a checkpoint whose window rows it needs."""
    stateful: bool = False
    """Whether the model resumes at checkpoints only."""

    def kinds(self, node: Node) -> list[What]:
        """What of a node there is to evict, leased or not."""
        found: list[What] = []
        if not node.children:
            found.append("leaf")
        elif node.window is not None:
            found.append("window")
        if node.checkpoint is not None and node.checkpoint.nbytes:
            found.append("checkpoint")
        return found

    def leased(self, node: Node, what: What) -> bool:
        checkpoint = node.checkpoint
        held = checkpoint is not None and checkpoint.pins > 0
        return held if what == "checkpoint" else node.pins > 0 or (what == "leaf" and held)

    def item(
        self, tree: Tree, node: Node, what: What, checkpoints: dict[Node, Item] | None = None
    ) -> Item:
        """`checkpoints` keeps those that were appraised, for as long as the tree does not change:
        many windows belong to the same ones."""
        checkpoints = {} if checkpoints is None else checkpoints
        if what == "leaf":
            return self._leaf(tree, node)
        if what == "checkpoint" and node.checkpoint is not None:
            return self._checkpoint(tree, node, node.checkpoint, checkpoints)
        if what == "window" and node.window is not None:
            return self._window(tree, node, node.window, checkpoints)
        raise LookupError(f"node {node.start} to {node.end} has no {what}")

    def _leaf(self, tree: Tree, node: Node) -> Item:
        checkpoint = node.checkpoint
        nbytes = sum(p.nbytes for p in (node.rows, node.window, checkpoint) if p is not None)
        nbytes += node.index_bytes
        saves, weight = node.length, 1.0
        if checkpoint is not None:
            # Whoever goes on from here does so whatever the place was called.
            weight = max(WEIGHTS[checkpoint.kind], 1.0) * checkpoint.hint
        if self.stateful:
            # Rows behind the last checkpoint help nobody; those before this one only with it.
            saves = 0
            if checkpoint is not None:
                saves = node.end - resume_before(node)
                for above in _alone_above(node):
                    nbytes += above.rows.nbytes if above.rows is not None else 0
        return Item(
            "leaf",
            tree,
            node,
            saves=saves,
            weight=weight,
            nbytes=nbytes,
            hits=_came_back(node),
            last_used=max(node.last_used, checkpoint.last_used if checkpoint is not None else 0),
        )

    def _checkpoint(
        self, tree: Tree, node: Node, checkpoint: Checkpoint, known: dict[Node, Item]
    ) -> Item:
        """A checkpoint is worth its windows too, and nothing where one of them is gone."""
        if node in known:
            return known[node]
        windows = self._windows_of(node)
        item = known[node] = Item(
            "checkpoint",
            tree,
            node,
            saves=node.end - resume_before(node) if windows is not None else 0,
            weight=WEIGHTS[checkpoint.kind] * checkpoint.hint,
            nbytes=checkpoint.nbytes + sum(n.window.nbytes for n in windows or () if n.window),
            hits=checkpoint.hits,
            last_used=checkpoint.last_used,
            abandoned=_left_behind(node),
        )
        return item

    def _window(self, tree: Tree, node: Node, window: Payload, known: dict[Node, Item]) -> Item:
        """A window is worth the best checkpoint that needs it; outside all of them, little."""
        best: Item | None = None
        todo, looked = [node], 0
        while todo and looked < FARTHEST:
            each = todo.pop()
            looked += 1
            if each.checkpoint is not None and each.end - self.reach < node.end:
                item = self._checkpoint(tree, each, each.checkpoint, known)
                best = item if best is None else max(best, item, key=_needed)
            if each.end - self.reach < node.end:
                todo.extend(each.children.values())
        if best is not None:
            return replace(best, what="window", node=node)
        return Item(
            "window",
            tree,
            node,
            saves=min(self.reach, node.end),
            weight=UNMARKED_WINDOW,
            nbytes=window.nbytes,
            hits=node.hits,
            last_used=node.last_used,
        )

    def _windows_of(self, node: Node) -> list[Node] | None:
        """The nodes whose windows the end of a node needs; None where one is missing."""
        found: list[Node] = []
        if self.reach:
            first = max(node.end - self.reach, 0)
            for above in node.path():
                if above.end <= first:
                    break
                if above.window is None or above.window.start > max(above.start, first):
                    return None
                found.append(above)
        return found


def _needed(item: Item) -> float:
    return item.weight * item.saves * (LEFT_BEHIND if item.abandoned else 1)


def checkpoint_above(node: Node) -> Node | None:
    above = node.parent
    while above is not None and above.checkpoint is None:
        above = above.parent
    return above


def checkpoints_below(node: Node) -> list[Node]:
    """The nearest ones."""
    found: list[Node] = []
    todo = list(node.children.values())
    while todo:
        each = todo.pop()
        if each.checkpoint is not None:
            found.append(each)
        else:
            todo.extend(each.children.values())
    return found


def resume_before(node: Node) -> int:
    """The last checkpoint above a node."""
    above = checkpoint_above(node)
    return above.end if above is not None else 0


def _alone_above(node: Node) -> list[Node]:
    """The nodes above that lead nowhere else and have no checkpoint."""
    found: list[Node] = []
    above = node.parent
    while above is not None and above.parent is not None and len(found) < FARTHEST:
        if above.checkpoint is not None or above.only is None:
            break
        found.append(above)
        above = above.parent
    return found


def leaves_below(node: Node) -> list[Node]:
    """The leaves that a node leads to, where it leads to one or two: another way on, or one less,
    changes what goes with them, and whether they came back."""
    found = []
    for each in [node] if node.only is not None else _prompts_below(node):
        for _ in range(FARTHEST):
            prompts = _prompts_below(each)
            following = each.only or (prompts[0] if len(prompts) == 1 else None)
            if following is None:
                break
            each = following
        if not each.children:
            found.append(each)
    return found


def left_behind_leaf(leaf: Node) -> bool:
    """Whether it is the end of a turn, or an answer, that its own chat went on without."""
    above = leaf.parent
    return (
        above is not None
        and above.parent is not None
        and len(above.children) == 2
        and leaf.last_used < max(c.last_used for c in above.children.values())
    )


def _prompts_below(node: Node) -> list[Node]:
    """The ways on that prompts took, two of them at most: a system prompt may have thousands. An
    answer is none: a template may render it anew."""
    return list(islice((c for c in node.children.values() if c.origin == "prefill"), 2))


def _came_back(node: Node) -> int:
    """How often the chat that a leaf belongs to came back, as far as the tree tells.

    A chat that goes on adds to its own path. Where several went on from the same place it is a
    system prompt, or a fork, and says nothing of each."""
    for _ in range(FARTHEST):
        if node.hits or (node.checkpoint is not None and node.checkpoint.hits):
            return max(node.hits, 1)
        above = node.parent
        if above is None or above.parent is None:
            return 0
        if above.only is None and len(_prompts_below(above)) > 1:
            return 0
        node = above
    return 0


def _left_behind(node: Node) -> bool:
    """Whether a chat went on from here to a later checkpoint, and nobody else did."""
    for _ in range(FARTHEST):
        prompts = _prompts_below(node)
        if len(prompts) != 1:
            return False
        node = prompts[0]
        if node.checkpoint is not None:
            return True
    return False
