"""The lock, the term and the fleet on PostgreSQL: one session per worker does all of it.

Leading means owning the advisory lock of the name on this very session. The `term` row beside it gives the leadership its
growing token and lets every worker see who leads; it is written only by the session that owns the lock.

Hints make a hand-over quick, and nothing rests on them: a NOTIFY when a leader releases or is elected, the operating
system's word (pidfd) that a leader on this host has died. A poll every `timing.poll` seconds is the backstop.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from ...records import Fleet, JobView, LeaderView, Term, Worker, WorkerView
from ...timing import Timing
from .address import PostgresStore
from .session import Session

# Shows that this worker lives; rewrites its row only when it has grown old, so that most polls write nothing.
_SEEN = """
    INSERT INTO fastapi_singleton.worker AS w (name, worker, hostname, pid, started_at, last_seen_at)
    VALUES ($1, $2, $3, $4, $5, clock_timestamp())
    ON CONFLICT (name, worker) DO UPDATE SET last_seen_at = clock_timestamp()
    WHERE w.last_seen_at < clock_timestamp() - $6::interval / 8
    RETURNING w.*
"""
# A statement does not see what it writes itself, so its own row is put beside the others.
_WORKERS = """
    (SELECT coalesce(json_agg(w ORDER BY w.started_at, w.worker), '[]') FROM (
        SELECT * FROM seen UNION ALL
        SELECT * FROM fastapi_singleton.worker AS other
        WHERE other.name = $1 AND other.last_seen_at > clock_timestamp() - $6::interval
          AND other.worker NOT IN (SELECT seen.worker FROM seen)
    ) AS w) AS workers
"""

# Tries the lock without ever waiting for it, and reads the fleet, in one round trip. Gives at most one session `won`.
CONTEND = f"""
WITH seen AS ({_SEEN})
SELECT pg_try_advisory_lock($7) AS won, {_WORKERS},
       (SELECT row_to_json(t) FROM fastapi_singleton.term AS t
        WHERE t.name = $1 AND t.released_at IS NULL AND t.renewed_at > clock_timestamp() - $6::interval) AS term
"""

# Opens a term. The token grows even if the store lost its last writes, because it is never behind the store's clock.
ELECT = """
WITH long_gone AS (
    DELETE FROM fastapi_singleton.worker WHERE last_seen_at < clock_timestamp() - interval '1 day'
)
INSERT INTO fastapi_singleton.term AS t (name, token, worker, hostname, pid, acquired_at, renewed_at)
VALUES ($1, (extract(epoch FROM clock_timestamp()) * 1000)::bigint, $2, $3, $4, clock_timestamp(), clock_timestamp())
ON CONFLICT (name) DO UPDATE
SET token = greatest(t.token + 1, excluded.token), worker = excluded.worker, hostname = excluded.hostname,
    pid = excluded.pid, acquired_at = excluded.acquired_at, renewed_at = excluded.renewed_at, released_at = NULL
RETURNING t.token, pg_notify($5, 'elected')
"""

# Touches the term only while its token is still the newest; the lock itself lives as long as this session does.
RENEW = f"""
WITH seen AS ({_SEEN}),
mine AS (
    UPDATE fastapi_singleton.term SET renewed_at = clock_timestamp(), jobs = coalesce($8::text::jsonb, jobs)
    WHERE name = $1 AND token = $7 AND worker = $2 AND released_at IS NULL
    RETURNING *
)
SELECT (SELECT row_to_json(mine) FROM mine) AS term, {_WORKERS}
"""

# Ends the term, keeps its token, frees the lock, then (at commit, so after the unlock) wakes the standbys.
RELEASE = """
WITH ended AS (
    UPDATE fastapi_singleton.term SET released_at = clock_timestamp() WHERE name = $1 AND token = $2
)
SELECT pg_advisory_unlock($3), pg_notify($4, 'released')
"""

LEAVE = "DELETE FROM fastapi_singleton.worker WHERE name = $1 AND worker = $2"

_STATEMENTS = {"contend": CONTEND, "elect": ELECT, "renew": RENEW, "release": RELEASE, "leave": LEAVE}

# After a leader's death on this host the server still needs a moment to notice the closed socket and free the lock.
_EAGER = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256)


def lock_key(name: str) -> int:
    """The advisory lock's key: 64 bits of blake2b, the same in every process (hash() is not, hashtext() collides)."""
    digest = hashlib.blake2b(f"fastapi_singleton:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


class PostgresBackend:
    """One worker's session, and what it last saw of the fleet."""

    def __init__(self, store: PostgresStore, name: str, worker: Worker, timing: Timing) -> None:
        self._store = store
        self._name = name
        self._worker = worker
        self._timing = timing
        self._key = lock_key(name)
        self._channel = f"fastapi_singleton_{self._key & 0xFFFF_FFFF_FFFF_FFFF:016x}"
        self._session: Session | None = None
        self._owned: Term | None = None
        self._fleet = Fleet()
        self._news = asyncio.Event()
        self._eager: list[float] = []
        self._watched: str | None = None
        self._pidfd: int | None = None

    @property
    def fleet(self) -> Fleet:
        return self._fleet

    async def acquire(self) -> Term | None:
        # Cleared before asking: what is heard from now on may be newer than the answer.
        self._news.clear()
        session = await self._open_session()
        [row] = await session.fetch("contend", *self._presence(), self._key)
        self._see(row)
        if not row["won"]:
            return None
        me = self._worker
        [elected] = await session.fetch("elect", self._name, me.worker, me.hostname, me.pid, self._channel)
        self._owned = Term(self._name, elected["token"], me.worker)
        self._watch(None)
        return self._owned

    async def renew(self, term: Term, jobs: Sequence[JobView] | None = None) -> bool:
        session = self._session
        # The term lives and dies with the session that won it; on a newer session it cannot be kept.
        if session is None or not session.alive or term != self._owned:
            return False
        self._news.clear()
        published = None if jobs is None else json.dumps([_job_document(job) for job in jobs])
        [row] = await session.fetch("renew", *self._presence(), term.token, published)
        if row["term"] is None:
            self._drop_session()
            return False
        self._see(row)
        return True

    async def release(self, term: Term) -> None:
        if self._session is None or term != self._owned:
            return
        self._owned = None
        if self._session.alive:
            await self._session.fetch("release", self._name, term.token, self._key, self._channel)

    async def vacancy(self, timeout: float) -> None:
        if self._eager:
            timeout = min(timeout, self._eager.pop(0))
        try:
            async with asyncio.timeout(timeout):
                await self._news.wait()
        except TimeoutError:
            pass

    def forfeit(self) -> None:
        # The server frees the lock when the session ends; asking it to unlock could take as long as the network does.
        self._drop_session()

    async def close(self) -> None:
        self._watch(None)
        session, self._session, self._owned = self._session, None, None
        if session is None or not session.alive:
            return
        try:
            await session.fetch("leave", self._name, self._worker.worker)
            await session.close()
        except Exception:
            session.terminate()

    async def _open_session(self) -> Session:
        if self._session is not None and self._session.alive:
            return self._session
        self._drop_session()
        label = f"{self._worker.pid}:{self._name}@{self._worker.hostname}"
        # Cut at 63 bytes by the server and plain ASCII; the pid comes first, so that it is what survives.
        session = await Session.open(
            self._store,
            self._timing,
            f"fastapi_singleton:{label}".encode("ascii", "replace")[:63].decode(),
            _STATEMENTS,
        )
        own_pid = session.backend_pid
        await session.listen(self._channel, lambda pid, _: self._hear(pid, own_pid), self._news.set)
        self._session = session
        return session

    def _drop_session(self) -> None:
        session, self._session, self._owned = self._session, None, None
        if session is not None:
            session.terminate()

    def _hear(self, pid: int, own_pid: int) -> None:
        if pid != own_pid:
            self._news.set()

    def _presence(self) -> tuple[object, ...]:
        me = self._worker
        lease = timedelta(seconds=self._timing.lease)
        return self._name, me.worker, me.hostname, me.pid, me.started_at, lease

    def _see(self, row: Any) -> None:
        term = json.loads(row["term"]) if row["term"] else None
        leader = _leader_view(term) if term else None
        workers = tuple(_worker_view(w, leader) for w in json.loads(row["workers"]))
        jobs = tuple(_job_view(j) for j in term["jobs"]) if term else self._fleet.jobs
        self._fleet = Fleet(leader, workers, jobs)
        self._watch(leader)

    def _watch(self, leader: LeaderView | None) -> None:
        """Ask the operating system to tell when a leader on this host dies; a hint to try at once, nothing more."""
        here = self._worker
        wanted = leader is not None and leader.hostname == here.hostname and leader.pid != here.pid
        label = leader.worker if leader is not None and wanted else None
        if label == self._watched:
            return
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._watched = label
        self._eager.clear()
        if leader is None or label is None or not hasattr(os, "pidfd_open"):
            return
        try:
            self._pidfd = os.pidfd_open(leader.pid)
        except ProcessLookupError:
            self._eager = list(_EAGER)
        except OSError:
            pass
        else:
            asyncio.get_running_loop().add_reader(self._pidfd, self._leader_died)

    def _leader_died(self) -> None:
        if self._pidfd is not None:  # readable for ever from now on: once heard is enough
            asyncio.get_running_loop().remove_reader(self._pidfd)
        self._eager = list(_EAGER)
        self._news.set()


def _leader_view(term: dict[str, Any]) -> LeaderView:
    return LeaderView(
        term["worker"],
        term["hostname"],
        term["pid"],
        term["token"],
        _time(term["acquired_at"]),
        _time(term["renewed_at"]),
    )


def _worker_view(row: dict[str, Any], leader: LeaderView | None) -> WorkerView:
    return WorkerView(
        row["worker"],
        row["hostname"],
        row["pid"],
        "leader" if leader is not None and leader.worker == row["worker"] else "standby",
        _time(row["started_at"]),
        _time(row["last_seen_at"]),
    )


def _job_view(document: dict[str, Any]) -> JobView:
    next_run_at = document["next_run_at"]
    return JobView(document["id"], document["trigger"], _time(next_run_at) if next_run_at else None, document["paused"])


def _job_document(job: JobView) -> dict[str, Any]:
    next_run_at = job.next_run_at.isoformat() if job.next_run_at else None
    return {"id": job.id, "trigger": job.trigger, "next_run_at": next_run_at, "paused": job.paused}


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)
