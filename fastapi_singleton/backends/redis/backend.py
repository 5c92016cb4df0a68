"""The lease, the term, the fleet and the ledger on Redis: one session per worker asks, one listener hears of hand-overs.

Leading means that the lease carries this worker's token. The lease goes by itself when it is not renewed; its time begins
when the server executes the renewal, so never before this worker's own trust. What counts for the ledger is the term's
token, which nothing takes away: however a lease came to be lost, only the newest term can claim.

Hints make a hand-over quick, and nothing rests on them: a message when a leader lets go or is elected, the operating
system's word (pidfd) that a leader on this host has died. A poll every `timing.poll` seconds is the backstop. A lease whose
holder is *provably* dead need not be waited for.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from ...errors import StoreError
from ...processes import provably_dead
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
    RunView,
    Term,
    Verdict,
    Worker,
)
from ...timing import Timing, boot_clock
from ..vacancy import Vacancy
from ..views import published
from . import ledger_scripts, rows, scripts, tidying_scripts
from .address import RedisStore
from .listening import Listener
from .scripts import Script
from .server import findings
from .session import Session
from .sight import Sight, history, job_state, presence

logger = logging.getLogger("fastapi_singleton")


class RedisBackend:
    """One worker's connections, and what it last saw of the fleet."""

    def __init__(self, store: RedisStore, name: str, worker: Worker, timing: Timing) -> None:
        self._store = store
        self._name = name
        self._worker = worker
        self._timing = timing
        self._lease = rows.microseconds(timing.lease)
        self._keys = tuple(rows.prefix(name) + key for key in scripts.KEYS)
        self._channel = rows.prefix(name) + "news"
        self._presence = self._lease, worker.worker, presence(worker, timing.lease)
        self._label = rows.label(name, worker.hostname, worker.pid)
        self._session: Session | None = None
        self._parting: Session | None = None  # the last one that was left with last words
        self._owned: Term | None = None
        self._bid = ""  # the last try for the lease on this session that succeeded, or is not answered yet
        self._opening = asyncio.Lock()
        self._closed = False
        self._fleet = Fleet()
        self._digest: str | None = None
        self._clock = datetime.now(UTC), boot_clock()  # until the store has told
        self._vacancy = Vacancy(worker)
        self._listener = Listener(store, timing, self._label, self._channel, worker.worker, self._vacancy.hear)

    @property
    def fleet(self) -> Fleet:
        return self._fleet

    def now(self) -> datetime:
        told, heard = self._clock
        return told + timedelta(seconds=boot_clock() - heard)

    # -- leadership --------------------------------------------------------------------------------------------------

    async def connect(self) -> None:
        await self._open_session()
        await self._listener.listen()

    async def look(self) -> None:
        await self._open_session()
        await self._see_all(Sight.parse(await self._run(scripts.LOOK, self._lease)))

    async def attend(self, jobs: Sequence[JobView] | None = None) -> None:
        await self._open_session()
        await self._see_all(Sight.parse(await self._run(scripts.ATTEND, *self._presence, published(jobs) or "")))

    async def acquire(self) -> Term | None:
        self._vacancy.clear()
        await self.connect()
        won, sight = await self._contend()
        if not won and sight.leader is not None and provably_dead(sight.process):
            won, sight = await self._contend(dead=sight.leader.token)
        if not won:
            await self._see_all(sight)
            return None
        assert sight.leader is not None
        self._see(sight)
        self._owned = Term(self._name, sight.leader.token, self._worker.worker)
        return self._owned

    async def renew(self, term: Term, jobs: Sequence[JobView] | None = None) -> bool:
        # A term lives no longer than the session it was won on: after any failure there is doubt, and doubt is loss.
        if not self._owns(term):
            return False
        self._vacancy.clear()
        seen = await self._run(scripts.RENEW, *self._presence, str(term.token), published(jobs) or "")
        if seen is None:
            self._owned = None
            return False
        await self._see_all(Sight.parse(seen))
        return True

    async def release(self, term: Term) -> None:
        if not self._owns(term):
            return
        self._owned, self._bid = None, ""
        await self._run(scripts.RELEASE, str(term.token), self._channel, self._worker.worker)

    async def vacancy(self, timeout: float) -> None:
        await self._vacancy.wait(timeout)

    def forfeit(self) -> None:
        self._drop_session()

    async def examine(self) -> list[tuple[Literal["ok", "warning", "problem"], str, str]]:
        await self._open_session()
        return [*findings(await self._ask(Session.look_at_the_server))]

    async def close(self) -> None:
        self._closed = True
        self._vacancy.watch(None)
        session, bid = self._session, self._bid
        self._session, self._owned, self._bid = None, None, ""
        try:
            if session is not None and session.alive:
                if bid:
                    await session.run(scripts.FORFEIT, self._keys, bid, self._channel, self._worker.worker)
                await session.run(scripts.LEAVE, self._keys, self._worker.worker)
                await session.close()
        except Exception as error:
            logger.debug("Could not take leave of the store: %s", error)
        finally:
            if session is not None:
                session.terminate()
            await self._listener.close()
            if self._parting is not None:
                await self._parting.parted()

    # -- ledger ------------------------------------------------------------------------------------------------------

    async def enter(self, entries: Sequence[Entry], beside: Collection[str] = ()) -> list[Verdict | Crowd]:
        await self._open_session()
        arguments = rows.entry_arguments(entries, beside)
        answers = await self._run(ledger_scripts.ENTER, self._lease, self._worker.worker, *arguments)
        return [rows.answer(answer) for answer in answers]

    async def finish(self, endings: Sequence[Ending]) -> set[str]:
        await self._open_session()
        await self._run(ledger_scripts.FINISH, *rows.ending_arguments(endings))
        return set()

    async def ticks(self, term: Term, since: Mapping[str, datetime]) -> dict[str, set[datetime]]:
        bounds = [bound for job, tick in since.items() for bound in (rows.after_tick(job, tick), rows.last_field(job))]
        found = await self._run_leading(term, ledger_scripts.TICKED, *bounds)
        return {job: {rows.tick_of(field) for field in fields} for job, fields in zip(since, found, strict=True)}

    async def meet(self, term: Term, notes: Sequence[JobNote]) -> dict[str, JobState]:
        states = await self._run_leading(term, ledger_scripts.MEET, *rows.note_arguments(notes))
        return {note.key: job_state(*state) for note, state in zip(notes, states, strict=True)}

    async def recall(self, term: Term, keys: Collection[str]) -> dict[str, JobState]:
        states = await self._run_leading(term, ledger_scripts.RECALL, *map(rows.job_key, keys))
        return {key: job_state(*state) for key, state in zip(keys, states, strict=True) if state}

    async def note(self, term: Term, changes: Sequence[JobChange]) -> None:
        await self._run_leading(term, ledger_scripts.NOTE, *rows.change_arguments(changes))

    async def unseen(self, term: Term) -> dict[str, str]:
        return dict(await self._run_leading(term, tidying_scripts.UNSEEN, self._worker.worker))

    async def sweep(self, term: Term, silent: Collection[str] = ()) -> int:
        arguments = self._worker.worker, *silent
        given_up: int = await self._run_leading(term, tidying_scripts.SWEEP, *arguments)
        return given_up

    async def cut(self, term: Term, jobs: Sequence[str], attempts: int, within: float) -> list[Cut]:
        by_key = {rows.job_key(job): job for job in jobs}
        arguments = str(attempts), rows.microseconds(within), *by_key
        found = await self._run_leading(term, tidying_scripts.CUT, *arguments)
        return [
            Cut(by_key[job], rows.moment(tick), int(attempt), rows.moment(found_at))
            for job, tick, attempt, found_at in found
        ]

    async def prune(self, term: Term, keep: float) -> int:
        deleted: int = await self._run_leading(term, tidying_scripts.PRUNE, rows.microseconds(keep))
        return deleted

    async def runs(self, job: str, limit: int, before: datetime | None = None) -> list[RunView]:
        await self._open_session()
        end = rows.last_field(job) if before is None else rows.tick_field(job, before)
        return rows.views(await self._run(ledger_scripts.LISTED, end, rows.first_field(job), str(limit)))

    # -- the session -------------------------------------------------------------------------------------------------

    def _owns(self, term: Term) -> bool:
        return self._session is not None and self._session.alive and term == self._owned

    async def _contend(self, dead: int | None = None) -> tuple[bool, Sight]:
        """Try for the lease, also if it is that of the token whose holder is dead."""
        self._bid = os.urandom(8).hex()
        found_dead = "" if dead is None else str(dead)
        won, seen = await self._run(scripts.CONTEND, *self._presence, self._bid, found_dead, self._channel)
        if not won:
            self._bid = ""
        return bool(won), Sight.parse(seen)

    async def _run(self, script: Script, *arguments: str) -> Any:
        return await self._ask(lambda session: session.run(script, self._keys, *arguments))

    async def _ask(self, question: Callable[[Session], Awaitable[Any]]) -> Any:
        """Ask on the session there is. Any failure, and any doubt whether it was heard, ends session and term."""
        session = self._session
        if session is None:
            raise StoreError("The connection was given up meanwhile.", hint="nothing to do: it is made anew.")
        try:
            return await question(session)
        except BaseException:
            if self._session is session:
                self._drop_session()
            else:  # somebody has dropped it, and there may be a new one that has nothing to do with this
                session.terminate()
            raise

    async def _run_leading(self, term: Term, script: Script, *arguments: str) -> Any:
        """Run a script that only the leader may; the script itself sees to it that the token is the newest."""
        over = StoreError("The term is over.", hint="nothing to do: the next leader goes on.")
        if not (self._owns(term) or term.is_race):
            raise over
        answer = await self._run(script, "" if term.is_race else str(term.token), *arguments)
        if answer is None:
            self._owned = None
            raise over
        return answer

    async def _open_session(self) -> None:
        # The election and the ledger may both find the session gone.
        async with self._opening:
            if self._session is not None and self._session.alive:
                return
            self._drop_session()
            if not self._closed:
                self._session = await Session.open(self._store, self._timing, self._label, self._keys[0])
            if self._closed:  # perhaps only just
                self._drop_session()
                raise StoreError("The connection was closed.", hint="nothing to do: this worker is stopping.")

    def _drop_session(self) -> None:
        session, bid = self._session, self._bid
        self._session, self._owned, self._bid = None, None, ""
        if session is None:
            return
        if bid:
            # Also if the answer to the bid is still to come. If this does not get through, the lease goes by itself.
            session.part(scripts.FORFEIT, self._keys, bid, self._channel, self._worker.worker)
            self._parting = session
        else:
            session.terminate()

    # -- the fleet ---------------------------------------------------------------------------------------------------

    def _see(self, sight: Sight) -> None:
        self._clock = sight.now, boot_clock()
        self._fleet = replace(self._fleet, leader=sight.leader, workers=sight.workers)
        self._vacancy.watch(sight.leader)

    async def _see_all(self, sight: Sight) -> None:
        """Also the jobs and runs, which most answers need not carry: they are asked for when they have changed."""
        if sight.digest is not None and sight.digest != self._digest:
            jobs, runs = history(*await self._run(ledger_scripts.HISTORY))
            self._fleet = replace(self._fleet, jobs=tuple(jobs), runs=tuple(runs))
            self._digest = sight.digest
        self._see(sight)
