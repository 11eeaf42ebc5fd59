"""Who computes next. Pure: what waits and how far it is goes in, a plan comes out.

No model, no clock and no thread here, so the policy is tested with thousands of simulated requests.
Time is counted in prompt tokens prefilled by anyone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from rewarm.cache.tree import WIDTH, agreement

AGEING = 4
"""A prompt is overtaken by about this many times its own work, and no more."""

WORTH_WAITING = 16
"""Tokens that another request must be about to compute for it to be waited for."""

Stage = Literal["waiting", "prefilling", "ready", "decoding"]


@dataclass(eq=False)
class Job:
    """One sequence, as far as its turn is concerned."""

    id: int
    data: bytes
    """The prompt, encoded as the tree does: for finding what two prompts share."""
    stop: int
    """Tokens to prefill; the last one of a prompt is left to its first decode step."""
    known: int = 0
    """What the tree could give at last look."""
    salt: str | None = None
    nbytes: int = 0
    """What it will take to run, reserved when its prefill starts."""
    warm: bool = False
    """Warm-ahead: run when there is nothing else."""
    stage: Stage = "waiting"
    position: int = 0
    arrived: int = 0
    leader: Job | None = None
    """The earlier job that is about to compute what this one needs."""
    until: int = 0
    """Where the leader must be for this one to go on."""
    marks: set[int] = field(default_factory=set)
    """Positions that others wait for: checkpoints are taken there."""
    agrees: dict[int, int] = field(default_factory=dict)
    """Tokens shared with earlier jobs, by their id."""

    @property
    def at(self) -> int:
        return self.position if self.stage != "waiting" else self.known


@dataclass(frozen=True)
class Plan:
    """One turn. Carried out in the order of the fields."""

    admit: tuple[int, ...] = ()
    """Prefilled sequences that enter the batch."""
    decode: bool = False
    pause: int | None = None
    """Warm-ahead that must let a request go first."""
    prefill: int | None = None
    """Start it where it has not begun, then compute one chunk."""

    def __bool__(self) -> bool:
        return bool(self.admit or self.decode or self.pause is not None) or self.prefill is not None


class Scheduler:
    """Keeps the queue. The caller reports what happened; `plan` says what to do next."""

    def __init__(self, max_batch: int, room: int) -> None:
        self.max_batch = max_batch
        self.room = room
        """Bytes that running requests may take together."""
        self.jobs: dict[int, Job] = {}
        self.clock = 0

    def add(self, job: Job) -> None:
        job.arrived = self.clock
        if not job.warm:
            least = slice(job.known * WIDTH, (job.known + WORTH_WAITING) * WIDTH)
            for other in self._ahead_of(job):
                if other.data[least] != job.data[least]:
                    continue
                shared = min(agreement(other.data, job.data), job.stop, other.stop)
                if shared - job.known < WORTH_WAITING:
                    continue
                if other.warm:
                    job.marks.add(shared)  # it has to let this one pass, and goes on from there
                else:
                    job.agrees[other.id] = shared
        self.jobs[job.id] = job
        self._follow(job)

    def remove(self, job_id: int) -> None:
        """Finished, cancelled or failed: whoever waited for it looks for another leader."""
        gone = self.jobs.pop(job_id, None)
        if gone is None:
            return
        for job in list(self.jobs.values()):
            job.agrees.pop(job_id, None)
            if job.leader is gone:
                job.known = max(job.known, min(job.until, gone.at))
                self._follow(job)

    def moved(self, job_id: int, position: int, stage: Stage) -> None:
        """A job's prefill stands at `position` now."""
        job = self.jobs[job_id]
        if stage == "prefilling" and job.stage == "prefilling":
            self.clock += position - job.position
        job.position, job.stage = position, stage
        job.leader = None
        for follower in self.jobs.values():
            if follower.leader is job and (position >= follower.until or stage != "prefilling"):
                follower.known = max(follower.known, min(follower.until, position))
                self._follow(follower)

    def back(self, job_id: int, data: bytes, stop: int, known: int) -> None:
        """A job that ran has to start over, with what it generated as part of its prompt."""
        job = self.jobs[job_id]
        job.data, job.stop, job.known = data, stop, known
        job.stage, job.position = "waiting", 0

    def plan(self) -> Plan:
        decoding = sum(j.stage == "decoding" for j in self.jobs.values())
        ready = [j.id for j in self.jobs.values() if j.stage == "ready"]
        admit = tuple(ready[: self.max_batch - decoding])
        decode = bool(decoding or admit)
        chosen = self._next_prefill()
        warm = next((j for j in self.jobs.values() if j.warm and j.stage == "prefilling"), None)
        if chosen is not None or decode:
            return Plan(
                admit,
                decode,
                pause=warm.id if warm is not None else None,
                prefill=chosen.id if chosen is not None else None,
            )
        if warm is None:
            warm = next((j for j in self.jobs.values() if j.warm), None)
        return Plan(prefill=warm.id if warm is not None else None)

    def _next_prefill(self) -> Job | None:
        """Shortest remaining first, with ageing; a leader counts for those who wait for it."""
        urgency: dict[int, float] = {}
        queue = [
            j for j in self.jobs.values() if not j.warm and j.stage in ("waiting", "prefilling")
        ]
        # Leaders arrived before their followers: going backwards, a chain is summed up once.
        for job in reversed(queue):
            begin = job.until if job.leader is not None else job.at
            own = job.stop - begin - (self.clock - job.arrived) / AGEING
            urgency[job.id] = min(own, urgency.get(job.id, own))
            if job.leader is not None:
                via = urgency[job.id] + job.until - job.leader.at
                urgency[job.leader.id] = min(via, urgency.get(job.leader.id, via))
        runnable = sorted((j for j in queue if j.leader is None), key=lambda j: urgency[j.id])
        for job in runnable:
            if job.stage == "prefilling":
                return job
            if self._may_start(job):
                return job
            # Nobody new goes before it, or it might never find the room it needs.
            return next((j for j in runnable if j.stage == "prefilling"), None)
        return None

    def _may_start(self, job: Job) -> bool:
        """Whether there is room to run one more. Alone, anything may try."""
        running = [j for j in self.jobs.values() if j.stage != "waiting" and not j.warm]
        if not running:
            return True
        undecided = sum(j.stage != "decoding" for j in running)
        reserved = sum(j.nbytes for j in running)
        return undecided < self.max_batch and reserved + job.nbytes <= self.room

    def _follow(self, job: Job) -> None:
        """Wait for the earlier job that is about to compute most of what this one needs."""
        job.leader = None
        if job.stage != "waiting":
            return
        best = job.known + WORTH_WAITING
        for other_id, shared in job.agrees.items():
            other = self.jobs.get(other_id)
            if other is None or other.stage not in ("waiting", "prefilling"):
                continue
            if shared >= best and other.at < shared:
                best = shared + 1
                job.leader, job.until = other, shared
        if job.leader is not None:
            job.leader.marks.add(job.until)

    def _ahead_of(self, job: Job) -> Iterator[Job]:
        for other in self.jobs.values():
            if other.salt == job.salt and other.stage in ("waiting", "prefilling"):
                yield other
