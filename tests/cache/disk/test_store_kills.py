"""A store that is killed at any instant has what was committed, and nothing wrong."""

from __future__ import annotations

import os
import random
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from rewarm.cache.tiers.disk.index import new_id
from rewarm.cache.tiers.disk.store import Store
from tests.sets import SOAK

from .stores import (
    ONE,
    add,
    commit,
    content,
    file_of,
    key_of,
    n_of,
    node_of,
    on_disk,
    opened,
    processes,
    read,
    same,
    used,
    write,
)

# Kills


@dataclass
class Told:
    """The messages of a child up to its kill."""

    sure: dict[int, int] = field(default_factory=dict)
    """Nodes whose commit had returned, each with its `n`."""
    maybe: set[int] = field(default_factory=set)
    """Nodes whose removal had begun."""


def churn(folder: str, seed: int, pipe: Connection) -> None:
    """Write, change and remove until killed, and report each step."""
    draw = random.Random(seed)
    kept = Store.open(Path(folder), limit=1 << 30, reserve=0)
    kept.sweep()
    live = {node.id: node for node in kept.index.load(ONE).nodes}
    numbers = iter(range(seed * 100_000, (seed + 1) * 100_000))
    while True:
        what = draw.random()
        leaves = set(live) - {node.parent for node in live.values()}
        if what < 0.6 or len(live) < 4:
            batch = {}
            made = [write(kept, next(numbers)) for _ in range(draw.randrange(1, 4))]
            for file in made:
                id = new_id()
                batch[id] = node_of(id, n_of(file), file.id, draw.choice([None, *live, *batch]))
            commit(kept, *batch.values(), files=made)
            live |= batch
            pipe.send(("added", {id: node.hits for id, node in batch.items()}))
        elif what < 0.85:
            id = draw.choice(sorted(leaves))
            pipe.send(("removing", [id]))
            commit(kept, gone_nodes=[id], gone_files={live.pop(id).files[0]: 0})
        elif what < 0.9:
            write(kept, next(numbers))  # never committed
        elif what < 0.95:
            id = draw.choice(sorted(live))
            live[id] = live[id]._replace(used=float(draw.randrange(100)))
            commit(kept, live[id])
        else:
            kept.index.checkpoint()


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
            orphans += kept.verify(repair=False).orphans
            kept.sweep()
            stored = kept.index.load(ONE)
            there = {node.id: node.hits for node in stored.nodes}
            for node in stored.nodes:
                (file,) = (stored.files[id] for id in node.files)
                n = n_of(file)
                assert (n, node.key) == (node.hits, key_of(n))
                assert same(read(kept, file), content(n))
            missing = set(told.sure) - told.maybe - set(there)
            assert not missing, f"lost though committed: {missing}"
            assert all(there[id] == n for id, n in told.sure.items() if id in there)
            assert kept.verify().clean
            assert len(on_disk(folder)) == len(stored.files)
            kept.index.checkpoint()
            assert kept.bytes() == used(folder)
            told.sure, told.maybe = there, set()
            if len(stored.nodes) > 150:
                kept.clear()
                told = Told()
    assert orphans, "no kill ever hit a write: the test shows nothing"


def test_a_file_is_synced_before_it_has_its_name(
    kept: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order is data, name, folder. A kill would not show another order; a power cut would."""
    write(kept, 1)
    calls: list[str] = []

    def spy(name: str, say: Callable[..., str]) -> None:
        real = getattr(os, name)

        def told(*args: Any) -> Any:
            calls.append(say(*args))
            return real(*args)

        monkeypatch.setattr(os, name, told)

    spy("fsync", lambda fd: "sync " + ("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"))
    spy("rename", lambda a, b: f"rename {Path(a).suffix} {Path(b).suffix}")
    write(kept, 2)
    wanted = ["sync file", "rename .tmp .safetensors", "sync folder"]
    assert calls[-3:] == wanted
    with kept.index.using() as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("PRAGMA synchronous").fetchone() == (2,)


def test_the_sweep_leaves_what_is_being_written(folder: Path) -> None:
    with opened(folder) as kept:
        stop = threading.Event()

        def sweep() -> None:
            while not stop.is_set():
                kept.sweep()

        sweeper = threading.Thread(target=sweep)
        sweeper.start()
        try:
            made = [add(kept, n)[1] for n in range(60)]
        finally:
            stop.set()
            sweeper.join()
        for n, file in enumerate(made):
            assert same(read(kept, file), content(n))


def test_a_sweep_takes_the_leftovers_of_a_kill_and_nothing_else(folder: Path) -> None:
    with opened(folder) as kept:
        known = file_of(kept, add(kept, 1)[1])
        waiting = file_of(kept, write(kept, 2))
        for name in ("0" * 32 + ".safetensors", "0" * 16 + ".tmp", "note.txt"):
            (known.parent / name).write_bytes(b"half")
    with opened(folder) as kept:
        kept.sweep()
        assert on_disk(folder) == sorted([known, known.parent / "note.txt"])
        assert not waiting.exists()
        assert kept.bytes() == used(folder) - len("half")


def test_a_sweep_counts_what_the_index_has_wrong(folder: Path) -> None:
    with opened(folder) as kept:
        _, file = add(kept, 1)
        commit(kept, files=[file._replace(nbytes=5)])
    with opened(folder) as kept:
        kept.sweep()
        assert kept.bytes() == used(folder)
