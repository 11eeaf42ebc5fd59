"""A process goes on from what another one left on disk when it was stopped or killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rewarm import PrefixCache, Session
from rewarm.cache.tiers.disk import files
from rewarm.cache.tiers.disk.store import Store
from rewarm.loading import load
from rewarm.session import Reply
from tests import zoo
from tests.cache.disk.caches import disk_of
from tests.runs import cold, divergence, prompt, run
from tests.sets import SOAK
from tests.tiny import tiny_tokenizer

from .caches import Watch, cache_on
from .stores import processes

# A chat, and a restart before its next turn

TURNS = 40 if SOAK else 10
CHATS = ("pocket", "nemotron_h", "gpt_oss", "llama")


def session_of(name: str, folder: Path | None) -> Session:
    model, tokenizer = load("pocket") if name == "pocket" else (zoo.tiny(name), tiny_tokenizer())
    disk = str(folder) if folder is not None else None
    kept = PrefixCache(model, memory="256MB", disk=disk, disk_size="1GB", chunk=64)
    return Session(model, tokenizer, kept)


def chat_of(turns: int) -> list[dict[str, Any]]:
    """Make a chat up to its next question. Its answers have thinking, which gets stripped."""
    messages = [{"role": "system", "content": "You keep the harbour. " * 4}]
    for n in range(turns):
        messages.append({"role": "user", "content": f"Which ship is at berth {n}?"})
        messages.append({"role": "assistant", "content": f"<think>{n}?</think>The {n * 7}."})
    return [*messages, {"role": "user", "content": f"Which ship is at berth {turns}?"}]


def talk(session: Session) -> None:
    for turn in range(TURNS):
        session.chat(chat_of(turn), max_tokens=4)


def talk_and_wait(name: str, folder: str, pipe: Connection) -> None:
    session = session_of(name, Path(folder))
    talk(session)
    pipe.send(session.cache.flush())
    time.sleep(600)


def stopped(name: str, folder: Path) -> None:
    session = session_of(name, folder)
    talk(session)
    session.cache.close()


def killed(name: str, folder: Path) -> None:
    ours, theirs = processes.Pipe(duplex=False)
    child = processes.Process(target=talk_and_wait, args=(name, str(folder), theirs))
    child.start()
    theirs.close()
    assert ours.recv(), "the disk refused"
    child.kill()
    child.join()


@cache
def without_a_restart(name: str) -> Reply:
    session = session_of(name, None)
    talk(session)
    return session.chat(chat_of(TURNS), max_tokens=12)


@pytest.mark.parametrize(
    ("name", "leave"),
    [
        *((name, killed) for name in CHATS),
        *((name, stopped) for name in (CHATS if SOAK else ("nemotron_h", "gpt_oss"))),
    ],
)
def test_the_next_turn_of_a_chat_does_not_notice_a_restart(
    name: str, leave: Callable[[str, Path], None], tmp_path: Path
) -> None:
    expected = without_a_restart(name)
    leave(name, tmp_path)
    session = session_of(name, tmp_path)
    reply = session.chat(chat_of(TURNS), max_tokens=12)
    assert expected.usage.cached_tokens > 0.9 * expected.usage.prompt_tokens
    lost = expected.usage.cached_tokens - reply.usage.cached_tokens
    assert abs(lost) <= expected.usage.cached_tokens // 100
    assert reply.tokens == expected.tokens
    assert reply.text == expected.text
    session.cache.verify()
    session.cache.close()


# A kill at any moment

LIMIT = "3MB"


def asked(number: int) -> Any:
    """Make one of many prompts that share beginnings, so that nodes split, on disk as well."""
    vocabulary = zoo.vocabulary("qwen3_5")
    shared = prompt(90, number % 5, vocabulary)[: 30 + number % 61]
    return np.concatenate([shared, prompt(10 + number % 50, number, vocabulary)])


def churn(folder: str, seed: int, pipe: Connection) -> None:
    """Compute, evict and flush until killed, and report each flush."""
    model = zoo.tiny("qwen3_5")
    kept = cache_on(Path(folder), model, memory="1MB", disk_size=LIMIT)
    pipe.send(None)
    for number in range(seed * 1000, (seed + 1) * 1000):
        run(model, kept, asked(number))
        if number % 3 == 0:
            assert kept.flush(), "the disk refused"
            pipe.send(number)


@dataclass
class Left:
    """The messages of a child up to its kill."""

    ready: bool = False
    flushed: int | None = None


def run_and_kill(folder: Path, seed: int) -> Left:
    ours, theirs = processes.Pipe(duplex=False)
    child = processes.Process(target=churn, args=(str(folder), seed, theirs))
    child.start()
    theirs.close()
    left = Left()
    draw = random.Random(seed)
    if draw.random() < 0.8:  # the others are killed while they open
        left.ready = ours.recv() is None
        for _ in range(draw.choice([0, 0, 1, 2, 4])):  # however slow the machine is
            left.flushed = ours.recv()
    ours.poll(draw.uniform(0, 0.3)) if not left.ready else time.sleep(draw.uniform(0, 0.4))
    child.kill()
    child.join()
    assert child.exitcode == -9, "the child failed by itself"
    try:
        while True:
            number = ours.recv()
            left.ready, left.flushed = True, number if number is not None else left.flushed
    except EOFError:
        return left


@pytest.mark.long
def test_a_kill_loses_nothing_flushed_and_serves_nothing_wrong(tmp_path: Path) -> None:
    model = zoo.tiny("qwen3_5")
    flushed = hits = 0
    for seed in range(2000 if SOAK else 12):
        left = run_and_kill(tmp_path, seed)
        kept = cache_on(tmp_path, model, disk_size=LIMIT)
        found = disk_of(kept).store.verify()
        assert (found.damaged, found.dropped) == (0, 0)
        numbers = {seed * 1000, seed * 1000 + 1} | {max(seed - 1, 0) * 1000}
        if left.flushed is not None:
            flushed += 1
            numbers.add(left.flushed)
            found_again = kept.match(asked(left.flushed)).resume
            assert found_again == len(asked(left.flushed)) - 1, f"round {seed}: {left}"
        for number in numbers:
            again = run(model, kept, asked(number))
            hits += again.match.tier == "disk"
            alone = cold(model, asked(number), like=kept)
            assert divergence(again.logits, alone.logits) <= 1e-5
        kept.verify()
        kept.close()
    assert flushed, "no kill ever came after a flush: the test shows nothing"
    assert hits, "nothing ever came from disk: the test shows nothing"


# The limit, in a loop of crashes

CRASH_LIMIT = 1_000_000
WRITES = 3
"""The number of files that each process completes before it dies, within a second."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_with_half_a_file() -> None:
    made = 0

    def rename(source: Path, target: Path) -> None:
        nonlocal made
        made += target.suffix == files.SUFFIX
        if made > WRITES:
            die()
        real(source, target)

    real, os.rename = os.rename, rename  # type: ignore[assignment]


def die_with_a_file_that_the_index_does_not_know() -> None:
    made = 0

    def sync(folder: Path) -> None:
        nonlocal made
        made += len(folder.name) == 2
        if made > WRITES:
            die()

    files.sync_folder = sync


def die_with_files_that_the_index_has_forgotten() -> None:
    files.remove = lambda *_: die()


def write_and_die(folder: str, seed: int, prepare: Callable[[], None], pipe: Connection) -> None:
    prepare()
    model = zoo.tiny("llama")
    kept = cache_on(Path(folder), model, memory="1MB", disk_size=str(CRASH_LIMIT))
    for number in range(seed * 100, seed * 100 + 20):
        run(model, kept, prompt(200, number, zoo.vocabulary("llama")))
        kept.flush()
        pipe.send(number)
    die()


@pytest.mark.parametrize(
    "prepare",
    [
        die_with_half_a_file,
        die_with_a_file_that_the_index_does_not_know,
        die_with_files_that_the_index_has_forgotten,
    ],
)
def test_the_limit_is_kept_in_a_loop_of_crashes(
    prepare: Callable[[], None], tmp_path: Path
) -> None:
    orphans = 0
    for seed in range(200 if SOAK else 8):
        ours, theirs = processes.Pipe(duplex=False)
        with Watch(tmp_path) as watch:
            child = processes.Process(
                target=write_and_die, args=(str(tmp_path), seed, prepare, theirs)
            )
            child.start()
            theirs.close()
            child.join()
        assert child.exitcode == -signal.SIGKILL
        assert watch.most <= CRASH_LIMIT + watch.largest  # the watch may see a renamed file twice
        held = [p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()]
        assert sum(held) <= CRASH_LIMIT, f"crash {seed}"
        ours.close()
        orphans += held_by_nobody(tmp_path)
    assert orphans >= 4, "no crash left anything: the test shows nothing"


def held_by_nobody(folder: Path) -> int:
    """Count the files that the index does not know, in a copy of the folder."""
    copy = Path(tempfile.mkdtemp())
    try:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        with Store.open(copy, limit=1 << 40, reserve=0) as kept:
            return kept.verify().orphans
    finally:
        shutil.rmtree(copy)
