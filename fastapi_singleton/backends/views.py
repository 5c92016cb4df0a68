"""What every store reads and writes in the same form: documents of the fleet, its jobs and its runs."""

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from ..records import JobView, LeaderView, RunView, WorkerView


def parse_time(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def clean(text: str | None) -> str | None:
    """What every store takes: no NUL, no lone surrogates. One odd message must not hold up the whole ledger."""
    return None if text is None else text.replace("\0", "").encode("utf-8", "replace").decode()


def worker_view(document: Mapping[str, Any], leader: LeaderView | None) -> WorkerView:
    return WorkerView(
        document["worker"],
        document["hostname"],
        document["pid"],
        "leader" if leader is not None and leader.worker == document["worker"] else document.get("role", "standby"),
        parse_time(document["started_at"]),
        parse_time(document["last_seen_at"]),
        document["version"],
    )


def job_document(job: JobView) -> dict[str, Any]:
    next_run_at = job.next_run_at.isoformat() if job.next_run_at else None
    return {"id": clean(job.id), "trigger": clean(job.trigger), "next_run_at": next_run_at, "paused": job.paused}


def published(jobs: Iterable[JobView] | None) -> str | None:
    """The leader's jobs as they are shown to the fleet."""
    return None if jobs is None else json.dumps([job_document(job) for job in jobs], ensure_ascii=False)


def job_view(document: Mapping[str, Any], last: Mapping[str, RunView]) -> JobView:
    due = document["next_run_at"]
    next_run_at = parse_time(due) if due else None
    return JobView(document["id"], document["trigger"], next_run_at, document["paused"], last.get(document["id"]))


def run_views(documents: Iterable[dict[str, Any]]) -> tuple[RunView, ...]:
    return tuple(run_view(document) for document in documents)


def run_view(document: dict[str, Any]) -> RunView:
    scheduled_for, started_at, finished_at = (
        parse_time(document[field]) if document[field] else None
        for field in ("scheduled_for", "started_at", "finished_at")
    )
    assert scheduled_for is not None
    lasted = (finished_at - started_at).total_seconds() if started_at and finished_at else None
    times = {"scheduled_for": scheduled_for, "started_at": started_at, "finished_at": finished_at}
    return RunView(**{**document, **times}, duration_seconds=lasted)
