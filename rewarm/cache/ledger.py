"""The ledger: it counts what trees hold, and knows how much they may hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from .tree import NODE_BYTES, WIDTH, Checkpoint, Node, Payload

PAYLOADS = ("rows", "window", "checkpoint")
KINDS = (*PAYLOADS, "index")


@dataclass
class Held:
    """The sums over everything that trees hold."""

    kinds: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    """Bytes by kind. `index` is the tree itself, in ordinary memory."""
    buffers: int = 0
    nodes: int = 0
    checkpoints: int = 0

    @property
    def tokens(self) -> int:
        """The number of distinct tokens. A node takes fixed bytes in the index, and its key."""
        return (self.kinds["index"] - self.nodes * NODE_BYTES) // WIDTH

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


@dataclass
class Ledger:
    """Counts everything that goes into a tree and out of it."""

    budget: int
    max_buffers: int
    held: Held = field(default_factory=Held)
    noted: dict[Node, None] = field(default_factory=dict)
    """Nodes that came, went or changed since retention last looked."""

    def fits(self, nbytes: int, buffers: int = 0) -> bool:
        return (
            self.held.total + nbytes <= self.budget
            and self.held.buffers + buffers <= self.max_buffers
        )

    def count(self, node: Node, sign: int = 1) -> None:
        """Add a node, with all it holds, to the account; with a `sign` of -1, take it out."""
        self.noted[node] = None
        if node.parent is not None:  # it may have become a leaf, or be one no longer
            self.noted[node.parent] = None
        held = self.held
        held.nodes += sign
        held.checkpoints += sign * (node.checkpoint is not None)
        held.kinds["index"] += sign * node.index_bytes
        payloads = (node.rows, node.window, node.checkpoint)
        for kind, payload in zip(PAYLOADS, payloads, strict=True):
            if payload is not None:
                held.kinds[kind] += sign * payload.nbytes
                held.buffers += sign * payload.buffers

    def put_window(self, node: Node, payload: Payload | None) -> None:
        self.count(node, -1)
        node.window = payload
        self.count(node)

    def put_checkpoint(self, node: Node, checkpoint: Checkpoint | None) -> None:
        self.count(node, -1)
        node.checkpoint = checkpoint
        self.count(node)
