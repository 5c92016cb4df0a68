"""Frozen values that travel between the rooms. Times are aware UTC datetimes, durations float seconds."""

import os
import socket
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal


@dataclass(frozen=True)
class Worker:
    """One process of the fleet. `worker` is a label for people and rows, not a proof that the process lives."""

    worker: str
    hostname: str
    pid: int
    started_at: datetime

    @classmethod
    def here(cls) -> "Worker":
        """This process, with a new identity. Made inside the lifespan: what is made at import is shared by preloaded workers."""
        hostname, pid = socket.gethostname(), os.getpid()
        return cls(f"{hostname}:{pid}:{uuid.uuid4().hex[:8]}", hostname, pid, datetime.now(UTC))


@dataclass(frozen=True)
class Term:
    """One leadership. `token` grows with every term of that name, so that a store can refuse whoever led before."""

    name: str
    token: int
    worker: str


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
    role: Literal["leader", "standby"]
    started_at: datetime
    last_seen_at: datetime


@dataclass(frozen=True)
class JobView:
    id: str
    trigger: str
    next_run_at: datetime | None
    paused: bool
    last_run: dict[str, Any] | None = None


@dataclass(frozen=True)
class Fleet:
    """What the store said of the fleet when it was last asked: the source of every worker's status."""

    leader: LeaderView | None = None
    workers: tuple[WorkerView, ...] = ()
    jobs: tuple[JobView, ...] = ()


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
    lease_seconds: float
    worst_case_failover_seconds: float
    leader: LeaderView | None
    workers: tuple[WorkerView, ...]
    jobs: tuple[JobView, ...]
    runs: tuple[dict[str, Any], ...] = ()
