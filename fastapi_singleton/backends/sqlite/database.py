"""The open file, on a thread of its own, checked before anything rests on it.

The event loop never touches the file: it hands a piece of work to the thread and waits for the answer, so long and no
longer. Whatever goes wrong, and any doubt whether the work was done, ends this `Database`; the next question opens another.
A thread that is stuck in the operating system is left behind, and does not keep the process from ending.

- Every piece of work is one or two tiny transactions. A writing one takes the file's write lock at its beginning, so that
  it never has to be repeated halfway, and is on the disk (synchronous=FULL) before it is answered.
- A file that was deleted or replaced goes on working for whoever has it open, and for nobody else: two leaders. So no
  transaction counts unless after its end the path still names the open file, and the log beside it likewise.
"""

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from ...errors import EmptyStoreError, UnsafeStoreError
from ...timing import Timing, boot_clock
from .faults import explain, gone, let_go, no_answer
from .schema import ensure_schema

# Opening holds up nobody, so it may take longer than a short lease would allow.
_SETUP_TIMEOUT = 5.0
# SQLite's own waiting for a lock ends before the asker's does, so that the answer says what was in the way.
_LOCK_SHARE = 0.8
# How often a standby looks whether the leader has let go. One look is one SELECT of 3 µs on this thread; the three standbys
# of four workers spend 0.7 % of a core on them (1.0 % at 20 ms) and take over 10 ms after a release (median; 20 ms at most).
# PRAGMA data_version costs as much as the SELECT, and changes with every claim besides.
WATCH_EVERY = 0.03

Answer = TypeVar("Answer")


def wall_clock() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True)
class Transaction:
    """An open transaction and the moment it began, on both clocks, measured while it already held what it locks."""

    connection: sqlite3.Connection
    now: datetime
    boot: float

    def execute(self, sql: str, **arguments: object) -> sqlite3.Cursor:
        return self.connection.execute(sql, arguments)


class OpenFile:
    """The connection as the thread sees it."""

    def __init__(self, path: str, lock_patience: float) -> None:
        self._path = path
        self._lock_patience = lock_patience
        self._connection: sqlite3.Connection | None = None
        self._log = ""
        self._identity: tuple[object, ...] = ()
        self.is_wanted: Callable[[], bool] = lambda: True

    def open(self, patience: float, *, create: bool = True) -> None:
        if not create and not os.path.exists(self._path):
            raise EmptyStoreError(f"There is no {self._path}")
        deadline = time.monotonic() + patience
        self._connection = connection = sqlite3.connect(self._path, timeout=patience, isolation_level=None)
        opened = _inode(self._path)
        self._log = os.path.realpath(self._path) + "-wal"
        connection.row_factory = sqlite3.Row
        _keep_a_log(connection, deadline)
        connection.execute("PRAGMA synchronous = FULL")
        if connection.execute("PRAGMA synchronous").fetchone()[0] != 2:
            raise UnsafeStoreError(
                "SQLite did not accept synchronous=FULL, so a claim could be lost after it was answered.",
                hint="use a Python whose sqlite3 module is a stock build.",
            )
        ensure_schema(connection)
        connection.execute(f"PRAGMA busy_timeout = {max(1, round(self._lock_patience * 1000))}")
        # The log is open from the first statement on and stays as long as anybody has the file open.
        self._identity = self._present_identity()
        if opened is None or self._identity[0] != opened:
            raise gone(self._path)

    @contextmanager
    def writing(self) -> Iterator[Transaction]:
        """Nobody else writes from its beginning to its end; committed unless it raises or nobody waits for it any more."""
        with self._transaction("BEGIN IMMEDIATE") as transaction:
            yield transaction

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        """One state of the file throughout; waits for nobody."""
        with self._transaction("BEGIN") as transaction:
            yield transaction

    def glance(self) -> Transaction:
        """For a single reading statement, which is a transaction by itself, where the file's identity does not matter."""
        assert self._connection is not None
        return Transaction(self._connection, wall_clock(), boot_clock())

    def close(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[Transaction]:
        connection = self._connection
        assert connection is not None
        connection.execute(begin)
        try:
            yield Transaction(connection, wall_clock(), boot_clock())
            if not self.is_wanted():
                raise let_go(self._path)
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                with suppress(sqlite3.Error):  # what went wrong before says more
                    connection.execute("ROLLBACK")
        # Last of all: whoever comes to another file from now on comes after what was answered.
        if self._present_identity() != self._identity:
            raise gone(self._path)

    def _present_identity(self) -> tuple[object, ...]:
        return _inode(self._path), _inode(self._log)


@dataclass
class _Call(Generic[Answer]):
    """A piece of work on its way to the thread, and the way back of its answer."""

    work: Callable[[OpenFile], Answer]
    loop: asyncio.AbstractEventLoop
    reply: "asyncio.Future[Answer]" = field(init=False)
    is_wanted: bool = True

    def __post_init__(self) -> None:
        self.reply = self.loop.create_future()

    def execute(self, file: OpenFile) -> None:
        if not self.is_wanted:
            return
        file.is_wanted = lambda: self.is_wanted
        try:
            answer = self.work(file)
        except BaseException as error:
            self._send(self.reply.set_exception, error)
        else:
            self._send(self.reply.set_result, answer)

    def _send(self, settle: Callable[[Any], None], value: object) -> None:
        def arrive() -> None:
            if not self.reply.done():
                settle(value)

        with suppress(RuntimeError):  # the loop has been closed meanwhile
            self.loop.call_soon_threadsafe(arrive)


@dataclass(frozen=True)
class _Watch:
    noticed: Callable[[Transaction], bool]
    tell: Callable[[], object]
    loop: asyncio.AbstractEventLoop


class Database:
    """One open file as the event loop sees it. Whatever goes wrong on it ends it: nothing is half-done."""

    def __init__(self, path: str, timing: Timing) -> None:
        self._path = path
        self._patience = timing.request_timeout
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._watch: _Watch | None = None
        self._one_at_a_time = asyncio.Lock()
        self.alive = True

    @classmethod
    async def open(cls, path: str, timing: Timing, *, create: bool = True) -> "Database":
        database = cls(path, timing)
        patience = max(_SETUP_TIMEOUT, timing.request_timeout)
        # A daemon: a disk that does not answer must not keep the process from ending.
        thread = threading.Thread(target=database._serve, name="fastapi_singleton:sqlite", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise explain(error, path) from None
        await database._ask(lambda file: file.open(patience * _LOCK_SHARE, create=create), patience)
        return database

    async def ask(self, work: Callable[[OpenFile], Answer]) -> Answer:
        """Have the thread do a piece of work. Any failure, and any doubt whether it was done, ends this database."""
        return await self._ask(work, self._patience)

    async def _ask(self, work: Callable[[OpenFile], Answer], patience: float) -> Answer:
        async with self._one_at_a_time:
            if not self.alive:
                raise let_go(self._path)
            call = _Call(work, asyncio.get_running_loop())
            self._calls.put(call)
            try:
                async with asyncio.timeout(patience):
                    return await call.reply
            except BaseException as error:
                call.is_wanted = False
                self.drop()
                if isinstance(error, TimeoutError):
                    raise no_answer(self._path) from None
                if isinstance(error, Exception):
                    raise explain(error, self._path) from None
                raise

    def watch(self, noticed: Callable[[Transaction], bool], tell: Callable[[], object]) -> None:
        """Look every few milliseconds, and tell once when there is something to notice. A hint: nothing rests on it."""
        loop = asyncio.get_running_loop()
        self._watch = _Watch(noticed, tell, loop)
        # Wakes the thread, which waits for its next call without a time limit.
        self._calls.put(_Call(lambda _: None, loop))

    def unwatch(self) -> None:
        self._watch = None

    def drop(self) -> None:
        """Let go of the file at once: the thread closes it when it comes to it."""
        if self.alive:
            self.alive = False
            self._watch = None
            self._calls.put(None)

    async def close(self) -> None:
        """Let go of the file, and wait for it."""
        try:
            await self.ask(OpenFile.close)
        finally:
            self.drop()

    # -- on the thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        file = OpenFile(self._path, self._patience * _LOCK_SHARE)
        try:
            while (call := self._next_call(file)) is not None:
                call.execute(file)
        finally:
            file.close()

    def _next_call(self, file: OpenFile) -> _Call[Any] | None:
        while True:
            watch = self._watch
            try:
                return self._calls.get(timeout=None if watch is None else WATCH_EVERY)
            except Empty:
                if watch is not None and watch is self._watch and _has_noticed(file, watch):
                    self._watch = None
                    with suppress(RuntimeError):  # the loop has been closed meanwhile
                        watch.loop.call_soon_threadsafe(watch.tell)


def _has_noticed(file: OpenFile, watch: _Watch) -> bool:
    try:
        return watch.noticed(file.glance())
    except Exception:
        return True  # the next question will say what is wrong


def _keep_a_log(connection: sqlite3.Connection, deadline: float) -> None:
    """Write-ahead logging, so that readers and the one writer never wait for each other."""
    while True:
        try:
            mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            break
        except sqlite3.OperationalError as error:
            # Of several that convert a new file at once SQLite refuses some without waiting.
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    if mode != "wal":
        raise UnsafeStoreError(
            f"SQLite cannot keep a write-ahead log for this file (its journal mode stays {mode}).",
            hint="use a file on a local disk.",
        )


def _inode(path: str) -> tuple[int, int] | None:
    # Never by opening it: closing any descriptor of a file gives up all locks that this process has on it.
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
