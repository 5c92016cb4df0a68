"""What the scripts answer of the fleet, as the status shows it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ...records import JobState, JobView, LeaderView, RunView, Worker, WorkerView
from ..views import job_view, worker_view
from . import rows


@dataclass(frozen=True)
class Sight:
    """One look at the fleet. `digest` changes when its jobs or runs do, and is None where there never were any."""

    now: datetime
    leader: LeaderView | None
    workers: tuple[WorkerView, ...]
    digest: str | None
    process: str  # of the leader: which process of which machine

    @classmethod
    def parse(cls, answer: Sequence[Any]) -> "Sight":
        now, lease, (token, revision), present = answer
        holder = dict(zip(lease[::2], lease[1::2], strict=True))
        leader = _leader_view(holder) if holder else None
        documents = (json.loads(text) | {"last_seen_at": rows.moment(at).isoformat()} for text, at in present if text)
        workers = sorted((worker_view(each, leader) for each in documents), key=lambda w: (w.started_at, w.worker))
        digest = f"{token} {revision}" if token or revision else None
        return cls(rows.moment(now), leader, tuple(workers), digest, holder.get("process", ""))


def presence(worker: Worker, lease: float) -> str:
    """What a worker shows of itself."""
    return json.dumps(
        {
            "worker": worker.worker,
            "hostname": worker.hostname,
            "pid": worker.pid,
            "process": worker.process,
            "started_at": worker.started_at.isoformat(),
            "version": worker.version,
            "role": worker.role,
            "lease": rows.microseconds(lease),
        }
    )


def history(newest: Sequence[str], last: Sequence[str], published: str) -> tuple[Sequence[JobView], Sequence[RunView]]:
    """The leader's jobs, each with its last run; the newest runs of all, in the order in which they are shown."""
    last_of = {run.job: run for run in rows.views(last)}
    runs = sorted(rows.views(newest), key=lambda run: (run.job, -run.attempt))
    runs.sort(key=lambda run: run.scheduled_for, reverse=True)
    return [job_view(job, last_of) for job in json.loads(published)], runs


def job_state(since: str, anchor: str, paused: str, removed: str, new: str) -> JobState:
    phase = rows.moment(anchor) if anchor else None
    return JobState(rows.moment(since), phase, paused == "1", removed == "1", new == "1")


def _leader_view(holder: dict[str, str]) -> LeaderView:
    return LeaderView(
        holder["worker"],
        holder["hostname"],
        int(holder["pid"]),
        int(holder["token"]),
        rows.moment(holder["acquired_at"]),
        rows.moment(holder["renewed_at"]),
    )
