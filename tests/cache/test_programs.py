"""Random programs: prompts that extend, branch and are edited; several leases at once, advanced
chunk by chunk, finished, cancelled or forgotten; evictions to random budgets.

After every step the tree is verified and no stored byte has changed, and whatever is computed
equals a cold run: bit for bit in `exact`.
"""

from __future__ import annotations

import tempfile
from functools import cache as memoised
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rewarm.cache import Lease, PrefixCache
from rewarm.values import Boundary, Match
from tests import zoo
from tests.cache.disk.caches import disk_of
from tests.cache.inside import held_bytes
from tests.cache.lanes import handed_over
from tests.runs import Logits, Prompt, advance, cold, divergence, finish, joined, prompt
from tests.sets import SOAK

CHUNK = 16
LONGEST = 110

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "rows": ("llama", {}),
    "rows, 8 bits": ("llama", {"kv_bits": 8, "kv_group_size": 32}),
    "window that keeps": ("qwen3", {"max_kv_size": 24}),
    "window and rows": ("gpt_oss", {}),
    "blocks and rows": ("llama4", {}),
    "recurrent and rows": ("qwen3_5", {}),
    "recurrent and window": ("recurrent_gemma", {}),
    "composite": ("baichuan_m1", {}),
    "opaque": ("deepseek_v41", {}),
    "rows, rescaled": ("internlm2", {}),
    "recurrent and rows, rescaled": ("falcon_h1", {}),
}
RESCALED = {**zoo.DYNAMIC_NTK, "max_position_embeddings": 50}
# Where a ring keeps its first rows, mlx-lm's answers depend on the cuts even without a cache.
CASES = [
    (name, reuse)
    for name in MODELS
    for reuse in ("fast", "exact")
    if (name, reuse) != ("window that keeps", "fast")
]
STORED_CASES = [(name, reuse) for name, reuse in CASES if SOAK or not name.endswith("rescaled")]
"""The cases for tiers. A tier treats rescaled rows like others, so a sample leaves them out."""


def half(cases: list[tuple[str, str]], first: int) -> list[tuple[str, str]]:
    """Take every second case, so every model with one of the modes. A soak takes all."""
    return cases if SOAK else cases[first::2]


@memoised
def model_of(name: str) -> Any:
    return zoo.tiny(MODELS[name][0], **(RESCALED if name.endswith("rescaled") else {}))


class Programs(RuleBasedStateMachine):
    name: ClassVar[str]
    reuse: ClassVar[Any]
    examples = 3
    hits: ClassVar[int]
    expected: ClassVar[dict[tuple[bytes, tuple[int, ...]], Logits]]

    def __init__(self) -> None:
        super().__init__()
        self.model = model_of(self.name)
        self.cache = self.make_cache()
        self.prompts: list[Prompt] = [prompt(40, 1)]
        self.leases: list[tuple[Lease, list[Boundary]]] = []
        self.stored: dict[int, bytes] = {}
        self.alive: list[Any] = []

    def make_cache(self, **options: Any) -> PrefixCache:
        options |= MODELS[self.name][1]
        return PrefixCache(self.model, memory="64MB", reuse=self.reuse, chunk=CHUNK, **options)

    def boundaries(self, tokens: Prompt) -> list[Boundary]:
        """Put a boundary after every multiple of 23: it depends only on the tokens before it."""
        return [Boundary(int(i) + 1, "user") for i in np.flatnonzero(tokens % 23 == 0)]

    @rule(
        which=st.integers(0, 9), at=st.floats(0, 1), more=st.integers(1, 40), seed=st.integers(0, 3)
    )
    def branch(self, which: int, at: float, more: int, seed: int) -> None:
        """Cut a known prompt somewhere and go on in another way; at its end, this extends it."""
        known = self.prompts[which % len(self.prompts)]
        cut = round(at * len(known))
        self.prompts.append(joined(known[:cut], prompt(more, 10 + seed))[:LONGEST])

    @rule(which=st.integers(0, 9), at=st.floats(0, 0.99), token=st.integers(0, 511))
    def edit(self, which: int, at: float, token: int) -> None:
        edited = self.prompts[which % len(self.prompts)].copy()
        edited[int(at * len(edited))] = token
        self.prompts.append(edited)

    @precondition(lambda self: len(self.leases) < 3)
    @rule(back=st.integers(1, 4))
    def start(self, back: int) -> None:
        tokens = self.prompts[-min(back, len(self.prompts))]
        boundaries = self.boundaries(tokens)
        expected = self.cache.match(tokens, boundaries=boundaries)
        lease = self.cache.acquire(tokens, boundaries=boundaries, headroom=4)
        self.compare_match(lease.cost.match, expected)
        type(self).hits += lease.position > 0
        self.leases.append((lease, boundaries))

    @precondition(lambda self: len(self.leases) < 3)
    @rule(back=st.integers(1, 3), decode=st.integers(0, 5))
    def ask(self, back: int, decode: int) -> None:
        """A whole request, while others are under way."""
        self.start(back)
        self.finish(len(self.leases) - 1, decode)

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 2), chunks=st.integers(1, 3))
    def step(self, which: int, chunks: int) -> None:
        lease, _ = self.leases[which % len(self.leases)]
        advance(self.model, self.cache, lease, cuts=chunks)

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 2), decode=st.integers(0, 5))
    def finish(self, which: int, decode: int) -> None:
        lease, boundaries = self.leases.pop(which % len(self.leases))
        with lease:
            advance(self.model, self.cache, lease)
            tokens = lease.tokens.copy()
            got = finish(self.model, lease)
            self.compare(tokens, boundaries, got)
            answer = prompt(decode, int(tokens.sum()))
            for token in answer:
                lease.extend([token])
                lease.position = len(lease.tokens) - 1
                finish(self.model, lease)
            self.cache.commit(lease, len(lease.tokens), origin="decode", checkpoint="answer")
        self.prompts.append(joined(tokens, answer, prompt(3, decode))[:LONGEST])

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 2), forget=st.booleans())
    def cancel(self, which: int, forget: bool) -> None:
        lease, _ = self.leases.pop(which % len(self.leases))
        if not forget:
            lease.release()

    @rule(share=st.floats(0, 1))
    def evict(self, share: float) -> None:
        self.cache.memory.ledger.budget = int(self.cache.memory.ledger.held.total * share)
        self.cache.memory.evictor.make_room()

    @rule()
    def make_the_budget_large(self) -> None:
        self.cache.resize("64MB")

    @invariant()
    def the_tree_is_sound_and_no_byte_has_changed(self) -> None:
        self.cache.verify()
        for key, (holder, data) in held_bytes(self.cache).items():
            assert self.stored.setdefault(key, data) == data
            self.alive.append(holder)  # so no identity is used again

    def compare_match(self, got: Match, expected: Match) -> None:
        assert got == expected

    def compare(self, tokens: Prompt, boundaries: list[Boundary], got: Logits) -> None:
        key = (tokens.tobytes(), tuple(b.position for b in boundaries))
        if key not in self.expected:
            ran = cold(self.model, tokens, like=self.cache, boundaries=boundaries)
            self.expected[key] = ran.logits
        if self.reuse == "exact":
            assert np.array_equal(got, self.expected[key])
        else:
            assert divergence(self.expected[key], got) <= 1e-5

    def teardown(self) -> None:
        for lease, _ in self.leases:
            lease.release()
        self.leases.clear()
        self.cache.verify()
        assert self.cache.stats().leases == 0


class ProgramsOnDisk(Programs):
    """Random programs with a disk tier and restarts."""

    from_disk: ClassVar[int]
    examples = 3

    def make_cache(self, **options: Any) -> PrefixCache:
        if not hasattr(self, "folder"):
            self.folder = tempfile.TemporaryDirectory()
        return super().make_cache(disk=self.folder.name, disk_size="64MB")

    def compare_match(self, got: Match, expected: Match) -> None:
        # What is on disk may not fit into memory.
        assert got.resume <= expected.resume
        type(self).from_disk += got.tier == "disk"

    @rule()
    def flush(self) -> None:
        self.cache.flush()

    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        for lease, _ in self.leases:
            lease.release()
        self.leases.clear()
        handed_over(self.cache)
        disk = disk_of(self.cache)
        if clean:
            self.cache.close()
        else:
            with disk._changed:
                disk.trees.forget()  # what was not written yet is lost
            disk.close()
        self.cache = self.make_cache()

    def teardown(self) -> None:
        super().teardown()
        disk = disk_of(self.cache)
        self.cache.flush()
        assert not disk.writer.paused
        assert disk.store.verify().clean
        self.cache.close()
        self.folder.cleanup()


@pytest.mark.parametrize(("name", "reuse"), half(CASES, 0))
def test_random_programs_compute_what_a_cold_run_computes(name: str, reuse: str) -> None:
    machine = type(
        "Machine", (Programs,), {"name": name, "reuse": reuse, "hits": 0, "expected": {}}
    )
    run_programs(machine, ("hits", 5))


@pytest.mark.parametrize(("name", "reuse"), half(STORED_CASES, 1))
def test_random_programs_with_restarts_do_so_too(name: str, reuse: str) -> None:
    machine = type(
        "Machine",
        (ProgramsOnDisk,),
        {"name": name, "reuse": reuse, "hits": 0, "from_disk": 0, "expected": {}},
    )
    run_programs(machine, ("hits", 3), ("from_disk", 1))


def run_programs(machine: type[Programs], *counts: tuple[str, int]) -> None:
    """Run programs until they have done enough of what is counted, such as hits.

    Hypothesis draws other programs after every change of the code, so no fixed number of programs
    is sure to be enough."""
    for number in range(1 if SOAK else 5):
        run_state_machine_as_test(
            machine if SOAK else seed(number)(machine),
            settings=settings(
                max_examples=500 if SOAK else machine.examples,
                stateful_step_count=40,
                deadline=None,
                # A failure is shown as found: making it smaller takes minutes.
                phases=[Phase.generate] if not SOAK else list(Phase),
                suppress_health_check=list(HealthCheck),
            ),
        )
        if all(getattr(machine, name) >= least for name, least in counts):
            return
    raise AssertionError({name: getattr(machine, name) for name, _ in counts})
