"""One worker's term on SQLite, its view of the fleet, and its pen in the ledger.

A term lives in its row, which nobody but its worker renews and which anybody may replace once its lease has run out, once
it was released, or once it is certain that its holder no longer believes in it: the process has died (the operating system
says so), or it is this very process, which knows its own workers. The lease is what remains where nothing is certain.

A standby hears of a release by looking into the file every 30 ms while it waits, and of a death from the operating system
(pidfd). Both are hints; a poll every `timing.poll` seconds is the backstop.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TypeVar
from weakref import WeakValueDictionary

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
from . import examination, fleet, lease, ledger, memory
from .database import Database, OpenFile, Transaction, wall_clock
from .examination import Finding
from .fleet import Sight

Answer = TypeVar("Answer")

# The workers of this process, which can be asked themselves whether they still believe in a term.
_here: "WeakValueDictionary[str, SqliteBackend]" = WeakValueDictionary()


class SqliteBackend:
    """One worker's open file, and what it last saw of the fleet."""

    def __init__(self, path: str, name: str, worker: Worker, timing: Timing) -> None:
        self._path = path
        self._name = name
        self._worker = worker
        self._timing = timing
        self._database: Database | None = None
        self._owned: Term | None = None
        self._seeking = False
        self._opening = asyncio.Lock()
        self._closed = False
        self._clock = wall_clock(), boot_clock()  # until the store has told
        self._sight = Sight(*self._clock)
        self._vacancy = Vacancy(worker)
        _here[worker.worker] = self

    @property
    def fleet(self) -> Fleet:
        return self._sight.fleet

    def now(self) -> datetime:
        told, heard = self._clock
        return told + timedelta(seconds=boot_clock() - heard)

    # -- leadership --------------------------------------------------------------------------------------------------

    async def connect(self) -> None:
        await self._open()

    async def look(self) -> None:
        database = await self._open()
        me, name, before = self._worker, self._name, self._sight
        self._see(await database.ask(_reading(lambda t: fleet.look(t, name, me, before))))

    async def attend(self, jobs: Sequence[JobView] | None = None) -> None:
        database = await self._open()
        me, name, length, before = self._worker, self._name, self._timing.lease, self._sight
        news = published(jobs)

        def appear(file: OpenFile) -> Sight:
            with file.writing() as transaction:
                fleet.show(transaction, name, me, length)
                if news is not None:
                    fleet.publish(transaction, name, news)
            with file.reading() as transaction:
                return fleet.look(transaction, name, me, before)

        self._see(await database.ask(appear))

    async def acquire(self) -> Term | None:
        self._vacancy.clear()
        database = await self._open()
        me, name, length, before = self._worker, self._name, self._timing.lease, self._sight

        def seek(file: OpenFile) -> tuple[Term | None, Sight]:
            with file.writing() as transaction:
                fleet.show(transaction, name, me, length)
                term = lease.contend(transaction, name, me, length, self._has_let_go)
            with file.reading() as transaction:
                return term, fleet.look(transaction, name, me, before)

        # From before the row is written until this worker has heard of it, or never will.
        self._seeking = True
        try:
            self._owned, sight = await database.ask(seek)
        finally:
            self._seeking = False
        self._see(sight)
        return self._owned

    async def renew(self, term: Term, jobs: Sequence[JobView] | None = None) -> bool:
        database = self._database
        if database is None or term != self._term_in_hand:
            return False
        self._vacancy.clear()
        me, length, before = self._worker, self._timing.lease, self._sight
        news = published(jobs)

        def extend(file: OpenFile) -> Sight | None:
            with file.writing() as transaction:
                fleet.show(transaction, term.name, me, length)
                if not lease.renew(transaction, term, me, length, news):
                    return None
            with file.reading() as transaction:
                return fleet.look(transaction, term.name, me, before)

        sight = await database.ask(extend)
        if sight is None:
            self._owned = None
            return False
        self._see(sight)
        return True

    async def release(self, term: Term) -> None:
        if self._database is None or term != self._term_in_hand:
            return
        self._owned = None
        await self._database.ask(_writing(lambda transaction: lease.release(transaction, term)))

    async def vacancy(self, timeout: float) -> None:
        database = self._database
        stands_by = database is not None and database.alive and self._owned is None
        if database is not None and stands_by:
            name, boot = self._name, lease.boot_of(self._worker)
            database.watch(lambda transaction: lease.is_vacant(transaction, name, boot), self._vacancy.hear)
        try:
            await self._vacancy.wait(timeout)
        finally:
            if database is not None:
                database.unwatch()

    def forfeit(self) -> None:
        # Nothing is written: the lease runs out by itself, and this worker may take the next term at once.
        self._owned = None

    async def examine(self) -> list[Finding]:
        database = await self._open()
        return await database.ask(lambda _: examination.examine(self._path, self._worker))

    async def close(self) -> None:
        self._closed = True
        self._vacancy.watch(None)
        database, self._database, self._owned = self._database, None, None
        if database is None or not database.alive:
            return
        try:
            await database.ask(_writing(lambda transaction: lease.leave(transaction, self._name, self._worker)))
            await database.close()
        except StoreError:
            pass  # its row is forgotten once it has not been seen for a lease
        finally:
            database.drop()

    # -- ledger ------------------------------------------------------------------------------------------------------

    async def enter(self, entries: Sequence[Entry], beside: Collection[str] = ()) -> list[Verdict | Crowd]:
        name, me, length = self._name, self._worker, self._timing.lease
        return await self._write(lambda transaction: ledger.enter(transaction, name, me, length, entries, beside))

    async def finish(self, endings: Sequence[Ending]) -> set[str]:
        await self._write(lambda transaction: ledger.finish(transaction, self._name, endings))
        return set()  # nobody holds a single row here

    async def runs(self, job: str, limit: int, before: datetime | None = None) -> list[RunView]:
        database = await self._open()
        return await database.ask(_reading(lambda t: ledger.runs(t, self._name, job, limit, before)))

    async def ticks(self, term: Term, since: Mapping[str, datetime]) -> dict[str, set[datetime]]:
        return await self._lead(term, _reading, lambda t: ledger.ticks(t, self._name, since))

    async def cut(self, term: Term, jobs: Sequence[str], attempts: int, within: float) -> list[Cut]:
        return await self._lead(term, _reading, lambda t: ledger.cut(t, self._name, jobs, attempts, within))

    async def unseen(self, term: Term) -> dict[str, str]:
        return await self._lead(term, _reading, lambda t: ledger.unseen(t, self._name, self._worker))

    async def sweep(self, term: Term, silent: Collection[str] = ()) -> int:
        return await self._lead(term, _writing, lambda t: ledger.sweep(t, self._name, self._worker, silent))

    async def prune(self, term: Term, keep: float) -> int:
        return await self._lead(term, _writing, lambda t: ledger.prune(t, self._name, self._worker, keep))

    async def meet(self, term: Term, notes: Sequence[JobNote]) -> dict[str, JobState]:
        return await self._lead(term, _writing, lambda t: memory.meet(t, self._name, notes))

    async def recall(self, term: Term, keys: Collection[str]) -> dict[str, JobState]:
        return await self._lead(term, _reading, lambda t: memory.recall(t, self._name, keys))

    async def note(self, term: Term, changes: Sequence[JobChange]) -> None:
        await self._lead(term, _writing, lambda t: memory.note(t, self._name, changes))

    # -- the file ----------------------------------------------------------------------------------------------------

    async def _write(self, work: Callable[[Transaction], Answer]) -> Answer:
        database = await self._open()
        return await database.ask(_writing(work))

    async def _lead(
        self,
        term: Term,
        transacting: Callable[[Callable[[Transaction], Answer]], Callable[[OpenFile], Answer]],
        work: Callable[[Transaction], Answer],
    ) -> Answer:
        """Do what only a leader may do: in a transaction that has found the term to be the newest."""

        def checked(transaction: Transaction) -> Answer:
            lease.check(transaction, term)
            return work(transaction)

        if self._database is None or not (term.is_race or term == self._term_in_hand):
            raise lease.term_is_over()
        return await self._database.ask(transacting(checked))

    async def _open(self) -> Database:
        # The election and the ledger may both find the file let go of.
        async with self._opening:
            if self._database is not None and self._database.alive:
                return self._database
            if self._closed:
                raise StoreError("The file was closed.", hint="nothing to do: this worker is stopping.")
            self._owned = None
            self._database = await Database.open(self._path, self._timing, create=self._worker.role != "onlooker")
            return self._database

    @property
    def _term_in_hand(self) -> Term | None:
        """The term, unless an error has ended the connection it was kept on: then anything may have happened to it."""
        return self._owned if self._database is not None and self._database.alive else None

    def _has_let_go(self, worker: str, process: str) -> bool:
        """Whether it is certain that the worker, in that process, no longer believes in the term it holds."""
        if worker == self._worker.worker:
            return True  # this worker asks for a term because it has none
        if process and process == self._worker.process:
            holder = _here.get(worker)
            return holder is not None and not holder._seeking and holder._term_in_hand is None
        return provably_dead(process)

    def _see(self, sight: Sight) -> None:
        self._sight = sight
        self._clock = sight.now, sight.after_boot
        self._vacancy.watch(sight.fleet.leader)


def _writing(work: Callable[[Transaction], Answer]) -> Callable[[OpenFile], Answer]:
    def write(file: OpenFile) -> Answer:
        with file.writing() as transaction:
            return work(transaction)

    return write


def _reading(work: Callable[[Transaction], Answer]) -> Callable[[OpenFile], Answer]:
    def read(file: OpenFile) -> Answer:
        with file.reading() as transaction:
            return work(transaction)

    return read
