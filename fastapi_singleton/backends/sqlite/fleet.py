"""What every worker sees of the others, of the leader's jobs and of the newest runs."""

import json
from dataclasses import dataclass, field
from datetime import datetime

from ...records import NEWEST, Fleet, RunView, Worker
from ..views import job_view, run_view, run_views, worker_view
from .database import Transaction
from .lease import TERM, boot_of, is_held, leader_view
from .schema import stamp

# Shows that this worker lives; rewrites its row only when it has grown old, so that most polls write nothing.
SEEN = """
INSERT INTO fastapi_singleton_worker
    (name, worker, hostname, pid, version, process, role, lease, boot, seen_after_boot, started_at, last_seen_at)
VALUES (:name, :worker, :hostname, :pid, :version, :process, :role, :lease, :boot, :after_boot, :started_at, :now)
ON CONFLICT (name, worker) DO UPDATE
SET boot = excluded.boot, seen_after_boot = excluded.seen_after_boot, last_seen_at = excluded.last_seen_at
WHERE boot <> excluded.boot OR seen_after_boot NOT BETWEEN excluded.seen_after_boot - :lease / 20 AND excluded.seen_after_boot
"""

# Whether the worker in this row was seen within its own lease; by the boot's clock, as the lease itself.
LATELY = "w.boot = :boot AND w.seen_after_boot > :after_boot - w.lease AND w.seen_after_boot <= :after_boot"

WORKERS = f"""
SELECT w.worker, w.hostname, w.pid, w.started_at, w.last_seen_at, w.version, w.role FROM fastapi_singleton_worker AS w
WHERE w.name = :name AND {LATELY} ORDER BY w.started_at, w.worker
"""

# Publishes the jobs of a worker that does not lead: in a term of nobody's, if there was none yet.
PUBLISH = """
INSERT INTO fastapi_singleton_term
    (name, token, worker, hostname, pid, process, boot, expires_after_boot, lease, acquired_at, renewed_at, released_at, jobs)
VALUES (:name, 0, '', '', 0, '', '', 0, 0, :now, :now, :now, :jobs)
ON CONFLICT (name) DO UPDATE SET jobs = excluded.jobs, jobs_revision = jobs_revision + 1
"""

# A run as the status shows it.
RUN = """r.id, r.job, r.tick AS scheduled_for, r.started_at, r.finished_at, r.outcome, r.error, r.attempt, r.token,
    r.worker, r.cause"""
RUNS_NEWEST = f"""
SELECT {RUN} FROM fastapi_singleton_run AS r WHERE r.name = :name
ORDER BY r.tick DESC, r.job, r.attempt DESC LIMIT {NEWEST}
"""
RUN_LAST = f"""
SELECT {RUN} FROM fastapi_singleton_run AS r WHERE r.name = :name AND r.job = :job
ORDER BY r.tick DESC, r.attempt DESC LIMIT 1
"""

# Changes when the newest runs do: what every poll would otherwise read and convert is read only then.
RUNS_DIGEST = f"""
SELECT group_concat(id || outcome) FROM (SELECT r.id, r.outcome FROM fastapi_singleton_run AS r WHERE r.name = :name
    ORDER BY r.tick DESC, r.job, r.attempt DESC LIMIT {NEWEST})
"""


@dataclass(frozen=True)
class Sight:
    """The fleet at one moment of the store. `digest` tells whether its jobs and runs have changed since."""

    now: datetime
    after_boot: float
    fleet: Fleet = field(default_factory=Fleet)
    digest: tuple[object, ...] = ()


def show(transaction: Transaction, name: str, me: Worker, lease: float) -> None:
    """Write down that this worker lives."""
    transaction.execute(
        SEEN, name=name, worker=me.worker, hostname=me.hostname, pid=me.pid, version=me.version, process=me.process,
        role=me.role, boot=boot_of(me), after_boot=transaction.boot, started_at=stamp(me.started_at),
        now=stamp(transaction.now), lease=lease,
    )  # fmt: skip


def publish(transaction: Transaction, name: str, jobs: str) -> None:
    transaction.execute(PUBLISH, name=name, jobs=jobs, now=stamp(transaction.now))


def look(transaction: Transaction, name: str, me: Worker, before: Sight) -> Sight:
    """The fleet as it is now; what has not changed since the sight before is taken from there."""
    boot = boot_of(me)
    term = transaction.execute(TERM, name=name).fetchone()
    leader = leader_view(term) if term is not None and is_held(transaction, term, boot) else None
    rows = transaction.execute(WORKERS, name=name, boot=boot, after_boot=transaction.boot)
    workers = tuple(worker_view(row, leader) for row in map(dict, rows))
    jobs, runs = before.fleet.jobs, before.fleet.runs
    published = (None, None) if term is None else (term["token"], term["jobs_revision"])
    digest = *published, transaction.execute(RUNS_DIGEST, name=name).fetchone()[0]
    if digest != before.digest:
        runs = run_views(map(dict, transaction.execute(RUNS_NEWEST, name=name)))
        documents = [] if term is None else json.loads(term["jobs"])
        latest = (_last_run(transaction, name, document["id"]) for document in documents)
        last = {run.job: run for run in latest if run is not None}
        jobs = tuple(job_view(document, last) for document in documents)
    return Sight(transaction.now, transaction.boot, Fleet(leader, workers, jobs, runs), digest)


def _last_run(transaction: Transaction, name: str, job: str) -> RunView | None:
    row = transaction.execute(RUN_LAST, name=name, job=job).fetchone()
    return None if row is None else run_view(dict(row))
