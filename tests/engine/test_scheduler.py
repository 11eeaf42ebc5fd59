"""The scheduler plans thousands of simulated requests, without a model."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest

from rewarm.cache.tree import encode
from rewarm.engine.scheduler import (
    AGEING,
    MOST_FETCHING,
    MOST_WARM,
    Job,
    Piece,
    Plan,
    Preparation,
    Scheduler,
)
from rewarm.values import Cut

CHUNK = 512


def job(number: int, length: int, *, head: int = 0, group: int = 0, **options: object) -> Job:
    """Make a prompt that shares its first `head` tokens with its group."""
    tokens = np.arange(length, dtype=np.int32) + 100_000 * (number + 1000)
    tokens[:head] = np.arange(head) + 100_000 * group
    return Job(number, encode(tokens), length - 1, **options)  # type: ignore[arg-type]


@dataclass
class World:
    """It carries out plans without a model, and only moves positions, chunk by chunk."""

    scheduler: Scheduler[Job]
    answers: dict[int, int] = field(default_factory=dict)
    """The number of tokens that each job has still to decode."""
    computed: dict[int, int] = field(default_factory=dict)
    """The number of tokens of each group that are known."""
    heads: dict[int, tuple[int, int]] = field(default_factory=dict)
    work: int = 0
    finished: list[int] = field(default_factory=list)
    """Jobs in the order in which their prefill ended."""
    fetches: dict[int, int] = field(default_factory=dict)
    """The number of turns until lower tiers answer for a job."""
    prepared: list[Preparation] = field(default_factory=list)
    """The preparations before the last plan."""

    def add(self, new: Job, head: int = 0, group: int = 0, answer: int = 8) -> None:
        self.heads[new.id] = (group, head)
        new.known = min(self.computed.get(group, 0), head)
        self.answers[new.id] = answer
        self.scheduler.add(new)

    def turn(self) -> Plan:
        scheduler = self.scheduler
        self.prepared = []
        for each in [n for n, left in self.fetches.items() if not left]:
            del self.fetches[each]
            job = scheduler.jobs.get(each)
            if job is not None:
                scheduler.fetched(job, job.stop // 2 if each % 3 else 0)
        self.fetches = {each: left - 1 for each, left in self.fetches.items()}
        while (first := scheduler.preparation()) is not None:
            self.prepared.append(first)
            self._prepare(first)
        plan = scheduler.plan()
        for each in plan.admit:
            scheduler.admitted(scheduler.jobs[each])
        for each in plan.store:
            scheduler.jobs[each].unstored = 0
        if plan.decode:
            for job in [j for j in scheduler.jobs.values() if j.stage == "decoding"]:
                job.unstored += 1
                self.answers[job.id] -= 1
                if not self.answers[job.id]:
                    scheduler.remove(job)
        for piece in plan.prefill:
            self._prefill(piece)
        return plan

    def _prepare(self, first: Preparation) -> None:
        scheduler = self.scheduler
        job = scheduler.jobs[first.id]
        if first.what == "forget":
            scheduler.remove(job)
        elif first.what == "pause":
            scheduler.paused(job)
        elif first.what == "fetch":
            scheduler.fetching(job)
            self.fetches[job.id] = job.id % 4
        elif first.what == "mark":
            scheduler.marked(job, cuts(job.position, job.stop, job.marks))
        else:
            group, head = self.heads[job.id]
            known = max(job.known, min(self.computed.get(group, 0), head))
            scheduler.started(job, known, cuts(known, job.stop))

    def _prefill(self, piece: Piece) -> None:
        job = self.scheduler.jobs[piece.id]
        assert piece.start == job.position
        group, head = self.heads[piece.id]
        self.work += piece.size
        self.scheduler.computed(piece)
        self.computed[group] = max(self.computed.get(group, 0), min(head, piece.stop))
        if piece.last:
            self.finished.append(piece.id)
            if job.warm:
                self.scheduler.remove(job)


def cuts(start: int, stop: int, marks: Iterable[int] = ()) -> list[Cut]:
    """Cut at every chunk, and where another request waits."""
    stops = {*range(start + CHUNK, stop, CHUNK), stop, *(m for m in marks if start < m < stop)}
    return [Cut(each, None) for each in sorted(stops) if each > start]


def scheduler(max_batch: int = 8, memory: int = 1 << 60, **options: int) -> Scheduler[Job]:
    return Scheduler(max_batch, memory, CHUNK, **options)


def prefills(plan: Plan) -> set[int]:
    """Return the ids of the requests that a turn prefills."""
    return {piece.id for piece in plan.prefill}


def test_a_decode_step_is_planned_in_every_turn_of_a_long_prefill() -> None:
    world = World(scheduler())
    world.add(job(1, 10), answer=100)
    while world.scheduler.jobs[1].stage != "decoding":
        world.turn()
    world.add(job(2, 20_000))
    while world.scheduler.jobs[2].stage == "waiting":
        world.turn()
    for _ in range(20):
        plan = world.turn()
        assert plan.decode
        assert prefills(plan) == {2}


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    world = World(scheduler())
    world.add(job(1, 20_000))
    for _ in range(3):
        assert prefills(world.turn()) == {1}
    world.add(job(2, 300))
    assert world.turn().prefill[0].id == 2
    assert world.turn().admit == (2,)


def test_short_prompts_share_the_time_of_one_chunk_and_all_of_it_is_in_the_plan() -> None:
    world = World(scheduler())
    for number in range(1, 9):
        world.add(job(number, 101))
    plan = world.turn()
    assert [(p.id, p.stop, p.last) for p in plan.prefill] == [(n, 100, True) for n in range(1, 6)]
    plan = world.turn()
    assert plan.admit == (1, 2, 3, 4, 5)
    assert [p.id for p in plan.prefill] == [6, 7, 8]


def test_a_turn_ends_where_somebody_who_waited_can_go_on() -> None:
    world = World(scheduler())
    world.add(job(1, 400, head=200), head=200)
    world.add(job(2, 220, head=200), head=200)
    assert [(p.id, p.stop) for p in world.turn().prefill] == [(1, 200)]
    assert [(p.id, p.stop) for p in world.turn().prefill] == [(2, 219), (1, 399)]


def test_a_last_piece_that_is_short_goes_through_the_last_token() -> None:
    for one_pass, stop in ((0, 20), (20, 20), (21, 21)):
        policy = scheduler()
        policy.add(job(1, 21, one_pass=one_pass))
        policy.preparation()
        policy.started(policy.jobs[1], 0, cuts(0, 20))
        assert policy.plan().prefill == (Piece(1, 0, stop, None, True),)


def test_an_answer_is_stored_before_a_step_overwrites_its_window() -> None:
    world = World(scheduler(window=8))
    world.add(job(1, 20), answer=30)
    world.turn()
    stored = [bool(world.turn().store) for _ in range(29)]
    assert stored == [i in (7, 14, 21, 28) for i in range(29)]


def test_beyond_a_number_the_oldest_warm_ahead_is_forgotten() -> None:
    world = World(scheduler())
    for number in range(1, MOST_WARM + 4):
        world.add(job(number, 5000, warm=True))
    world.turn()
    assert [p for p in world.prepared if p.what == "forget"] == [
        Preparation("forget", number) for number in (1, 2, 3)
    ]


def test_an_old_long_prompt_goes_before_new_short_ones() -> None:
    world = World(scheduler())
    world.add(job(1, 2000))
    for number in range(2, 400):
        world.add(job(number, 400), answer=1)
        world.turn()
        if 1 in world.finished:
            break
    assert sum(400 for n in world.finished if n != 1) <= AGEING * 2000 + 400


def test_what_two_prompts_share_is_computed_once_and_marked() -> None:
    world = World(scheduler())
    world.add(job(1, 3000, head=2000), head=2000)
    world.turn()
    world.add(job(2, 2200, head=1700), head=1700)
    follower, leader = world.scheduler.jobs[2], world.scheduler.jobs[1]
    assert follower.leader is leader
    assert 1700 in leader.marks
    while follower.stage == "waiting":
        assert prefills(world.turn()) <= {1, 2}
    assert follower.position >= 1700
    while world.scheduler.jobs:
        world.turn()
    assert world.work == 2999 + 2199 - 1700


def test_a_leader_that_goes_away_leaves_its_followers_to_each_other() -> None:
    world = World(scheduler())
    for number in (1, 2, 3):
        world.add(job(number, 3000, head=2000), head=2000)
    world.turn()
    world.scheduler.remove(world.scheduler.jobs[1])
    second, third = world.scheduler.jobs[2], world.scheduler.jobs[3]
    assert second.leader is None
    assert third.leader is second
    assert second.known == CHUNK


def test_another_salt_shares_no_wait() -> None:
    policy = scheduler()
    policy.add(job(1, 3000, head=2000, salt="a"))
    policy.add(job(2, 3000, head=2000, salt="b"))
    assert policy.jobs[2].leader is None


def test_memory_is_reserved_and_a_large_request_is_not_passed_over_for_ever() -> None:
    world = World(scheduler(memory=100))
    world.add(job(1, 600, nbytes=60), answer=30)
    world.turn()
    world.add(job(2, 600, nbytes=90), answer=5)
    for number in range(3, 60):
        world.add(job(number, 400, nbytes=30), answer=5)
        world.turn()
        running = [j for j in world.scheduler.jobs.values() if j.stage != "waiting"]
        assert sum(j.nbytes for j in running) <= 100
    while world.scheduler.jobs:
        world.turn()
    assert world.finished.index(2) < 20


def test_warm_ahead_runs_when_nothing_else_does_and_yields_within_a_chunk() -> None:
    world = World(scheduler())
    world.add(job(1, 5000, warm=True))
    assert prefills(world.turn()) == {1}
    world.add(job(2, 600))
    plan = world.turn()
    assert Preparation("pause", 1) in world.prepared
    assert 1 not in prefills(plan)
    while world.scheduler.jobs.get(2):
        assert 1 not in prefills(world.turn())
    assert prefills(world.turn()) == {1}


@pytest.mark.parametrize(("every", "slack"), [(0, 0), (5, 16 * CHUNK)])
def test_ten_thousand_requests_all_finish_in_bounded_time(every: int, slack: int) -> None:
    """Bursts over shared prompts, long and short, some cancelled, at about full load. With `every`,
    one in so many lies below memory: others go on for a few turns while it is fetched."""
    rng = random.Random(7)
    policy = scheduler(max_batch=16, memory=200_000)
    world = World(policy)
    arrived: dict[int, int] = {}
    own: dict[int, int] = {}
    cancelled: set[int] = set()
    number = 0
    stalled = longest = most_fetching = 0
    while number < 10_000 or policy.jobs:
        if number < 10_000 and rng.random() < 0.29:
            for _ in range(rng.choice([1, 1, 1, 2, 8])):
                number += 1
                group, head = rng.randrange(40), rng.choice([0, 0, 200, 1500, 4000])
                length = head + rng.choice([20, 60, 150, 400, 900, 6000 if number % 9 == 0 else 90])
                below = bool(every) and number % every == 0
                new = job(number, length, head=head, group=group, nbytes=length, fetch=below)
                world.add(new, head=head, group=group, answer=rng.randrange(1, 12))
                arrived[number], own[number] = new.arrived, new.stop - new.known
        if policy.jobs and rng.random() < 0.01:
            gone = rng.choice(list(policy.jobs))
            cancelled.add(gone)
            policy.remove(policy.jobs[gone])
        decoding = any(j.stage == "decoding" for j in policy.jobs.values())
        longest = max(longest, sum(j.stage == "waiting" for j in policy.jobs.values()))
        plan = world.turn()
        assert plan.decode or not decoding
        fetching = sum(j.stage == "fetching" or j.fetched for j in policy.jobs.values())
        assert fetching <= MOST_FETCHING
        most_fetching = max(most_fetching, fetching)
        stalled = 0 if plan.decode or plan.prefill or fetching else stalled + 1
        assert not (stalled and policy.jobs), "there is work, and nothing is planned"
        running = [j for j in policy.jobs.values() if j.has_started]
        assert sum(j.nbytes for j in running) <= 200_000 or len(running) == 1
    assert set(world.finished) | cancelled == set(range(1, number + 1))
    assert longest > 100, "a queue that never grows shows nothing"
    assert most_fetching == (MOST_FETCHING if every else 0)
    # No request that came so much later was prefilled first.
    place = {n: i for i, n in enumerate(world.finished)}
    late = np.array([arrived[n] for n in world.finished])
    for each, i in place.items():
        limit = arrived[each] + AGEING * own[each] + slack
        assert not (late[:i] > limit).any(), f"{each} was passed over"
