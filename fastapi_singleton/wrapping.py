"""`fastapi-singleton run NAME -- CMD…`: one cron line on many hosts, one command that runs.

The named lock keeps a second command from starting while one runs; the ledger keeps one from starting right after a fast
one has ended, on a host whose clock is a little behind. Both ask the store's clock, never a host's.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from .backends import Store
from .errors import LockHeldError
from .ledger import open_ledger
from .locks import Lock, hold
from .records import Ending, Entry, RunView, Verdict
from .timing import Timing, boot_clock

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_GRACE = 10.0  # between asking the command to stop and making it
CANNOT_START = 127


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


async def run(store: Store, wrapped: Wrapped) -> int:
    """The exit code: the command's own, or `busy_exit_code` if it was not run."""
    timing = Timing(wrapped.lease)
    try:
        async with hold(store, f"{wrapped.name}:run:{wrapped.job}", timing, wrapped.wait) as lock:
            return await _run_locked(store, wrapped, timing, lock)
    except LockHeldError as held:
        _say(f"{wrapped.job} is being run by {held.holder or 'another worker'}; not run here.")
        return wrapped.busy_exit_code


async def _run_locked(store: Store, wrapped: Wrapped, timing: Timing, lock: Lock) -> int:
    async with open_ledger(store, wrapped.name, timing) as (backend, ledger):
        now = backend.now()
        for earlier in await backend.runs(wrapped.job, 1):
            if reason := _too_soon(earlier, (now - earlier.scheduled_for).total_seconds(), wrapped.min_gap):
                _say(f"{wrapped.job} {reason}; not run here.")
                return wrapped.busy_exit_code
        entry = Entry(wrapped.name, wrapped.job, now)
        if await ledger.enter(entry) is not Verdict.YOURS:
            _say(f"{wrapped.job} has just been run by somebody else; not run here.")
            return wrapped.busy_exit_code
        began = boot_clock()
        code, error = await _command(wrapped.command, entry, lock)
        ledger.end(Ending(entry, "failed" if error else "succeeded", boot_clock() - began, error))
        return code


def _too_soon(earlier: RunView, seconds: float, min_gap: float) -> str | None:
    if seconds >= min_gap:
        return None
    return f"was run {max(seconds, 0.0):.1f} s ago by {earlier.worker} (run {earlier.id}, {earlier.outcome})"


async def _command(command: Sequence[str], entry: Entry, lock: Lock) -> tuple[int, str | None]:
    """Run the command to its end, pass signals on to it, and stop it if the lock is lost."""
    environment = {
        **os.environ,
        "FASTAPI_SINGLETON_RUN_ID": entry.id,
        "FASTAPI_SINGLETON_TOKEN": str(lock.token),
    }
    try:
        process = await asyncio.create_subprocess_exec(*command, env=environment)
    except OSError as error:
        _say(f"{command[0]} cannot be started: {error.strerror}.")
        return CANNOT_START, f"cannot be started: {error.strerror}"
    loop = asyncio.get_running_loop()
    for kind in _FORWARDED:
        loop.add_signal_handler(kind, _pass_on, process, kind)
    ended, lost = asyncio.create_task(process.wait()), asyncio.create_task(lock.wait_lost())
    try:
        await asyncio.wait((ended, lost), return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            _say("the lock was lost: stopping the command.")
            await _stop(process, ended)
            return 128 + signal.SIGTERM, "stopped, because its lock was lost"
        code = ended.result()
        if code < 0:
            return 128 - code, f"ended by signal {-code}"
        return code, f"exit code {code}" if code else None
    finally:
        lost.cancel()
        for kind in _FORWARDED:
            loop.remove_signal_handler(kind)


async def _stop(process: asyncio.subprocess.Process, ended: "asyncio.Task[int]") -> None:
    _pass_on(process, signal.SIGTERM)
    done, _ = await asyncio.wait((ended,), timeout=_GRACE)
    if not done:
        _pass_on(process, signal.SIGKILL)
        await ended


def _pass_on(process: asyncio.subprocess.Process, kind: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(kind)


def _say(text: str) -> None:
    print(f"fastapi-singleton: {text}", file=sys.stderr, flush=True)
