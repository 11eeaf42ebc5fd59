"""The radix tree: which token spans are known, and what is stored for each.

A node owns a span of tokens. The span is kept as the bytes of little-endian int32 tokens: comparing
bytes at an offset is one `memcmp` without a copy, which is what makes a match over thousands of
short nodes fast. Positions are counted in tokens everywhere but inside this file.

Two kinds of tree have these nodes. `Tree` is a radix tree: spans split wherever prompts part. In a
`ChunkTree`, for `exact`, each node is a whole prefill chunk. A chunk computed with another length
has other bits, so it is another node, and the nodes of a path end at the prompt's own cuts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from rewarm.values import Kind, Namespace, Origin, Tokens

NOWHERE = Namespace("")

WIDTH = 4
"""Bytes of a token in a key."""

NODE_BYTES = 544
"""The bytes of a node in the index beside its key: the object, its dictionary, its numbers, its
checkpoint."""


class State(Protocol):
    """The payload of one position. It cannot be cut."""

    @property
    def nbytes(self) -> int: ...
    @property
    def buffers(self) -> int: ...


class Payload(State, Protocol):
    """The payload of the tokens `start` to `stop` of a path."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    def split(self, at: int) -> tuple[Payload | None, Payload | None]: ...


@dataclass(slots=True)
class Checkpoint:
    """The state at a node's end. `state` is None where the rows alone hold everything."""

    kind: Kind
    state: State | None
    last_used: int
    hits: int = 0
    pins: int = 0
    hint: float = 1.0
    """The caller's hint: how likely this is needed again, relative to others of its kind."""
    warm: bool = False
    """Warm-ahead took it, and no request has asked for it yet. It means the same in a node."""

    def touch(self, now: int) -> None:
        """Note a hit."""
        self.hits += 1
        self.last_used = now
        self.warm = False

    @property
    def nbytes(self) -> int:
        return self.state.nbytes if self.state is not None else 0

    @property
    def buffers(self) -> int:
        return self.state.buffers if self.state is not None else 0


@dataclass(slots=True, eq=False)
class Node:
    """A span of tokens. `rows` covers all of it; `window` may cover only its end."""

    parent: Node | None
    start: int
    key: bytes
    origin: Origin = "prefill"
    children: dict[bytes, Node] = field(default_factory=dict)
    only: Node | None = None
    """The child, where there is just one: long paths are walked without a dictionary."""
    rows: Payload | None = None
    window: Payload | None = None
    checkpoint: Checkpoint | None = None
    pins: int = 0
    hits: int = 0
    last_used: int = 0
    warm: bool = False
    waits: bool = False
    """The chat that used it last waits for a person."""
    number: int = field(default_factory=itertools.count(1).__next__)
    """The node's name in views: no other node of this process has it."""
    digest: int | None = None
    """A hash of the path to its end, once something asked for it. A split does not move the end."""

    def touch(self, now: int) -> None:
        """Note a hit."""
        self.hits += 1
        self.last_used = now
        self.warm = self.waits = False

    @property
    def state(self) -> State | None:
        """The state at its end, where a checkpoint holds one."""
        return self.checkpoint.state if self.checkpoint is not None else None

    @property
    def nbytes(self) -> int:
        """The bytes of its payloads."""
        payloads = (self.rows, self.window, self.checkpoint)
        return sum(payload.nbytes for payload in payloads if payload is not None)

    @property
    def length(self) -> int:
        return len(self.key) // WIDTH

    @property
    def end(self) -> int:
        return self.start + len(self.key) // WIDTH

    @property
    def index_bytes(self) -> int:
        return NODE_BYTES + len(self.key)

    def tokens(self) -> Tokens:
        return np.frombuffer(self.key, dtype="<i4")

    def path(self) -> Iterator[Node]:
        """This node and its ancestors, deepest first, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def subtree(self) -> list[Node]:
        """This node and all below it, parents before children."""
        found = [self]
        for node in found:
            found += node.children.values()
        return found

    def windows(self, first: int, stop: int) -> list[Node] | None:
        """Return the nodes of this path that have the window rows `first` to `stop`, or None where
        a row is missing. `stop` lies in this node, or at its end."""
        found: list[Node] = []
        for node in self.path():
            if stop <= first:
                break
            stop = max(node.start, first)
            if node.window is None or node.window.start > stop:
                return None
            found.append(node)
        return found

    def checkpoint_above(self) -> Node | None:
        above = self.parent
        while above is not None and above.checkpoint is None:
            above = above.parent
        return above

    def checkpoints_below(self) -> list[Node]:
        """Return the nearest node with a checkpoint on each way down."""
        found: list[Node] = []
        todo = list(self.children.values())
        while todo:
            each = todo.pop()
            if each.checkpoint is not None:
                found.append(each)
            else:
                todo.extend(each.children.values())
        return found


class Root(Node):
    """The empty span that every path of a tree begins with."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(parent=None, start=0, key=b"")
        self.tree = tree
        # It makes the hashes of two namespaces differ for the same tokens.
        self.digest = hash(tree.namespace) & (1 << 62) - 1


class Walk(NamedTuple):
    """A prompt's way through a tree: the deepest node reached, wholly or in part, and how many
    tokens agree."""

    node: Node
    shared: int


def encode(tokens: Tokens) -> bytes:
    return tokens.astype("<i4", copy=False).tobytes()


def agreement(a: bytes, b: bytes) -> int:
    """Count the leading tokens that two keys share."""
    n = min(len(a), len(b)) // WIDTH
    different = np.flatnonzero(np.frombuffer(a, "<i4", n) != np.frombuffer(b, "<i4", n))
    return int(different[0]) if different.size else n


def tree_of(node: Node) -> Tree:
    """Return the tree that a node is in. It takes a walk to the root."""
    while node.parent is not None:
        node = node.parent
    if not isinstance(node, Root):
        raise LookupError(f"the node {node.start} to {node.end} is in no tree any more")
    return node.tree


class Tree:
    """The radix tree of one namespace. No two children of a node begin with the same token."""

    splits = True

    def __init__(self, namespace: Namespace = NOWHERE) -> None:
        self.namespace = namespace
        self.root = Root(self)

    def walk(self, data: bytes, cuts: Sequence[int] = ()) -> Walk:
        # The hot loop of every match: names are looked up once, before it.
        node: Node = self.root
        at, size, width, goes_on_with = 0, len(data), WIDTH, data.startswith
        while at < size:
            child = node.only
            if child is not None and goes_on_with(child.key, at):
                node = child
                at += len(child.key)
                continue
            child = node.children.get(data[at : at + width])
            if child is None:
                break
            node, key = child, child.key
            if not goes_on_with(key, at):
                return Walk(node, at // width + agreement(key, data[at : at + len(key)]))
            at += len(key)
        return Walk(node, at // width)

    def child(self, node: Node, data: bytes, at: int, stop: int) -> Node | None:
        """Return the child that goes on with the tokens of `data` from `at` to `stop`."""
        return node.children.get(self._edge(data[at * WIDTH : stop * WIDTH]))

    def add(self, parent: Node, key: bytes, origin: Origin) -> Node:
        node = Node(parent=parent, start=parent.end, key=key, origin=origin)
        parent.children[self._edge(key)] = node
        parent.only = node if len(parent.children) == 1 else None
        return node

    def split(self, node: Node, at: int) -> Node:
        """Cut a node in two at token `at`. Returns the new upper half.

        The lower half stays the same object: a reference to a node means its end.
        """
        if node.parent is None or not node.start < at < node.end:
            raise ValueError(f"cannot split the span {node.start} to {node.end} at {at}")
        # Copies come first: where one fails, the tree is as it was.
        upper_rows, lower_rows = node.rows.split(at) if node.rows else (None, None)
        upper_window, lower_window = node.window.split(at) if node.window else (None, None)
        cut = (at - node.start) * WIDTH
        upper = self.add(node.parent, node.key[:cut], node.origin)
        upper.rows, upper.window = upper_rows, upper_window
        upper.pins, upper.hits, upper.last_used = node.pins, node.hits, node.last_used
        upper.warm, upper.waits = node.warm, node.waits
        node.parent, node.start, node.key = upper, at, node.key[cut:]
        node.rows, node.window = lower_rows, lower_window
        upper.children[self._edge(node.key)] = node
        upper.only = node
        return upper

    def remove(self, leaf: Node) -> None:
        above = leaf.parent
        if leaf.children or above is None:
            raise ValueError("only a leaf can be removed")
        del above.children[self._edge(leaf.key)]
        above.only = next(iter(above.children.values())) if len(above.children) == 1 else None
        leaf.parent = None
        # A reference that is left somewhere must not keep the payloads in memory.
        leaf.rows = leaf.window = leaf.checkpoint = None

    def nodes(self) -> list[Node]:
        """List every node but the root, parents before children."""
        return self.root.subtree()[1:]

    def clear(self) -> None:
        """Take every node apart.

        Nodes and their parents refer to each other: without this, a tree that is dropped keeps its
        arrays until the next garbage collection.
        """
        for node in self.root.subtree():
            node.rows = node.window = node.checkpoint = node.parent = node.only = None
            node.children.clear()

    def _edge(self, key: bytes) -> bytes:
        return key[:WIDTH]


class ChunkTree(Tree):
    """The tree of `exact`: a node is one whole prefill chunk, and never splits."""

    splits = False

    def walk(self, data: bytes, cuts: Sequence[int] = ()) -> Walk:
        node: Node = self.root
        for stop in cuts:
            child = self.child(node, data, node.end, stop)
            if child is None:
                break
            node = child
        rest = data[node.end * WIDTH :]
        # Beyond the last whole chunk nothing can be reused. `shared` still counts the tokens that
        # agree.
        alike = (key for key in node.children if key[:WIDTH] == rest[:WIDTH])
        beyond = max((agreement(key, rest) for key in alike), default=0)
        return Walk(node, node.end + beyond)

    def _edge(self, key: bytes) -> bytes:
        return key
