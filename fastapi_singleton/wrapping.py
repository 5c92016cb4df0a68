"""`fastapi-singleton run NAME -- CMD…`: one cron line on many hosts, one command that runs.

The named lock keeps a second command from starting while one runs; the ledger keeps one from starting right after a fast
one has ended, on a host whose clock is a little behind. Both ask the store's clock, never a host's.

The command must not outlive the lock. It is a session of its own, signalled as a whole; if the lock is lost it is told to stop,
and killed when the lease is over at the latest. If this process is killed or stands still, a guardian does that (and for the
command itself, should the guardian be gone too, the kernel: on Linux).
"""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar

from .backends import Backend, Store
from .errors import LockHeldError, StoreError
from .guardian import Guardian
from .ledger import open_ledger
from .locks import Lock, hold, lock_name
from .records import UNBEGUN, Ending, Entry, RunView, Verdict, Worker
from .timing import Timing, boot_clock

Answer = TypeVar("Answer")

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
CANNOT_START = 127
_MOST_SKEW = 60.0  # that the store's clock is expected to go back: a run from beyond was made while it was wrong
_ROWS = 10  # that are looked at: one, but for claims that were taken back
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Wrapped:
    """What to run, and under which conditions."""

    name: str
    job: str
    command: Sequence[str]
    lease: float = 10.0
    wait: float = 0.0
    min_gap: float = 30.0
    busy_exit_code: int = 0


def run(store: Store, wrapped: Wrapped) -> int:
    """The exit code: the command's own, or `busy_exit_code` if it was not run."""
    guardian = Guardian.fork()
    try:
        return asyncio.run(run_guarded(store, wrapped, guardian))
    finally:
        guardian.dismiss()


async def run_guarded(store: Store, wrapped: Wrapped, guardian: Guardian) -> int:
    """The same, on an event loop; the guardian was forked before it."""
    timing = Timing(wrapped.lease)
    try:
        async with hold(store, lock_name(wrapped.name, "run", wrapped.job), timing, wrapped.wait) as lock:
            return await _run_locked(store, wrapped, timing, lock, guardian)
    except LockHeldError as held:
        _say(f"{wrapped.job} {await _first(store, wrapped, timing, held)}; not run here.")
        return wrapped.busy_exit_code


async def _first(store: Store, wrapped: Wrapped, timing: Timing, held: LockHeldError) -> str:
    """The run that came first, once it can be told: whoever holds the lock may have come to look, like this process, or be
    about to enter its run."""
    backend = store.open(wrapped.name, Worker.here(role="guest"), timing)
    deadline = boot_clock() + timing.request_timeout
    try:
        while True:
            await backend.look()
            if reason := _too_soon(await _runs(backend, wrapped), backend.now(), wrapped.min_gap):
                return reason
            if boot_clock() >= deadline:
                break
            await asyncio.sleep(0.05)
    except StoreError:
        pass  # what is known is enough
    finally:
        await backend.close()
        backend.forfeit()
    return f"is being run by {held.holder or 'another worker'}"


async def _run_locked(store: Store, wrapped: Wrapped, timing: Timing, lock: Lock, guardian: Guardian) -> int:
    async with open_ledger(store, wrapped.name, timing) as (backend, ledger):
        now = backend.now()
        if reason := _too_soon(await _runs(backend, wrapped), now, wrapped.min_gap, alone=True):
            _say(f"{wrapped.job} {reason}; not run here.")
            return wrapped.busy_exit_code
        entry = Entry(wrapped.name, wrapped.job, now)
        verdict = await _before(lock, ledger.enter(entry))
        if lock.lost:
            # This process stood still, or the store was away: somebody else may hold the lock, and run the command.
            ledger.end(Ending(entry, "abandoned", 0.0, UNBEGUN))
            _say(f"the lock was lost before {wrapped.job} began; not run here.")
            return wrapped.busy_exit_code
        if verdict is not Verdict.YOURS:
            _say(f"{wrapped.job} has just been run by somebody else; not run here.")
            return wrapped.busy_exit_code
        began = boot_clock()
        code, error = await _command(wrapped.command, entry, lock, guardian, grace=timing.margin)
        ledger.end(Ending(entry, "failed" if error else "succeeded", boot_clock() - began, error))
        return code


async def _runs(backend: Backend, wrapped: Wrapped) -> Sequence[RunView]:
    """The newest runs, but for those from when the store's clock was ahead: they must not keep the command from running
    until it gets there."""
    until = backend.now() + timedelta(seconds=max(wrapped.min_gap, _MOST_SKEW))
    return await backend.runs(wrapped.job, _ROWS, until)


def _too_soon(runs: Sequence[RunView], now: datetime, min_gap: float, *, alone: bool = False) -> str | None:
    """Which run stands in the way of another, if one does. To the holder of the lock (`alone`) none does by running on: it
    was cut short, whatever its row says."""
    for earlier in [run for run in runs if run.error != UNBEGUN][:1]:
        seconds = max((now - earlier.scheduled_for).total_seconds(), 0.0)
        if earlier.outcome == "running" and not alone:
            return f"is being run by {earlier.worker}, since {seconds:.1f} s (run {earlier.id})"
        if seconds < min_gap:
            return f"was run {seconds:.1f} s ago by {earlier.worker} (run {earlier.id}, {earlier.outcome})"
    return None


async def _before(lock: Lock, asking: Awaitable[Answer]) -> Answer | None:
    """The answer, unless the lock is lost before it comes."""
    asked, lost = asyncio.ensure_future(asking), asyncio.create_task(lock.wait_lost())
    try:
        await asyncio.wait((asked, lost), return_when=asyncio.FIRST_COMPLETED)
        return asked.result() if asked.done() else None
    finally:
        for task in (asked, lost):
            task.cancel()
        await asyncio.gather(asked, lost, return_exceptions=True)


async def _command(
    command: Sequence[str], entry: Entry, lock: Lock, guardian: Guardian, grace: float
) -> tuple[int, str | None]:
    """Run the command to its end, pass signals on to it, and stop it if the lock is lost."""
    environment = {
        **os.environ,
        "FASTAPI_SINGLETON_RUN_ID": entry.id,
        "FASTAPI_SINGLETON_TOKEN": str(lock.token),
    }
    with _Signals() as signals:
        try:
            process = await asyncio.create_subprocess_exec(
                *command, env=environment, start_new_session=True,
                preexec_fn=_watched(guardian, lock.trusted_until + grace),
            )  # fmt: skip
        except OSError as error:
            guardian.rest()
            _say(f"{command[0]} cannot be started: {error.strerror}.")
            return CANNOT_START, f"cannot be started: {error.strerror}"
        signals.pass_on_to(process.pid)
        watching = asyncio.create_task(_watch(guardian, process.pid, lock, grace))
        try:
            code = await _before(lock, process.wait())
        finally:
            watching.cancel()
        if code is None or (code == -signal.SIGKILL and lock.lost):
            _say("the lock was lost: stopping the command.")
            await _stop(process, grace)
            guardian.rest()
            return 128 + signal.SIGTERM, "stopped, because its lock was lost"
        guardian.rest()
        if code < 0:
            return 128 - code, f"ended by signal {-code}"
        return code, f"exit code {code}" if code else None


def _watched(guardian: Guardian, until: float) -> Callable[[], None]:
    """What the command does before it begins: from its first moment on it is watched over."""
    kernel = ctypes.CDLL(None) if sys.platform == "linux" else None  # found before the fork, after which little is safe

    def before() -> None:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # the guardian may have been killed
        guardian.watch(os.getpid(), until)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        if kernel is not None:
            kernel.prctl(_DIE_WITH_PARENT, signal.SIGKILL)

    return before


async def _watch(guardian: Guardian, group: int, lock: Lock, grace: float) -> None:
    while True:
        guardian.watch(group, lock.trusted_until + grace)
        await asyncio.sleep(grace)


async def _stop(process: asyncio.subprocess.Process, grace: float) -> None:
    _signal(process.pid, signal.SIGTERM)
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), grace)
    _signal(process.pid, signal.SIGKILL)  # also what it has left behind
    await process.wait()


class _Signals:
    """Passes signals on to the command; those that come before there is one, as soon as there is."""

    def __enter__(self) -> "_Signals":
        self._early: list[signal.Signals] = []
        self._to: int | None = None
        # What whoever started this process wants to be ignored (nohup, a shell's background) the command ignores too.
        self._heard = [kind for kind in _FORWARDED if signal.getsignal(kind) is not signal.SIG_IGN]
        for kind in self._heard:
            asyncio.get_running_loop().add_signal_handler(kind, self._hear, kind)
        return self

    def __exit__(self, *_: object) -> None:
        for kind in self._heard:
            asyncio.get_running_loop().remove_signal_handler(kind)

    def pass_on_to(self, pid: int) -> None:
        self._to = pid
        for kind in self._early:
            _signal(pid, kind)

    def _hear(self, kind: signal.Signals) -> None:
        if self._to is None:
            self._early.append(kind)
        else:
            _signal(self._to, kind)


def _signal(group: int, kind: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, kind)


def _say(text: str) -> None:
    with suppress(OSError):  # a disk that is full, say: what happened matters more than that it is told
        print(f"fastapi-singleton: {text}", file=sys.stderr, flush=True)
