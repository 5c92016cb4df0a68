"""Frozen values that travel between the rooms. Times are aware UTC datetimes, durations float seconds."""

import hashlib
import os
import socket
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import Literal

from .processes import identity

Outcome = Literal["running", "succeeded", "failed", "missed", "skipped", "abandoned"]
Cause = Literal["schedule", "catch_up", "rerun", "manual"]
# A guest has runs in the ledger, and no part in who runs the jobs. An onlooker has none in anything, and leaves no trace.
Role = Literal["leader", "standby", "racer", "guest", "onlooker"]

# A job whose every attempt takes its worker down must not go on for ever.
MOST_ATTEMPTS = 5
NEWEST = 50  # runs that the status shows

# How a run ends that was given up because its worker was not seen any more. The second says that the worker's process may
# live nevertheless, frozen perhaps: whoever knows that it does counts its run as alive.
GONE = "its worker is gone"
SILENT = "its worker does not answer"
# How a claim ends that was taken back.
UNBEGUN = "it never began: its worker stopped, or lost the lock"
# Begins the names that locks have in the store, and no fleet has. Their terms are forgotten a day after they ended.
LOCK_PREFIX = "lock:"


def is_name(text: object) -> bool:
    """Whether it is a text that every store can take, for a fleet, a lock or a job."""
    if not isinstance(text, str) or not text.strip() or "\0" in text or len(text) > 200:
        return False
    return text.encode("utf-8", "replace").decode() == text


def run_id(name: str, job: str, tick: datetime, attempt: int) -> str:
    """The public name of a tick and attempt: whoever computes it, wherever, gets the same."""
    text = f"{name}\0{job}\0{tick.timestamp():.6f}\0{attempt}"
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Worker:
    """One process of the fleet. `worker` is a label for people and rows, not a proof that the process lives."""

    worker: str
    hostname: str
    pid: int
    started_at: datetime
    version: str = ""  # a digest of the jobs it knows: two of them in one fleet mean that a deploy is under way
    process: str = ""  # which process of which machine it is, as far as the operating system tells
    role: Role = "standby"  # while it does not lead

    @classmethod
    def here(cls, version: str = "", role: Role = "standby") -> "Worker":
        """This process, with a new identity. Made inside the lifespan: what is made at import is shared by preloaded workers."""
        hostname, pid = socket.gethostname(), os.getpid()
        worker = f"{hostname}:{pid}:{uuid.uuid4().hex[:8]}"
        return cls(worker, hostname, pid, datetime.now(UTC), version, identity(), role)


@dataclass(frozen=True)
class Term:
    """One leadership. `token` grows with every term of that name, so that a store can refuse whoever led before. In a race
    every worker runs the jobs, and the claim alone decides: a term is then merely this worker's part in it."""

    name: str
    token: int
    worker: str

    @classmethod
    def race(cls, name: str, worker: str) -> "Term":
        return cls(name, 0, worker)

    @property
    def is_race(self) -> bool:
        return self.token == 0

    @property
    def fence(self) -> int | None:
        """What is claimed under it carries this: nothing can be claimed any more once a newer one is known."""
        return None if self.is_race else self.token


@dataclass(frozen=True)
class LeaderView:
    worker: str
    hostname: str
    pid: int
    token: int
    acquired_at: datetime
    renewed_at: datetime


@dataclass(frozen=True)
class WorkerView:
    worker: str
    hostname: str
    pid: int
    role: Role
    started_at: datetime
    last_seen_at: datetime
    version: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """What a job may know of the run it is in. `id` is the same for everybody who asks about this tick and attempt: the
    idempotency key. `nonce` is this claimer's private proof, for `fence` alone."""

    id: str
    job: str
    scheduled_for: datetime
    attempt: int
    token: int | None
    nonce: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Entry:
    """A tick and attempt to be written into the ledger: as `running` it is claimed, otherwise it says why nothing runs.

    A claim that reaches the ledger after `latest`, by the store's clock, is entered as missed. While `limit` runs of the
    job are alive, of other ticks, it is not entered at all.
    """

    name: str
    job: str
    tick: datetime
    attempt: int = 1
    cause: Cause = "schedule"
    token: int | None = None
    outcome: Literal["running", "skipped", "missed"] = "running"
    error: str | None = None
    latest: datetime | None = None
    limit: int | None = None
    nonce: str = field(default_factory=lambda: os.urandom(16).hex(), repr=False)
    id: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", run_id(self.name, self.job, self.tick, self.attempt))

    @property
    def key(self) -> tuple[str, datetime, int]:
        return self.job, self.tick, self.attempt


class Verdict(Enum):
    """What the ledger answered to an entry."""

    YOURS = "yours"  # claimed, and by nobody else: run it
    WRITTEN = "written"  # entered as what it was meant to be, or as missed
    TAKEN = "taken"  # there is a row for this tick and attempt already
    PRUNED = "pruned"  # so old that a row for it may have been deleted
    EARLY = "early"  # not yet due by the store's clock: ask again
    LOST = "lost"  # the term is over
    FULL = "full"  # as many runs of the job were alive as may be: entered as skipped, but for a repeat


@dataclass(frozen=True)
class Alive:
    """A run that has not ended, as far as the ledger knows: its worker, which process that is, and whether it was seen
    within its lease."""

    worker: str
    process: str
    seen: bool


@dataclass(frozen=True)
class Crowd:
    """The answer to a claim that was not entered, because of these runs."""

    alive: tuple[Alive, ...]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a claimed run ended."""

    entry: Entry
    outcome: Literal["succeeded", "failed", "abandoned"]
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class JobNote:
    """A job as this worker's code defines it. A changed `fingerprint` is a changed schedule; `anchor` is its phase."""

    key: str
    fingerprint: str
    anchor: datetime | None
    paused: bool


@dataclass(frozen=True)
class JobState:
    """A job as the fleet remembers it: ticks after `since` may lack a row, none before does."""

    since: datetime
    anchor: datetime | None
    paused: bool
    removed: bool
    new: bool  # it has only just been met


@dataclass(frozen=True)
class JobChange:
    """What a leader has to say of a job it knows; None leaves a field as it was. `since` only ever grows."""

    key: str
    paused: bool | None = None
    removed: bool | None = None
    since: datetime | None = None


@dataclass(frozen=True)
class Cut:
    """A run cut short by a crash, with no later attempt yet."""

    job: str
    tick: datetime
    attempt: int
    found_at: datetime


@dataclass(frozen=True)
class RunView:
    id: str
    job: str
    scheduled_for: datetime
    started_at: datetime | None
    finished_at: datetime | None
    duration_seconds: float | None
    outcome: Outcome
    error: str | None
    attempt: int
    token: int | None
    worker: str
    cause: Cause


@dataclass(frozen=True)
class JobView:
    id: str
    trigger: str
    next_run_at: datetime | None
    paused: bool
    last_run: RunView | None = None


@dataclass(frozen=True)
class Fleet:
    """What the store said of the fleet when it was last asked: the source of every worker's status."""

    leader: LeaderView | None = None
    workers: tuple[WorkerView, ...] = ()
    jobs: tuple[JobView, ...] = ()
    runs: tuple[RunView, ...] = ()

    @property
    def versions(self) -> tuple[str, ...]:
        return tuple(sorted({worker.version for worker in self.workers if worker.version}))


@dataclass(frozen=True)
class BackendView:
    kind: str
    reachable: bool
    detail: str


@dataclass(frozen=True)
class Status:
    """The one read model. Everything that shows the state of the fleet renders this."""

    status: Literal["ok", "no_leader", "degraded"]
    problems: tuple[str, ...]
    answered_by: str
    name: str
    mode: str
    backend: BackendView
    lease_seconds: float | None  # None, likewise below: whoever asks is not of the fleet, and cannot tell
    worst_case_failover_seconds: float | None
    leader: LeaderView | None
    workers: tuple[WorkerView, ...]
    jobs: tuple[JobView, ...]
    runs: tuple[RunView, ...]
    versions: tuple[str, ...]  # more than one: a deploy is under way
