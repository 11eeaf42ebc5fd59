"""A store that is killed at any instant has what was committed, and nothing wrong."""

from __future__ import annotations

import os
import random
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from rewarm.cache.tiers.disk import sweep
from rewarm.cache.tiers.disk.records import (
    AddNode,
    AddPayload,
    RemoveNode,
    RemovePayload,
    UpdateNode,
)
from rewarm.cache.tiers.disk.store import Store
from tests.sets import SOAK

from .stores import (
    ABOUT,
    add,
    content,
    file_of,
    key_of,
    n_of,
    node_of,
    on_disk,
    opened,
    processes,
    same,
    used,
)

# Kills


@dataclass
class Told:
    """What a child said before it was killed."""

    sure: dict[int, int] = field(default_factory=dict)
    """Nodes whose commit had returned, and their n."""
    maybe: set[int] = field(default_factory=set)
    """Nodes whose removal had begun."""


def churn(folder: str, seed: int, pipe: Connection) -> None:
    """Write, change and remove, and tell of it, until killed."""
    draw = random.Random(seed)
    kept = Store.open(Path(folder), limit=1 << 30, reserve=0)
    space = kept.namespace("one", ABOUT)
    nodes, _ = kept.nodes(space)
    live = {node.id: node for node in nodes}
    numbers = iter(range(seed * 100_000, (seed + 1) * 100_000))
    while True:
        what = draw.random()
        leaves = set(live) - {node.parent for node in live.values()}
        if what < 0.6 or len(live) < 4:
            changes: list[Any] = []
            batch = {}
            for n in (next(numbers) for _ in range(draw.randrange(1, 4))):
                payload = kept.put_payload(content(n), (n, n))
                parent = draw.choice([None, *live])
                node = node_of(kept.next_id(), n, payload.id, parent)
                changes += [AddPayload(payload), AddNode(node)]
                batch[node.id] = node
            kept.commit(space, changes)
            live |= batch
            pipe.send(("added", {id: node.hits for id, node in batch.items()}))
        elif what < 0.85:
            id = draw.choice(sorted(leaves))
            pipe.send(("removing", [id]))
            rows = live.pop(id).rows
            assert rows is not None
            kept.commit(space, [RemoveNode(id), RemovePayload(rows)])
        elif what < 0.9:
            kept.put_payload(content(next(numbers)), None)  # never committed
        elif what < 0.95:
            id = draw.choice(sorted(live))
            live[id] = replace(live[id], used=float(draw.randrange(100)))
            kept.commit(space, [UpdateNode(live[id])])
        else:
            kept.checkpoint()


def run_and_kill(folder: Path, seed: int, told: Told) -> bool:
    ours, theirs = processes.Pipe(duplex=False)
    child = processes.Process(target=churn, args=(str(folder), seed, theirs))
    child.start()
    theirs.close()
    # Some are killed while they open, most while they write.
    deadline = time.monotonic() + random.Random(seed).choice([0.01, 0.1, 0.15, 0.2, 0.3])
    killed = False
    try:
        while True:
            if not killed and not ours.poll(max(0.0, deadline - time.monotonic())):
                child.kill()
                killed = True
            if not killed and time.monotonic() > deadline:
                child.kill()
                killed = True
            what, nodes = ours.recv()
            if what == "added":
                told.sure |= nodes
            else:
                told.maybe |= set(nodes)
    except EOFError:
        pass
    child.join()
    assert child.exitcode == -9, "the child failed by itself"
    return killed


def test_a_kill_at_any_instant_leaves_what_was_committed_and_nothing_wrong(folder: Path) -> None:
    told = Told()
    orphans = 0
    for seed in range(1, (2000 if SOAK else 20) + 1):
        run_and_kill(folder, seed, told)
        with opened(folder, 1 << 30) as kept:
            space = kept.namespace("one", ABOUT)
            nodes, payloads = kept.nodes(space)
            there = {node.id: node.hits for node in nodes}
            for node in nodes:
                assert node.rows is not None
                n = n_of(payloads[node.rows])
                assert (n, node.key) == (node.hits, key_of(n))
                assert same(kept.read(payloads[node.rows]), content(n))
            missing = set(told.sure) - told.maybe - set(there)
            assert not missing, f"lost though committed: {missing}"
            assert all(there[id] == n for id, n in told.sure.items() if id in there)
            found = kept.verify()
            assert (found.damaged, found.dropped) == (0, 0)
            orphans += found.orphans
            assert kept.verify().clean
            assert len(on_disk(folder)) == len(payloads)
            kept.checkpoint()
            assert kept.bytes() == used(folder)
            told.sure, told.maybe = there, set()
            if len(nodes) > 150:
                kept.clear()
                told = Told()
    assert orphans, "no kill ever hit a write: the test shows nothing"


def test_a_file_is_synced_before_it_has_its_name(
    kept: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill does not show it, a power cut does: data first, then the name, then the folder."""
    kept.put_payload(content(1), None)
    calls: list[str] = []

    def spy(name: str, say: Callable[..., str]) -> None:
        real = getattr(os, name)

        def told(*args: Any) -> Any:
            calls.append(say(*args))
            return real(*args)

        monkeypatch.setattr(os, name, told)

    spy("fsync", lambda fd: "sync " + ("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"))
    spy("rename", lambda a, b: f"rename {Path(a).suffix} {Path(b).suffix}")
    kept.put_payload(content(1), None)
    wanted = ["sync file", "rename .tmp .safetensors", "sync folder"]
    assert calls[-3:] == wanted
    with kept.guard.using() as index:
        assert index._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert index._db.execute("PRAGMA synchronous").fetchone() == (2,)


def test_leftovers_of_a_kill_go_in_the_background(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(folder) as kept:
        _, payload = add(kept, kept.namespace("one", ABOUT), 1)
        known = file_of(kept, payload)
        waiting = file_of(kept, kept.put_payload(content(2), None))
        (known.parent / ("0" * 32 + ".tmp")).write_bytes(b"half")
        (known.parent / "note.txt").write_text("not ours")
    monkeypatch.setattr(sweep, "SWEEP_AFTER", 0.0)
    with opened(folder) as kept:
        kept.sweeper.thread.join(10)
        assert on_disk(folder) == sorted([known, known.parent / "note.txt"])
        assert not waiting.exists()


def test_the_sweep_leaves_what_is_being_written(folder: Path) -> None:
    with opened(folder) as kept:
        space = kept.namespace("one", ABOUT)
        stop = threading.Event()

        def sweep() -> None:
            while not stop.is_set():
                kept.sweeper.remove(kept.sweeper.find())

        sweeper = threading.Thread(target=sweep)
        sweeper.start()
        try:
            made = [add(kept, space, n)[1] for n in range(60)]
        finally:
            stop.set()
            sweeper.join()
        for n, payload in enumerate(made):
            assert same(kept.read(payload), content(n))
