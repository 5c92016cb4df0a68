"""The ledger: which ticks were claimed, by whom, and how their runs ended.

A batch of claims is one transaction that holds the file's write lock from its beginning, so that no election and no other
claim can come in between. The token is all that fences: a claim whose reply was lost is sent again, on whatever connection.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from ...records import Cut, Ending, Entry, RunView, Verdict
from ..views import clean, parse_time, run_views
from .database import Transaction
from .fleet import LATELY, RUN
from .lease import TERM, is_newest
from .schema import stamp

_AFTER_ALL = "~"  # sorts behind every time
_KEY = "name = :name AND job = :job AND tick = :tick AND attempt = :attempt"

WRITTEN = f"SELECT nonce, outcome FROM fastapi_singleton_run WHERE {_KEY}"

# Fails, and the whole batch with it, where there is a row for the tick and attempt: never two.
ENTER = """
INSERT INTO fastapi_singleton_run
    (name, job, tick, attempt, id, nonce, outcome, cause, token, worker, started_at, finished_at, error)
VALUES (:name, :job, :tick, :attempt, :id, :nonce, :outcome, :cause, :token, :worker, :started_at, :finished_at, :error)
"""

# A run that its claimer may still end: also one given up for dead meanwhile, because its ending is the truth.
UNSETTLED = f"""
SELECT started_at FROM fastapi_singleton_run
WHERE {_KEY} AND nonce = :nonce AND outcome IN ('running', 'abandoned')
"""
FINISH = f"UPDATE fastapi_singleton_run SET outcome = :outcome, error = :error, finished_at = :finished_at WHERE {_KEY}"

TICKS = "SELECT DISTINCT tick FROM fastapi_singleton_run WHERE name = :name AND job = :job AND tick > :since"

# Gives up runs whose worker has not been seen for a whole lease, some at a time.
SWEEP = f"""
UPDATE fastapi_singleton_run SET outcome = 'abandoned', finished_at = :now, error = 'its worker is gone'
WHERE rowid IN (
    SELECT r.rowid FROM fastapi_singleton_run AS r
    WHERE r.name = :name AND r.outcome = 'running' AND r.worker <> :me AND NOT EXISTS (
        SELECT 1 FROM fastapi_singleton_worker AS w WHERE w.name = :name AND w.worker = r.worker AND {LATELY})
    LIMIT 1000)
"""

# Runs cut short, lately enough, that have no later attempt.
CUT = """
SELECT r.tick, r.attempt, r.finished_at FROM fastapi_singleton_run AS r
WHERE r.name = :name AND r.outcome = 'abandoned' AND r.job = :job AND r.attempt < :attempts AND r.finished_at > :since
  AND NOT EXISTS (SELECT 1 FROM fastapi_singleton_run AS later WHERE later.name = :name AND later.job = r.job
                  AND later.tick = r.tick AND later.attempt > r.attempt)
"""

# Old rows, some at a time, the oldest first. They are deleted in the transaction that lifts the floor over them.
OLD = """
SELECT rowid, tick FROM fastapi_singleton_run
WHERE name = :name AND tick < :before AND outcome <> 'running' ORDER BY tick LIMIT 1000
"""
DELETE = "DELETE FROM fastapi_singleton_run WHERE rowid = :rowid"
LIFT_FLOOR = "UPDATE fastapi_singleton_term SET floor = max(floor, :floor) WHERE name = :name"

RUNS = f"""
SELECT {RUN} FROM fastapi_singleton_run AS r
WHERE r.name = :name AND r.job = :job AND r.tick < :before
ORDER BY r.tick DESC, r.attempt DESC LIMIT :limit
"""


def enter(transaction: Transaction, name: str, worker: str, lease: float, entries: Sequence[Entry]) -> list[Verdict]:
    """Accepts an entry iff its token (if it has one) is the newest, its tick lies above the floor and not beyond the
    store's time + lease, and there is no row for the tick and attempt, or one with the same nonce that is still running
    (then it is the same claim, sent again: also under a newer term it is its claimer's). A claim after its latest start
    is entered as missed."""
    term = transaction.execute(TERM, name=name).fetchone()
    verdicts = []
    for entry in entries:
        row = transaction.execute(
            WRITTEN, name=name, job=entry.job, tick=stamp(entry.tick), attempt=entry.attempt
        ).fetchone()
        verdict = _judge(transaction, term, lease, entry, row)
        verdicts.append(verdict or _write(transaction, name, worker, entry))
    return verdicts


def _judge(
    transaction: Transaction, term: sqlite3.Row | None, lease: float, entry: Entry, row: sqlite3.Row | None
) -> Verdict | None:
    """What is to be said of an entry without writing it; None: it may be written."""
    is_mine = row is not None and (row["nonce"], row["outcome"]) == (entry.nonce, "running")
    if entry.token is not None and not is_newest(term, entry.token):
        return Verdict.YOURS if is_mine else Verdict.LOST
    if term is not None and stamp(entry.tick) <= term["floor"]:
        return Verdict.PRUNED
    if entry.tick > transaction.now + timedelta(seconds=lease):
        return Verdict.EARLY
    if row is not None:
        return Verdict.YOURS if is_mine else Verdict.TAKEN
    return None


def _write(transaction: Transaction, name: str, worker: str, entry: Entry) -> Verdict:
    now, outcome, error = transaction.now, entry.outcome, entry.error
    if outcome == "running" and entry.latest is not None and entry.latest < now:
        outcome, error = "missed", f"came up only {(now - entry.tick).total_seconds():.1f} s after its time"
    runs = outcome == "running"
    transaction.execute(
        ENTER, name=name, job=entry.job, tick=stamp(entry.tick), attempt=entry.attempt, id=entry.id, nonce=entry.nonce,
        outcome=outcome, cause=entry.cause, token=entry.token, worker=worker, error=clean(error),
        started_at=stamp(now) if runs else None, finished_at=None if runs else stamp(now),
    )  # fmt: skip
    return Verdict.YOURS if runs else Verdict.WRITTEN


def finish(transaction: Transaction, name: str, endings: Sequence[Ending]) -> None:
    for ending in endings:
        entry = ending.entry
        key = {"name": name, "job": entry.job, "tick": stamp(entry.tick), "attempt": entry.attempt}
        row = transaction.execute(UNSETTLED, nonce=entry.nonce, **key).fetchone()
        if row is not None:
            finished_at = parse_time(row["started_at"]) + timedelta(seconds=ending.seconds)
            transaction.execute(
                FINISH, outcome=ending.outcome, error=clean(ending.error), finished_at=stamp(finished_at), **key
            )


def ticks(transaction: Transaction, name: str, since: Mapping[str, datetime]) -> dict[str, set[datetime]]:
    return {
        job: {parse_time(row["tick"]) for row in transaction.execute(TICKS, name=name, job=job, since=stamp(after))}
        for job, after in since.items()
    }


def sweep(transaction: Transaction, name: str, me: str, boot: str, lease: float) -> int:
    now, after_boot = stamp(transaction.now), transaction.boot
    return transaction.execute(SWEEP, name=name, me=me, now=now, boot=boot, after_boot=after_boot, lease=lease).rowcount


def cut(transaction: Transaction, name: str, jobs: Sequence[str], attempts: int, within: float) -> list[Cut]:
    since = stamp(_ago(transaction.now, within))
    return [
        Cut(job, parse_time(row["tick"]), row["attempt"], parse_time(row["finished_at"]))
        for job in jobs
        for row in transaction.execute(CUT, name=name, job=job, attempts=attempts, since=since)
    ]


def prune(transaction: Transaction, name: str, keep: float) -> int:
    old = transaction.execute(OLD, name=name, before=stamp(_ago(transaction.now, keep))).fetchall()
    if old:
        transaction.connection.executemany(DELETE, [{"rowid": row["rowid"]} for row in old])
        transaction.execute(LIFT_FLOOR, name=name, floor=old[-1]["tick"])
    return len(old)


def runs(transaction: Transaction, name: str, job: str, limit: int, before: datetime | None) -> list[RunView]:
    until = _AFTER_ALL if before is None else stamp(before)
    return list(run_views(map(dict, transaction.execute(RUNS, name=name, job=clean(job), before=until, limit=limit))))


def _ago(now: datetime, seconds: float) -> datetime:
    return now - timedelta(seconds=seconds)
