"""At most once in the fleet: the first caller of a key runs the function; its row keeps everybody else from it.

Whoever claims holds the lock of the key, and looks again at the lock once the claim is answered: had it been frozen in
between for longer than the lease, somebody else might have claimed too. Then it takes its claim back and starts over.
"""

import inspect
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from .backends import Store
from .errors import LockHeldError, described
from .jobs import enter_run, leave_run
from .ledger import Ledger, open_ledger
from .locks import hold, lock_name
from .records import UNBEGUN, Ending, Entry, Run, Verdict
from .timing import Timing, boot_clock

_ROWS = 50  # of a key: one, but for claims that were taken back


async def run_once(
    store: Store, name: str, key: str, timing: Timing, keep_runs: float, func: Callable[[], Any]
) -> bool:
    """Whether this call ran it. What it raises is recorded, and raised; nobody tries again."""
    job = f"once:{key}"
    while True:
        async with AsyncExitStack() as stack:
            try:
                lock = await stack.enter_async_context(hold(store, lock_name(name, "once", key), timing, 0.0))
            except LockHeldError:
                return False
            backend, ledger = await stack.enter_async_context(open_ledger(store, name, timing, keep_runs))
            if any(run.error != UNBEGUN for run in await backend.runs(job, _ROWS)):
                return False
            entry = Entry(name, job, backend.now())
            if await ledger.enter(entry) is not Verdict.YOURS:
                return False
            if not lock.lost:
                await _run(ledger, entry, timing, func)
                return True
            ledger.end(Ending(entry, "abandoned", 0.0, UNBEGUN))


async def _run(ledger: Ledger, entry: Entry, timing: Timing, func: Callable[[], Any]) -> None:
    began, ending = boot_clock(), Ending(entry, "succeeded", 0.0)
    token = enter_run(Run(entry.id, entry.job, entry.tick, entry.attempt, entry.token, entry.nonce))
    try:
        result = func()
        if inspect.isawaitable(result):
            await result
    except BaseException as error:
        ending = Ending(entry, "failed", 0.0, described(error))
        raise
    finally:
        leave_run(token)
        ledger.end(Ending(entry, ending.outcome, boot_clock() - began, ending.error))
        await ledger.flush(timing.request_timeout)
