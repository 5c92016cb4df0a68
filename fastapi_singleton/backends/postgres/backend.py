"""The lock, the term, the fleet and the ledger on PostgreSQL: one session per worker does all of it.

Leading means owning the advisory lock of the name on this very session. The `term` row beside it gives the leadership its
growing token and lets every worker see who leads; it is written only by the session that owns the lock.

Hints make a hand-over quick, and nothing rests on them: a NOTIFY when a leader releases or is elected, the operating
system's word (pidfd) that a leader on this host has died. A poll every `timing.poll` seconds is the backstop.
"""

import asyncio
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from ...errors import StoreError
from ...records import (
    Crowd,
    Cut,
    Ending,
    Entry,
    Fleet,
    JobChange,
    JobNote,
    JobState,
    JobView,
    LeaderView,
    RunView,
    Term,
    Verdict,
    Worker,
)
from ...timing import Timing, boot_clock
from ..vacancy import Vacancy
from ..views import clean, job_view, published, run_view, run_views, worker_view
from . import ledger
from .address import PostgresStore
from .leadership import STATEMENTS
from .session import Session


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
        self._lease = timedelta(seconds=timing.lease)
        self._key = lock_key(name)
        self._channel = f"fastapi_singleton_{self._key & 0xFFFF_FFFF_FFFF_FFFF:016x}"
        self._session: Session | None = None
        self._owned: Term | None = None
        self._opening = asyncio.Lock()
        self._attempts = 0
        self._closed = False
        self._fleet = Fleet()
        self._digest: str | None = None
        self._clock = datetime.now(UTC), boot_clock()  # until the store has told
        self._vacancy = Vacancy(worker)

    @property
    def fleet(self) -> Fleet:
        return self._fleet

    def now(self) -> datetime:
        told, heard = self._clock
        return told + timedelta(seconds=boot_clock() - heard)

    # -- leadership --------------------------------------------------------------------------------------------------

    async def connect(self) -> None:
        await self._open_session()

    async def look(self) -> None:
        session = await self._open_session()
        [row] = await session.fetch("look", self._name)
        await self._see(session, row)

    async def attend(self, jobs: Sequence[JobView] | None = None) -> None:
        session = await self._open_session()
        [row] = await session.fetch("attend", *self._presence(), published(jobs))
        await self._see(session, row)

    async def acquire(self) -> Term | None:
        self._vacancy.clear()
        session = await self._open_session()
        [row] = await session.fetch("contend", *self._presence(), self._key)
        if not row["won"]:
            await self._see(session, row)
            return None
        me = self._worker
        [elected] = await session.fetch("elect", self._name, me.worker, me.hostname, me.pid, self._channel, self._lease)
        self._owned = Term(self._name, elected["token"], me.worker)
        self._clock = row["now"], boot_clock()
        self._vacancy.watch(None)
        return self._owned

    async def renew(self, term: Term, jobs: Sequence[JobView] | None = None) -> bool:
        session = self._session
        # The term lives and dies with the session that won it; on a newer session it cannot be kept.
        if session is None or not session.alive or term != self._owned:
            return False
        self._vacancy.clear()
        rows = await session.fetch("renew", *self._presence(), term.token, published(jobs))
        if not rows:
            self._drop_session()
            return False
        await self._see(session, rows[0])
        return True

    async def release(self, term: Term) -> None:
        if self._session is None or term != self._owned:
            return
        self._owned = None
        if self._session.alive:
            await self._session.fetch("release", self._name, term.token, self._key, self._channel)

    async def vacancy(self, timeout: float) -> None:
        await self._vacancy.wait(timeout)

    def forfeit(self) -> None:
        # The server frees the lock when the session ends; asking it to unlock could take as long as the network does.
        self._drop_session()

    async def close(self) -> None:
        self._closed = True
        self._vacancy.watch(None)
        session, self._session, self._owned = self._session, None, None
        if session is None or not session.alive:
            return
        try:
            await session.fetch("leave", self._name, self._worker.worker)
            await session.close()
        except Exception:
            session.terminate()

    # -- ledger ------------------------------------------------------------------------------------------------------

    async def enter(self, entries: Sequence[Entry], beside: Collection[str] = ()) -> list[Verdict | Crowd]:
        session = await self._open_session()
        arguments = ledger.entry_arguments(self._name, self._worker.worker, self._timing.lease, entries, beside)
        answers = {row["nonce"]: ledger.answer(row) for row in await session.fetch("enter", *arguments)}
        return [answers[entry.nonce] for entry in entries]

    async def finish(self, endings: Sequence[Ending]) -> set[str]:
        session = await self._open_session()
        held = await session.fetch("finish", *ledger.ending_arguments(self._name, endings))
        return {row["nonce"] for row in held}

    async def ticks(self, term: Term, since: Mapping[str, datetime]) -> dict[str, set[datetime]]:
        found: dict[str, set[datetime]] = {key: set() for key in since}
        for row in await self._leading(term).fetch("ticks", self._name, list(since), list(since.values())):
            found[row["job"]].add(row["tick"])
        return found

    async def meet(self, term: Term, notes: Sequence[JobNote]) -> dict[str, JobState]:
        columns = [[getattr(note, field) for note in notes] for field in ("key", "fingerprint", "anchor", "paused")]
        rows: list[Any] = []
        while len(rows) < len(notes):
            rows = await self._leading(term).fetch("meet", self._name, *columns)
        return ledger.job_states(rows)

    async def recall(self, term: Term, keys: Collection[str]) -> dict[str, JobState]:
        return ledger.job_states(await self._leading(term).fetch("recall", self._name, list(keys)))

    async def note(self, term: Term, changes: Sequence[JobChange]) -> None:
        columns = [[getattr(change, field) for change in changes] for field in ("key", "paused", "removed", "since")]
        await self._leading(term).fetch("note", self._name, *columns)

    async def unseen(self, term: Term) -> dict[str, str]:
        rows = await self._leading(term).fetch("unseen", self._name, self._worker.worker)
        return {row["worker"]: row["process"] for row in rows}

    async def sweep(self, term: Term, silent: Collection[str] = ()) -> int:
        return len(await self._leading(term).fetch("sweep", self._name, self._worker.worker, list(silent)))

    async def cut(self, term: Term, jobs: Sequence[str], attempts: int, within: float) -> list[Cut]:
        rows = await self._leading(term).fetch("cut", self._name, jobs, attempts, timedelta(seconds=within))
        return [Cut(row["job"], row["tick"], row["attempt"], row["finished_at"]) for row in rows]

    async def prune(self, term: Term, keep: float) -> int:
        rows = await self._leading(term).fetch("prune", self._name, term.fence, timedelta(seconds=keep))
        return rows[0]["deleted"] if rows else 0

    async def runs(self, job: str, limit: int, before: datetime | None = None) -> list[RunView]:
        session = await self._open_session()
        rows = await session.fetch("runs", self._name, clean(job), before, limit)
        return [run_view(json.loads(row["run"])) for row in rows]

    async def examine(self) -> list[tuple[Literal["ok", "warning", "problem"], str, str]]:
        [row] = await (await self._open_session()).fetch("examine")
        left = row["left"]
        level: Literal["ok", "warning"] = "ok" if left > 20 else "warning"
        hint = (
            ""
            if left > 20
            else "raise max_connections, or the limit of the role or the database: each worker needs one beside its own pool."
        )
        return [
            ("ok", f"PostgreSQL {row['version']}, direct connection to a primary, lease enforced by the server", ""),
            (
                level,
                f"{row['used']} of {row['most']} connections are in use, {left} more can be made by this role",
                hint,
            ),
        ]

    # -- the session -------------------------------------------------------------------------------------------------

    def _leading(self, term: Term) -> Session:
        """The session that owns the term; what is done on it is fenced by the server. In a race there is no term to
        own, and any session will do."""
        if self._session is None or not self._session.alive or (term != self._owned and not term.is_race):
            raise StoreError("The term is over.", hint="nothing to do: the next leader goes on.")
        return self._session

    async def _open_session(self) -> Session:
        # The election and the ledger may both find the session gone.
        async with self._opening:
            if self._session is not None and self._session.alive:
                return self._session
            if self._closed:
                raise StoreError("The connection was closed.", hint="nothing to do: this worker is stopping.")
            self._drop_session()
            label = f"{self._worker.pid}:{self._name}@{self._worker.hostname}"
            self._attempts += 1
            self._session = await Session.open(
                self._store,
                self._timing,
                # Cut at 63 bytes by the server and plain ASCII; the pid comes first, so that it is what survives.
                f"fastapi_singleton:{label}".encode("ascii", "replace")[:63].decode(),
                STATEMENTS,
                attempt=self._attempts - 1,
                create=self._worker.role != "onlooker",
                channel=self._channel,
                on_message=self._hear,
                on_cut=self._vacancy.hear,
            )
            self._attempts = 0
            return self._session

    def _drop_session(self) -> None:
        session, self._session, self._owned = self._session, None, None
        if session is not None:
            session.terminate()

    def _hear(self, pid: int) -> None:
        if self._session is not None and pid != self._session.backend_pid:
            self._vacancy.hear()

    def _presence(self) -> tuple[object, ...]:
        me = self._worker
        return self._name, me.worker, me.hostname, me.pid, me.started_at, self._lease, me.version, me.process, me.role

    async def _see(self, session: Session, row: Any) -> None:
        self._clock = row["now"], boot_clock()
        leader = _leader_view(row) if row["current"] else None
        workers = tuple(worker_view(w, leader) for w in json.loads(row["workers"]))
        jobs, runs = self._fleet.jobs, self._fleet.runs
        if row["digest"] != self._digest:
            [history] = await session.fetch("history", self._name)
            last = {run.job: run for run in run_views(json.loads(history["last"] or "[]"))}
            jobs = tuple(job_view(job, last) for job in json.loads(history["jobs"] or "[]"))
            runs = run_views(json.loads(history["runs"] or "[]"))
            self._digest = row["digest"]
        self._fleet = Fleet(leader, workers, jobs, runs)
        self._vacancy.watch(leader)


def _leader_view(row: Any) -> LeaderView:
    return LeaderView(*(row[field.name] for field in fields(LeaderView)))
