"""The ledger: which ticks were claimed, by whom, and how their runs ended.

A batch of claims is one transaction that holds the file's write lock from its beginning, so that no election and no other
claim can come in between. The token is all that fences: a claim whose reply was lost is sent again, on whatever connection.
"""

import json
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta

from ...records import GONE, LOCK_PREFIX, SILENT, Alive, Crowd, Cut, Ending, Entry, RunView, Verdict, Worker
from ..views import clean, parse_time, run_views
from .database import Transaction
from .fleet import LATELY, RUN
from .lease import TERM, boot_of, is_newest
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

# A job's runs that are alive, but for those of one tick.
ALIVE = f"""
SELECT r.worker, coalesce(w.process, '') AS process, coalesce({LATELY}, 0) AS seen
FROM (
    SELECT worker, tick FROM fastapi_singleton_run WHERE name = :name AND job = :job AND outcome = 'running'
    UNION ALL
    SELECT worker, tick FROM fastapi_singleton_run
    WHERE name = :name AND job = :job AND outcome = 'abandoned' AND error = '{SILENT}'
) AS r LEFT JOIN fastapi_singleton_worker AS w ON w.name = :name AND w.worker = r.worker
WHERE r.tick <> :tick
"""

# A run that its claimer may still end: also one given up for dead meanwhile, because its ending is the truth.
UNSETTLED = f"""
SELECT started_at FROM fastapi_singleton_run
WHERE {_KEY} AND nonce = :nonce AND outcome IN ('running', 'abandoned')
"""
FINISH = f"UPDATE fastapi_singleton_run SET outcome = :outcome, error = :error, finished_at = :finished_at WHERE {_KEY}"

TICKS = "SELECT DISTINCT tick FROM fastapi_singleton_run WHERE name = :name AND job = :job AND tick > :since"

_UNSEEN = f"""r.name = :name AND r.worker <> :me AND NOT EXISTS (
    SELECT 1 FROM fastapi_singleton_worker AS w WHERE w.name = :name AND w.worker = r.worker AND {LATELY})"""

# Workers not seen for a whole lease, with runs that count as alive.
UNSEEN = f"""
SELECT DISTINCT r.worker, coalesce((SELECT process FROM fastapi_singleton_worker AS w
                                    WHERE w.name = :name AND w.worker = r.worker), '') AS process
FROM fastapi_singleton_run AS r WHERE r.outcome = 'running' AND {_UNSEEN}
UNION
SELECT r.worker, coalesce((SELECT process FROM fastapi_singleton_worker AS w
                           WHERE w.name = :name AND w.worker = r.worker), '')
FROM fastapi_singleton_run AS r WHERE r.outcome = 'abandoned' AND r.error = '{SILENT}' AND {_UNSEEN}
"""

# Gives up runs whose worker has not been seen for a whole lease, some at a time. Those of workers that live all the same
# count as alive.
SWEEP = f"""
UPDATE fastapi_singleton_run
SET outcome = 'abandoned', finished_at = :now,
    error = CASE WHEN worker IN (SELECT value FROM json_each(:silent)) THEN '{SILENT}' ELSE '{GONE}' END
WHERE rowid IN (SELECT r.rowid FROM fastapi_singleton_run AS r WHERE r.outcome = 'running' AND {_UNSEEN} LIMIT 1000)
"""
DEAD = f"""
UPDATE fastapi_singleton_run AS r SET error = '{GONE}'
WHERE r.outcome = 'abandoned' AND r.error = '{SILENT}' AND r.worker NOT IN (SELECT value FROM json_each(:silent)) AND {_UNSEEN}
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
# In a term of nobody's, if there was none yet.
LIFT_FLOOR = """
INSERT INTO fastapi_singleton_term
    (name, token, worker, hostname, pid, process, boot, expires_after_boot, lease, acquired_at, renewed_at, released_at, floor)
VALUES (:name, 0, '', '', 0, '', '', 0, 0, :now, :now, :now, :floor)
ON CONFLICT (name) DO UPDATE SET floor = max(floor, excluded.floor)
"""

# Forgets workers of other boots and of long ago; a run of theirs counts as one of a worker that is gone all the same.
FORGET = "DELETE FROM fastapi_singleton_worker WHERE boot <> :boot OR seen_after_boot < :after_boot - 86400"
# Likewise locks; a later token is still greater, because it is never behind the clock.
FORGET_LOCKS = f"""
DELETE FROM fastapi_singleton_term
WHERE name GLOB '{LOCK_PREFIX}*' AND (boot <> :boot OR expires_after_boot < :after_boot - 86400)
"""

RUNS = f"""
SELECT {RUN} FROM fastapi_singleton_run AS r
WHERE r.name = :name AND r.job = :job AND r.tick < :before
ORDER BY r.tick DESC, r.attempt DESC LIMIT :limit
"""


def enter(
    transaction: Transaction, name: str, me: Worker, lease: float, entries: Sequence[Entry], beside: Collection[str]
) -> list[Verdict | Crowd]:
    """Accepts an entry iff its token (if it has one) is the newest, its tick lies above the floor and not beyond the
    store's time + lease, and there is no row for the tick and attempt, or one with the same nonce that is still running
    (then it is the same claim, sent again: also under a newer term it is its claimer's). A claim after its latest start
    is entered as missed. One that finds as many runs alive as may be is not entered, and told of them."""
    term = transaction.execute(TERM, name=name).fetchone()
    verdicts: list[Verdict | Crowd] = []
    for entry in entries:
        row = transaction.execute(
            WRITTEN, name=name, job=entry.job, tick=stamp(entry.tick), attempt=entry.attempt
        ).fetchone()
        verdict: Verdict | Crowd | None = _judge(transaction, term, lease, entry, row)
        if verdict is None and entry.limit is not None and _is_claimed(transaction, entry):
            crowd = _crowd(transaction, name, me, entry, beside)
            verdict = crowd if len(crowd.alive) >= entry.limit else None
        verdicts.append(verdict or _write(transaction, name, me.worker, entry))
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


def _is_claimed(transaction: Transaction, entry: Entry) -> bool:
    """Whether it is entered as running: it is to be, and not too late for that."""
    return entry.outcome == "running" and (entry.latest is None or entry.latest >= transaction.now)


def _crowd(transaction: Transaction, name: str, me: Worker, entry: Entry, beside: Collection[str]) -> Crowd:
    rows = transaction.execute(
        ALIVE,
        name=name,
        job=entry.job,
        tick=stamp(entry.tick),
        boot=boot_of(me),
        after_boot=transaction.boot,
    )
    return Crowd(
        tuple(Alive(row["worker"], row["process"], bool(row["seen"])) for row in rows if row["worker"] not in beside)
    )


def _write(transaction: Transaction, name: str, worker: str, entry: Entry) -> Verdict:
    now, outcome, error = transaction.now, entry.outcome, entry.error
    runs = _is_claimed(transaction, entry)
    if outcome == "running" and not runs:
        outcome, error = "missed", f"came up only {(now - entry.tick).total_seconds():.1f} s after its time"
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


def unseen(transaction: Transaction, name: str, me: Worker) -> dict[str, str]:
    rows = transaction.execute(UNSEEN, name=name, me=me.worker, boot=boot_of(me), after_boot=transaction.boot)
    return {row["worker"]: row["process"] for row in rows}


def sweep(transaction: Transaction, name: str, me: Worker, silent: Collection[str]) -> int:
    fleet = {"name": name, "me": me.worker, "boot": boot_of(me), "after_boot": transaction.boot}
    listed = json.dumps(list(silent))
    transaction.execute(DEAD, silent=listed, **fleet)
    return transaction.execute(SWEEP, silent=listed, now=stamp(transaction.now), **fleet).rowcount


def cut(transaction: Transaction, name: str, jobs: Sequence[str], attempts: int, within: float) -> list[Cut]:
    since = stamp(_ago(transaction.now, within))
    return [
        Cut(job, parse_time(row["tick"]), row["attempt"], parse_time(row["finished_at"]))
        for job in jobs
        for row in transaction.execute(CUT, name=name, job=job, attempts=attempts, since=since)
    ]


def prune(transaction: Transaction, name: str, me: Worker, keep: float) -> int:
    transaction.execute(FORGET, boot=boot_of(me), after_boot=transaction.boot)
    transaction.execute(FORGET_LOCKS, boot=boot_of(me), after_boot=transaction.boot)
    old = transaction.execute(OLD, name=name, before=stamp(_ago(transaction.now, keep))).fetchall()
    if old:
        transaction.connection.executemany(DELETE, [{"rowid": row["rowid"]} for row in old])
        transaction.execute(LIFT_FLOOR, name=name, floor=old[-1]["tick"], now=stamp(transaction.now))
    return len(old)


def runs(transaction: Transaction, name: str, job: str, limit: int, before: datetime | None) -> list[RunView]:
    until = _AFTER_ALL if before is None else stamp(before)
    return list(run_views(map(dict, transaction.execute(RUNS, name=name, job=clean(job), before=until, limit=limit))))


def _ago(now: datetime, seconds: float) -> datetime:
    return now - timedelta(seconds=seconds)
