"""The policy alone: what is planned for thousands of simulated requests, without a model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from rewarm.cache.tree import encode
from rewarm.engine.scheduler import AGEING, Job, Plan, Scheduler

CHUNK = 512


def job(number: int, length: int, *, head: int = 0, group: int = 0, **options: object) -> Job:
    """A prompt of which the first `head` tokens are those of its group."""
    tokens = np.arange(length, dtype=np.int32) + 100_000 * (number + 1000)
    tokens[:head] = np.arange(head) + 100_000 * group
    return Job(number, encode(tokens), length - 1, **options)  # type: ignore[arg-type]


@dataclass
class World:
    """Carries plans out on nothing: positions move, chunk by chunk."""

    scheduler: Scheduler
    answers: dict[int, int] = field(default_factory=dict)
    """Tokens still to decode."""
    computed: dict[int, int] = field(default_factory=dict)
    """How far each group's own tokens are known."""
    heads: dict[int, tuple[int, int]] = field(default_factory=dict)
    work: int = 0
    finished: list[int] = field(default_factory=list)
    """Jobs in the order in which their prefill ended."""

    def add(self, new: Job, head: int = 0, group: int = 0, answer: int = 8) -> None:
        self.heads[new.id] = (group, head)
        new.known = min(self.computed.get(group, 0), head)
        self.answers[new.id] = answer
        self.scheduler.add(new)

    def turn(self) -> Plan:
        scheduler = self.scheduler
        plan = scheduler.plan()
        for each in plan.admit:
            scheduler.moved(each, scheduler.jobs[each].stop, "decoding")
        if plan.decode:
            for each in [j.id for j in scheduler.jobs.values() if j.stage == "decoding"]:
                self.answers[each] -= 1
                if not self.answers[each]:
                    scheduler.remove(each)
        if plan.pause is not None:
            paused = scheduler.jobs[plan.pause]
            scheduler.back(paused.id, paused.data, paused.stop, paused.position)
        if plan.prefill is not None:
            self._prefill(scheduler.jobs[plan.prefill])
        return plan

    def _prefill(self, chosen: Job) -> None:
        scheduler = self.scheduler
        group, head = self.heads[chosen.id]
        if chosen.stage == "waiting":
            known = max(chosen.known, min(self.computed.get(group, 0), head))
            scheduler.moved(chosen.id, known, "prefilling")
        ahead = [m for m in chosen.marks if m > chosen.position]
        position = min([chosen.position + CHUNK, chosen.stop, *ahead])
        self.work += position - chosen.position
        scheduler.moved(chosen.id, position, "prefilling")
        self.computed[group] = max(self.computed.get(group, 0), min(head, position))
        if position == chosen.stop:
            if chosen.warm:
                scheduler.remove(chosen.id)
            else:
                scheduler.moved(chosen.id, position, "ready")
                self.finished.append(chosen.id)


def test_a_decode_step_is_planned_in_every_turn_of_a_long_prefill() -> None:
    world = World(Scheduler(max_batch=8, room=1 << 60))
    world.add(job(1, 10), answer=100)
    while world.scheduler.jobs[1].stage != "decoding":
        world.turn()
    world.add(job(2, 20_000))
    while world.scheduler.jobs[2].stage == "waiting":
        world.turn()
    for _ in range(20):
        plan = world.turn()
        assert plan.decode
        assert plan.prefill == 2


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    world = World(Scheduler(max_batch=8, room=1 << 60))
    world.add(job(1, 20_000))
    for _ in range(3):
        assert world.turn().prefill == 1
    world.add(job(2, 300))
    assert world.turn().prefill == 2
    assert world.turn().admit == (2,)


def test_an_old_long_prompt_goes_before_new_short_ones() -> None:
    world = World(Scheduler(max_batch=8, room=1 << 60))
    world.add(job(1, 2000))
    for number in range(2, 400):
        world.add(job(number, 400), answer=1)
        world.turn()
        if 1 in world.finished:
            break
    assert sum(400 for n in world.finished if n != 1) <= AGEING * 2000 + 400


def test_what_two_prompts_share_is_computed_once_and_marked() -> None:
    world = World(Scheduler(max_batch=8, room=1 << 60))
    world.add(job(1, 3000, head=2000), head=2000)
    world.turn()
    world.add(job(2, 2200, head=1700), head=1700)
    follower, leader = world.scheduler.jobs[2], world.scheduler.jobs[1]
    assert follower.leader is leader
    assert 1700 in leader.marks
    while follower.stage == "waiting":
        assert world.turn().prefill in (1, 2)
    assert follower.position >= 1700
    while world.scheduler.jobs:
        world.turn()
    assert world.work == 2999 + 2199 - 1700


def test_a_leader_that_goes_away_leaves_its_followers_to_each_other() -> None:
    world = World(Scheduler(max_batch=8, room=1 << 60))
    for number in (1, 2, 3):
        world.add(job(number, 3000, head=2000), head=2000)
    world.turn()
    world.scheduler.remove(1)
    second, third = world.scheduler.jobs[2], world.scheduler.jobs[3]
    assert second.leader is None
    assert third.leader is second
    assert second.known == CHUNK


def test_another_salt_shares_no_wait() -> None:
    scheduler = Scheduler(max_batch=8, room=1 << 60)
    scheduler.add(job(1, 3000, head=2000, salt="a"))
    scheduler.add(job(2, 3000, head=2000, salt="b"))
    assert scheduler.jobs[2].leader is None


def test_memory_is_reserved_and_a_large_request_is_not_passed_over_for_ever() -> None:
    world = World(Scheduler(max_batch=8, room=100))
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
    world = World(Scheduler(max_batch=8, room=1 << 60))
    world.add(job(1, 5000, warm=True))
    assert world.turn().prefill == 1
    world.add(job(2, 600))
    plan = world.turn()
    assert (plan.pause, plan.prefill) == (1, 2)
    while world.scheduler.jobs.get(2):
        assert world.turn().prefill != 1
    assert world.turn().prefill == 1


def test_ten_thousand_requests_all_finish_in_bounded_time() -> None:
    """Bursts over shared prompts, long and short, some cancelled, at about full load."""
    rng = random.Random(7)
    scheduler = Scheduler(max_batch=16, room=200_000)
    world = World(scheduler)
    arrived: dict[int, int] = {}
    own: dict[int, int] = {}
    cancelled: set[int] = set()
    number = 0
    stalled = longest = 0
    while number < 10_000 or scheduler.jobs:
        if number < 10_000 and rng.random() < 0.27:
            for _ in range(rng.choice([1, 1, 1, 2, 8])):
                number += 1
                group, head = rng.randrange(40), rng.choice([0, 0, 200, 1500, 4000])
                length = head + rng.choice([20, 60, 150, 400, 900, 6000 if number % 9 == 0 else 90])
                new = job(number, length, head=head, group=group, nbytes=length)
                world.add(new, head=head, group=group, answer=rng.randrange(1, 12))
                arrived[number], own[number] = new.arrived, new.stop - new.known
        if scheduler.jobs and rng.random() < 0.01:
            gone = rng.choice(list(scheduler.jobs))
            cancelled.add(gone)
            scheduler.remove(gone)
        decoding = any(j.stage == "decoding" for j in scheduler.jobs.values())
        longest = max(longest, sum(j.stage == "waiting" for j in scheduler.jobs.values()))
        plan = world.turn()
        assert plan.decode or not decoding
        stalled = 0 if plan else stalled + 1
        assert not (stalled and scheduler.jobs), "there is work, and nothing is planned"
        running = [j for j in scheduler.jobs.values() if j.stage != "waiting"]
        assert sum(j.nbytes for j in running) <= 200_000 or len(running) == 1
    assert set(world.finished) | cancelled == set(range(1, number + 1))
    assert longest > 100, "a queue that never grows shows nothing"
    # Whoever came so much later has not been prefilled first.
    place = {n: i for i, n in enumerate(world.finished)}
    late = np.array([arrived[n] for n in world.finished])
    for each, i in place.items():
        limit = arrived[each] + AGEING * own[each]
        assert not (late[:i] > limit).any(), f"{each} was passed over"
