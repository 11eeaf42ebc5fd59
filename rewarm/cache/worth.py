"""Worth: the items that can be evicted, what each saves, and the policies that rank them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Literal, Protocol

from .placement import WEIGHTS
from .tree import Node

What = Literal["leaf", "checkpoint", "window"]

UNMARKED_WINDOW = 0.05
"""The likelihood that a window outside all checkpoints is asked for, relative to one inside."""

LEFT_BEHIND = 1 / 8
"""The likelihood that a chat goes back to a checkpoint it left behind, relative to its last one."""

WAY_BACK = 1 / 2
"""The same where memory has room for few chats only: their ends are soon evicted, and they go on
from what is left."""

FARTHEST = 64
"""The number of nodes that are looked at around one, to bound the work."""


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that can be evicted: a leaf with all it holds, a checkpoint, or a window."""

    what: What
    node: Node
    saves: int
    """Tokens that a hit would have to compute again without it."""
    weight: float
    nbytes: int
    """The bytes that go with it: for a leaf also the rows above that are of no use without it."""
    hits: int
    last_used: int
    abandoned: bool = False
    """True where its chat has left it behind, and goes on from a later checkpoint."""

    @property
    def is_warm(self) -> bool:
        """True where warm-ahead made it, and no request has asked for it yet."""
        checkpoint = self.node.checkpoint
        if self.what == "leaf":
            return self.node.warm and (checkpoint is None or checkpoint.warm)
        return self.what == "checkpoint" and checkpoint is not None and checkpoint.warm


class Retention(Protocol):
    """A policy, to be subclassed. The item with the least worth for its age is evicted first.

    An index sorts items by these figures. So they must not change while the item stays the same:
    they depend on nothing but the arguments.
    """

    def worth(self, item: Item) -> float:
        """Return the worth of an item at the moment it is used."""
        return 1.0

    def last_used(self, item: Item) -> float:
        """Return the moment from which its age is counted."""
        return item.last_used

    def age_penalty(self, item: Item) -> float:
        """Return what is added to its age, in crowds: one crowd is as many requests as there are
        chats in memory."""
        return 0.0

    def abandoned_discount(self, crowd: int) -> float:
        """Return the factor on the worth of what its chat has left behind. `crowd` is 0 where it
        is not known."""
        return 1.0


class LRU(Retention):
    """The baseline: least recently used first."""


class WorkPerByte(Retention):
    """Ranks by work saved per byte, times the likelihood of another request (docs/retention.md)."""

    newcomer = 2.0
    """The penalty of an item that no request has come back to: it is likelier to stay so."""
    person = 4.0
    """The penalty of a chat that waits for a person, who takes longer than a tool."""

    def worth(self, item: Item) -> float:
        return item.saves * item.weight / max(item.nbytes, 1)

    def age_penalty(self, item: Item) -> float:
        return (0.0 if item.hits else self.newcomer) + (self.person if item.node.waits else 0.0)

    def abandoned_discount(self, crowd: int) -> float:
        return min(max(2 / crowd, LEFT_BEHIND), WAY_BACK) if crowd else LEFT_BEHIND


@dataclass(frozen=True)
class Appraiser:
    """Finds the items of a node that can be evicted, and appraises them."""

    reach: int = 0
    """The number of tokens before a checkpoint whose window rows it needs."""
    stateful: bool = False
    """True where the model resumes at checkpoints only."""

    def kinds(self, node: Node) -> list[What]:
        """List the kinds of items of a node that can be evicted, leased or not. A node that has
        gone has none."""
        found: list[What] = []
        if node.parent is None:
            return found
        if not node.children:
            found.append("leaf")
        elif node.window is not None:
            found.append("window")
        if node.checkpoint is not None and node.checkpoint.nbytes:
            found.append("checkpoint")
        return found

    def is_leased(self, node: Node, what: What) -> bool:
        checkpoint = node.checkpoint
        pinned = checkpoint is not None and checkpoint.pins > 0
        return pinned if what == "checkpoint" else node.pins > 0 or (what == "leaf" and pinned)

    def item(self, node: Node, what: What, checkpoints: dict[Node, Item] | None = None) -> Item:
        """Appraise one of a node's `kinds`. `checkpoints` keeps those already appraised while the
        tree does not change: many windows belong to the same ones."""
        known = {} if checkpoints is None else checkpoints
        if what == "leaf":
            return self._leaf(node)
        return self._checkpoint(node, known) if what == "checkpoint" else self._window(node, known)

    def _leaf(self, node: Node) -> Item:
        checkpoint = node.checkpoint
        nbytes = node.nbytes + node.index_bytes
        saves, weight, last_used = node.length, 1.0, node.last_used
        if checkpoint is not None:
            # A chat goes on from here, whatever kind of checkpoint this is.
            weight = max(WEIGHTS[checkpoint.kind], 1.0) * checkpoint.hint
            last_used = max(last_used, checkpoint.last_used)
        if self.stateful:
            # Rows after the last checkpoint are of no use, and those before this one only with it.
            saves = 0
            if checkpoint is not None:
                saves = node.end - resume_before(node)
                nbytes += sum(n.rows.nbytes for n in _alone_above(node) if n.rows is not None)
        return Item("leaf", node, saves, weight, nbytes, _came_back(node), last_used)

    def _checkpoint(self, node: Node, known: dict[Node, Item]) -> Item:
        """Appraise a checkpoint with its windows. It is worth nothing where one is gone."""
        checkpoint = node.checkpoint
        assert checkpoint is not None
        if node not in known:
            windows = node.windows(max(node.end - self.reach, 0), node.end)
            nbytes = [n.window.nbytes for n in windows or () if n.window is not None]
            known[node] = Item(
                "checkpoint",
                node,
                saves=node.end - resume_before(node) if windows is not None else 0,
                weight=WEIGHTS[checkpoint.kind] * checkpoint.hint,
                nbytes=checkpoint.nbytes + sum(nbytes),
                hits=checkpoint.hits,
                last_used=checkpoint.last_used,
                abandoned=_is_left_behind(node),
            )
        return known[node]

    def _window(self, node: Node, known: dict[Node, Item]) -> Item:
        """Appraise a window like the best checkpoint that needs it. Without one, it weighs less."""
        needing: list[Item] = []
        todo, looked = [node], 0
        while todo and looked < FARTHEST:
            each = todo.pop()
            looked += 1
            if each.end - self.reach < node.end:
                if each.checkpoint is not None:
                    needing.append(self._checkpoint(each, known))
                todo.extend(each.children.values())
        if needing:
            return replace(max(needing, key=_saved_by), what="window", node=node)
        nbytes = node.window.nbytes if node.window is not None else 0
        saves = min(self.reach, node.end)
        return Item("window", node, saves, UNMARKED_WINDOW, nbytes, node.hits, node.last_used)


def _saved_by(item: Item) -> float:
    return item.weight * item.saves * (LEFT_BEHIND if item.abandoned else 1)


def resume_before(node: Node) -> int:
    """Return the position of the last checkpoint above a node."""
    above = node.checkpoint_above()
    return above.end if above is not None else 0


def _alone_above(node: Node) -> list[Node]:
    """Return the nodes right above that have no other child and no checkpoint."""
    above = islice(node.path(), 1, FARTHEST + 1)
    return list(takewhile(lambda n: n.checkpoint is None and n.only is not None, above))


def leaves_below(node: Node) -> list[Node]:
    """Return the leaves that a node leads to, where it leads to one or two.

    A new branch above a leaf, or one less, changes what goes with the leaf, and whether its chat
    came back."""
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


def is_left_behind_leaf(leaf: Node) -> bool:
    """True for the end of a turn, or an answer, that the next prompt of its chat leaves out."""
    above = leaf.parent
    if above is None or above.parent is None or len(above.children) != 2:
        return False
    return leaf.last_used < max(c.last_used for c in above.children.values())


def _prompts_below(node: Node) -> list[Node]:
    """Return the children that prompts made, two at most: a system prompt may have thousands. An
    answer does not count: a template may render it in other tokens."""
    return list(islice((c for c in node.children.values() if c.origin == "prefill"), 2))


def _came_back(node: Node) -> int:
    """Return the number of times that a leaf's chat came back, as far as the tree tells.

    A chat that goes on adds to its own path. Where several chats went on from a node, that is a
    system prompt or a fork, and its hits say nothing about each chat."""
    for each in islice(node.path(), FARTHEST):
        if each is not node and each.only is None and len(_prompts_below(each)) > 1:
            return 0
        if each.hits or (each.checkpoint is not None and each.checkpoint.hits):
            return max(each.hits, 1)
    return 0


def _is_left_behind(node: Node) -> bool:
    """True where one chat, and no other, went on from here to a later checkpoint."""
    for _ in range(FARTHEST):
        prompts = _prompts_below(node)
        if len(prompts) != 1:
            return False
        node = prompts[0]
        if node.checkpoint is not None:
            return True
    return False
