"""Who leads: one row per name, a token that only grows, and a lease on the clock that starts with the machine.

A wall clock may be set while somebody leads; the boot's clock only goes on, also while the machine sleeps, and is the same
for every process of the host. So a lease runs until `expires_after_boot` of the boot it was taken in, and after a restart
of the machine it is over whatever it says.
"""

import sqlite3
from collections.abc import Callable
from dataclasses import fields

from ...errors import StoreError
from ...records import LeaderView, Term, Worker
from ..views import parse_time
from .database import Transaction
from .schema import stamp

TERM = "SELECT * FROM fastapi_singleton_term WHERE name = :name"
# All that says whether somebody leads, without the jobs it publishes: a standby asks for it many times a second.
HOLD = "SELECT boot, expires_after_boot, lease, released_at FROM fastapi_singleton_term WHERE name = :name"

# Opens a term, in a transaction that has found the lease free. The token grows even if the file lost its last writes (or
# is another one), because it is never behind the wall clock's milliseconds. Jobs and floor stay what they were.
ELECT = """
INSERT INTO fastapi_singleton_term
    (name, token, worker, hostname, pid, process, boot, expires_after_boot, lease, acquired_at, renewed_at)
VALUES (:name, :milliseconds, :worker, :hostname, :pid, :process, :boot, :expires, :lease, :now, :now)
ON CONFLICT (name) DO UPDATE
SET token = max(token + 1, excluded.token), worker = excluded.worker, hostname = excluded.hostname, pid = excluded.pid,
    process = excluded.process, boot = excluded.boot, expires_after_boot = excluded.expires_after_boot,
    lease = excluded.lease, acquired_at = excluded.acquired_at, renewed_at = excluded.renewed_at, released_at = NULL
"""

# Extends the lease of the newest term, and only one that has not run out: what has lapsed is never renewed back.
RENEW = """
UPDATE fastapi_singleton_term
SET renewed_at = :now, expires_after_boot = :expires, jobs = coalesce(:jobs, jobs),
    jobs_revision = jobs_revision + (:jobs IS NOT NULL)
WHERE name = :name AND token = :token AND worker = :worker AND released_at IS NULL
  AND boot = :boot AND expires_after_boot > :after_boot
"""

# Ends the term and keeps its token. From here on nothing can be claimed under it.
RELEASE = """
UPDATE fastapi_singleton_term SET released_at = :now WHERE name = :name AND token = :token AND worker = :worker
"""

# Lets the lease of a worker that goes away run out at once. Its term is still the newest, until somebody else leads.
EXPIRE = "UPDATE fastapi_singleton_term SET expires_after_boot = 0 WHERE name = :name AND worker = :worker"

# A worker with a thread still running stays known until its lease is over, so that its run is not given up before.
LEAVE = """
DELETE FROM fastapi_singleton_worker WHERE name = :name AND worker = :worker AND NOT EXISTS (
    SELECT 1 FROM fastapi_singleton_run WHERE name = :name AND worker = :worker AND outcome = 'running')
"""


def boot_of(worker: Worker) -> str:
    """The id of the boot a worker runs in; empty where the system does not tell."""
    return worker.process.partition("/")[0]


def contend(
    transaction: Transaction, name: str, me: Worker, lease: float, has_let_go: Callable[[str, str], bool]
) -> Term | None:
    """A new term if nobody holds the lease. `has_let_go` is told the worker and process that do, and says whether it is
    certain that they no longer believe in it."""
    row = transaction.execute(TERM, name=name).fetchone()
    if row is not None and is_held(transaction, row, boot_of(me)) and not has_let_go(row["worker"], row["process"]):
        return None
    boot, after_boot = boot_of(me), transaction.boot
    transaction.execute(
        ELECT, name=name, milliseconds=int(transaction.now.timestamp() * 1000), worker=me.worker, hostname=me.hostname,
        pid=me.pid, process=me.process, boot=boot, expires=after_boot + lease, lease=lease, now=stamp(transaction.now),
    )  # fmt: skip
    return Term(name, transaction.execute(TERM, name=name).fetchone()["token"], me.worker)


def renew(transaction: Transaction, term: Term, me: Worker, lease: float, jobs: str | None) -> bool:
    renewed = transaction.execute(
        RENEW, name=term.name, token=term.token, worker=me.worker, boot=boot_of(me), after_boot=transaction.boot,
        expires=transaction.boot + lease, now=stamp(transaction.now), jobs=jobs,
    )  # fmt: skip
    return renewed.rowcount == 1


def release(transaction: Transaction, term: Term) -> None:
    transaction.execute(RELEASE, name=term.name, token=term.token, worker=term.worker, now=stamp(transaction.now))


def leave(transaction: Transaction, name: str, me: Worker) -> None:
    transaction.execute(EXPIRE, name=name, worker=me.worker)
    transaction.execute(LEAVE, name=name, worker=me.worker)


def is_held(transaction: Transaction, row: sqlite3.Row, boot: str) -> bool:
    """Whether the lease in this row still runs. Where the boot has no id, an end further away than any lease could put it
    shows that the clock has started anew."""
    if row["released_at"] is not None or row["boot"] != boot:
        return False
    expires, lease = row["expires_after_boot"], row["lease"]
    return bool(transaction.boot < expires <= transaction.boot + lease)


def is_vacant(transaction: Transaction, name: str, boot: str) -> bool:
    row = transaction.execute(HOLD, name=name).fetchone()
    return row is None or not is_held(transaction, row, boot)


def is_newest(row: sqlite3.Row | None, token: int) -> bool:
    """Whether this is the newest term and was not released. Also when its lease has run out: what fences is whether
    somebody has led since."""
    return row is not None and row["token"] == token and row["released_at"] is None


def check(transaction: Transaction, term: Term) -> None:
    """Raise unless the term is the newest. A race has none."""
    if not term.is_race and not is_newest(transaction.execute(TERM, name=term.name).fetchone(), term.token):
        raise term_is_over()


def term_is_over() -> StoreError:
    return StoreError("The term is over.", hint="nothing to do: the next leader goes on.")


def leader_view(row: sqlite3.Row) -> LeaderView:
    times = {key: parse_time(row[key]) for key in ("acquired_at", "renewed_at")}
    return LeaderView(**{field.name: times.get(field.name, row[field.name]) for field in fields(LeaderView)})
