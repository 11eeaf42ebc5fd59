"""Decide which job computes next. The scheduler is told what happened, and gives a plan.

It is pure: there is no model, no clock and no thread here, so the policy is tested with thousands
of simulated requests. Time is counted in prefilled prompt tokens of all jobs.

A turn is planned in two phases. First, `preparation` names one by one the things that must be done
before the rest can be planned: the match of a prompt, for example, decides where its pieces end.
Then `plan` says all that is computed in the turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeVar

from rewarm.cache.tree import WIDTH, agreement
from rewarm.values import Cut, Kind

AGEING = 4
"""Other prompts overtake a prompt with at most about this many times its own work."""

WORTH_WAITING = 16
"""The fewest tokens that a job waits for another request to compute."""

MOST_WARM = 64
"""The most warm-ahead jobs that wait. With one more, the oldest is forgotten."""

OVER = -1
"""The position, in a plan, of a job that has nothing left to prefill."""

MOST_FETCHING = 4
"""The most prompts that are being fetched, or were fetched and have not started."""

Stage = Literal["waiting", "fetching", "prefilling", "ready", "decoding"]


@dataclass(eq=False)
class Job:
    """The part of a sequence that the scheduler needs."""

    id: int
    data: bytes = b""
    """The prompt, encoded as in the tree, to find what two prompts share."""
    stop: int = 0
    """The tokens to prefill; the last one of a prompt is left to its first decode step."""
    known: int = 0
    """The tokens that the tree could give at the last look."""
    salt: str | None = None
    nbytes: int = 0
    """The bytes that it needs to run. They are reserved when its prefill starts."""
    warm: bool = False
    """It is warm-ahead, which runs when there is nothing else."""
    fetch: bool = False
    """Lower tiers are asked before it starts."""
    fetched: bool = False
    """Its fetch is done, and holds memory."""
    stage: Stage = "waiting"
    position: int = 0
    cuts: Sequence[Cut] = ()
    """The places where its prefill is divided, once it has started."""
    one_pass: int = 0
    """A last piece of fewer tokens than this includes the prompt's last token."""
    unstored: int = 0
    """The tokens that were decoded since its answer was last stored."""
    arrived: int = 0
    leader: Job | None = None
    """The earlier job that is about to compute what this one needs."""
    until: int = 0
    """The position that the leader must reach for this one to go on."""
    marks: set[int] = field(default_factory=set)
    """Positions that others wait for: checkpoints are taken there."""
    agrees: dict[int, int] = field(default_factory=dict)
    """Tokens shared with earlier jobs, by their id."""

    @property
    def at(self) -> int:
        return self.position if self.has_started else self.known

    @property
    def has_started(self) -> bool:
        return self.stage not in ("waiting", "fetching")

    def piece(self, start: int) -> Piece:
        """Give the next piece of its prompt."""
        cut = next((c for c in self.cuts if c.stop > start), Cut(start, None))
        done = cut.stop >= self.stop
        through = done and start < cut.stop and cut.stop - start < self.one_pass
        return Piece(self.id, start, cut.stop + through, cut.checkpoint, done)


J = TypeVar("J", bound=Job)


class Piece(NamedTuple):
    """A part of a prompt that is computed in one pass, stored, and followed by a checkpoint.

    One that fails ends its request. After the `last` one a request is ready to decode, and
    warm-ahead is over.
    """

    id: int
    start: int
    stop: int
    checkpoint: Kind | None
    last: bool

    @property
    def size(self) -> int:
        return self.stop - self.start


class Preparation(NamedTuple):
    """Something that is done before a turn is planned.

    - forget: end warm-ahead that is too old
    - pause: stop warm-ahead for a request; what it computed is stored, and it goes on later
    - fetch: ask lower tiers for a prompt, which waits for the answer while others go on
    - start: match a prompt and restore what is known of it
    - mark: divide a prompt where others wait for it
    """

    what: Literal["forget", "pause", "fetch", "start", "mark"]
    id: int


class Plan(NamedTuple):
    """The work of one turn. It is carried out in the order of the fields.

    A sequence that failed or ended meanwhile is left out; nothing else depends on the outcome.
    """

    admit: tuple[int, ...] = ()
    """Prefilled sequences that take their first step alone, and then enter a batch. One that fails
    ends its request. Where a batch cannot take newcomers, all of its sequences start over, each
    alone."""
    store: tuple[int, ...] = ()
    """Answers that are stored now, before a step overwrites rows that their windows need."""
    decode: bool = False
    """One step of all batches. Tokens go to their sinks. An answer that ends is stored and leaves.
    The sequences of a batch that fails start over, each alone."""
    prefill: tuple[Piece, ...] = ()


class Scheduler(Generic[J]):
    """The scheduler keeps the queue. The caller reports what happened, and `plan` says what to do
    next."""

    def __init__(
        self, max_batch: int, running_memory: int, chunk: int, window: int = 0, step: int = 1
    ) -> None:
        """`window`: the shortest window of the model's layers; 0 where it has none. `step`: the
        most tokens that a step of decoding gives to a sequence."""
        self.max_batch = max_batch
        self.running_memory = running_memory
        """The bytes that running requests may take together."""
        self.chunk = chunk
        """The prompt tokens of a turn."""
        self.most_unstored = max(window - step, 1) if window else 1 << 62
        """The tokens of an answer after which it is stored. Another step could overwrite rows that
        its windows need."""
        self.jobs: dict[int, J] = {}
        self.clock = 0
        self.undecided: dict[int, J] = {}
        """The jobs whose prompts are not computed yet. The next piece is one of theirs."""

    def add(self, job: J) -> None:
        job.arrived = self.clock
        job.stage, job.position, job.leader = "waiting", 0, None
        job.marks, job.agrees = set(), {}
        if not job.warm:
            least = slice(job.known * WIDTH, (job.known + WORTH_WAITING) * WIDTH)
            for other in self.undecided.values():
                if other.salt != job.salt or other.data[least] != job.data[least]:
                    continue
                shared = min(agreement(other.data, job.data), job.stop, other.stop)
                if shared - job.known < WORTH_WAITING:
                    continue
                if other.warm:
                    job.marks.add(shared)  # warm-ahead waits for this job, and resumes there
                else:
                    job.agrees[other.id] = shared
        self.jobs[job.id] = self.undecided[job.id] = job
        self._follow(job)

    def remove(self, gone: J) -> None:
        """Forget a job that has finished, failed or was cancelled. Those that waited for it look
        for another leader."""
        self.jobs.pop(gone.id, None)
        self.undecided.pop(gone.id, None)
        for job in self.undecided.values():
            job.agrees.pop(gone.id, None)
            if job.leader is gone:
                job.known = max(job.known, min(job.until, gone.at))
                self._follow(job)

    def fetching(self, job: J) -> None:
        """Lower tiers are asked for a job's prompt."""
        job.stage, job.fetch = "fetching", False

    def fetched(self, job: J, known: int = 0) -> None:
        """A job waits no longer for lower tiers: they gave it `known` tokens, or nothing."""
        job.stage, job.fetched = "waiting", bool(known)
        job.known = max(job.known, known)
        self._follow(job)

    def started(self, job: J, position: int, cuts: Sequence[Cut]) -> None:
        """A job's prefill begins at `position`."""
        job.cuts, job.fetched = cuts, False
        self._at(job, position, "prefilling")

    def marked(self, job: J, cuts: Sequence[Cut]) -> None:
        """A job's prompt is divided where others wait for it."""
        job.cuts = cuts
        job.marks.clear()

    def paused(self, job: J) -> None:
        """A job was stopped. It goes on later from its position."""
        job.known, job.position, job.stage = job.position, 0, "waiting"

    def computed(self, piece: Piece) -> None:
        """A piece of a prompt is done."""
        job = self.jobs[piece.id]
        self.clock += piece.size
        self._at(job, min(piece.stop, job.stop), "ready" if piece.last else "prefilling")

    def admitted(self, job: J) -> None:
        """A job takes its first step."""
        job.unstored = 0
        self._at(job, job.stop, "decoding")

    def preparation(self) -> Preparation | None:
        """Give the next thing to do before `plan`; None once there is none left."""
        undecided = self.undecided.values()
        warm = [j for j in undecided if j.warm]
        if len(warm) > MOST_WARM:
            return Preparation("forget", warm[0].id)
        for job in undecided:
            if job.stage == "prefilling" and job.warm and not self._is_idle():
                return Preparation("pause", job.id)
            if job.stage == "prefilling" and job.marks:
                return Preparation("mark", job.id)
        if sum(j.stage == "fetching" or j.fetched for j in undecided) < MOST_FETCHING:
            # Only jobs that are about to start are fetched, since what is fetched takes memory.
            soon = [j for j in self._by_urgency({}) if not j.has_started][:MOST_FETCHING]
            below = next((j for j in soon if j.fetch and self._may_start(j)), None)
            if below is not None:
                return Preparation("fetch", below.id)
        _, waits = self._pieces()
        return Preparation("start", waits.id) if waits is not None else None

    def plan(self) -> Plan:
        pieces = self._pieces()[0] if self.undecided else ()
        ready, full, decoding = [], [], 0
        for job in self.jobs.values():
            if job.stage == "ready":
                ready.append(job.id)
            elif job.stage == "decoding":
                decoding += 1
                if job.unstored >= self.most_unstored:
                    full.append(job.id)
        admit = tuple(ready[: self.max_batch - decoding])
        return Plan(admit, tuple(full), bool(decoding or admit), tuple(pieces))

    def _is_idle(self) -> bool:
        """Say whether no request has anything to compute."""
        return len(self.jobs) == len(self.undecided) and self._next_request({}) is None

    def _pieces(self) -> tuple[list[Piece], J | None]:
        """Give the pieces that share the time of one chunk: short prompts, and short pieces between
        checkpoints. The pieces end where a waiting job can go on, and before the first job that has
        not started; this job is returned too."""
        pieces: list[Piece] = []
        at: dict[int, int] = {}
        left = self.chunk
        warm = self._warm() if self._is_idle() else None
        while left > 0:
            job = warm or self._next_request(at)
            if job is None or job.stage == "waiting":
                return pieces, job
            piece = job.piece(at.get(job.id, job.position))
            if pieces and piece.size > left:
                break
            pieces.append(piece)
            at[job.id] = OVER if piece.last else piece.stop
            left -= max(piece.size, 1)
            followers = [j for j in self.undecided.values() if j.leader is job]
            if (warm and piece.last) or any(piece.last or piece.stop >= j.until for j in followers):
                break
        return pieces, None

    def _warm(self) -> J | None:
        """Give the warm-ahead that has begun, or else the oldest."""
        warm = [j for j in self.undecided.values() if j.warm]
        return min(warm, key=lambda j: j.stage != "prefilling", default=None)

    def _next_request(self, at: Mapping[int, int]) -> J | None:
        """Give the request that computes next. `at` has the positions that jobs will have by then,
        or `OVER` where nothing is left to prefill."""
        runnable = self._by_urgency(at)
        for job in runnable:
            if job.stage == "prefilling" or (not job.fetch and self._may_start(job)):
                return job
            if not self._may_start(job):
                # No new job may start before it, or it might never find the memory it needs.
                return next((j for j in runnable if j.stage == "prefilling"), None)
        return None

    def _by_urgency(self, at: Mapping[int, int]) -> list[J]:
        """Sort the requests that wait for no other: least remaining work first, with ageing. Jobs
        that wait for a leader can make it more urgent."""
        urgency: dict[int, float] = {}
        queue = [
            j
            for j in self.undecided.values()
            if not j.warm and j.stage != "fetching" and at.get(j.id) != OVER
        ]
        # Leaders arrived before their followers: going backwards, a chain is summed up once.
        for job in reversed(queue):
            leader = job.leader
            begin = job.until if leader is not None else at.get(job.id, job.at)
            own = job.stop - begin - (self.clock - job.arrived) / AGEING
            urgency[job.id] = min(own, urgency.get(job.id, own))
            if leader is not None:
                via = urgency[job.id] + job.until - at.get(leader.id, leader.at)
                urgency[leader.id] = min(via, urgency.get(leader.id, via))
        free = (j for j in queue if j.leader is None)
        return sorted(free, key=lambda j: urgency[j.id])

    def _at(self, job: J, position: int, stage: Stage) -> None:
        """Move a job to `position`. Jobs that waited for this go on."""
        job.position, job.stage = position, stage
        job.leader = None
        if stage != "prefilling":
            self.undecided.pop(job.id, None)
        for follower in self.undecided.values():
            if follower.leader is job and (position >= follower.until or stage != "prefilling"):
                follower.known = max(follower.known, min(follower.until, position))
                self._follow(follower)

    def _may_start(self, job: Job) -> bool:
        """Say whether one more can run now. Where nothing runs, any job may start."""
        running = [j for j in self.jobs.values() if j.has_started and not j.warm]
        if not running:
            return True
        undecided = sum(j.stage != "decoding" for j in running)
        reserved = sum(j.nbytes for j in running)
        return undecided < self.max_batch and reserved + job.nbytes <= self.running_memory

    def _follow(self, job: Job) -> None:
        """Have a job wait for the earlier one that is about to compute most of what it needs."""
        job.leader = None
        if job.stage != "waiting":
            return
        best = job.known + WORTH_WAITING
        for other_id, shared in job.agrees.items():
            other = self.undecided.get(other_id)
            if other is not None and shared >= best and other.at < shared:
                best = shared + 1
                job.leader, job.until = other, shared
        if job.leader is not None:
            job.leader.marks.add(job.until)
