"""At most once in the fleet: the first caller of a key runs the function; its row keeps everybody else from it."""

import inspect
from collections.abc import Callable
from typing import Any

from .backends import Store
from .errors import LockHeldError
from .jobs import enter_run, leave_run
from .ledger import open_ledger
from .locks import hold
from .records import Ending, Entry, Run, Verdict
from .timing import Timing, boot_clock


async def run_once(store: Store, name: str, key: str, timing: Timing, func: Callable[[], Any]) -> bool:
    """Whether this call ran it. What it raises is recorded, and raised; nobody tries again."""
    job = f"once:{key}"
    try:
        async with hold(store, f"{name}:{job}", timing, 0.0), open_ledger(store, name, timing) as (backend, ledger):
            entry = Entry(name, job, backend.now())
            if await backend.runs(job, 1) or await ledger.enter(entry) is not Verdict.YOURS:
                return False
            began, ending = boot_clock(), Ending(entry, "succeeded", 0.0)
            token = enter_run(Run(entry.id, entry.job, entry.tick, entry.attempt, entry.token, entry.nonce))
            try:
                result = func()
                if inspect.isawaitable(result):
                    await result
            except BaseException as error:
                ending = Ending(entry, "failed", 0.0, f"{type(error).__name__}: {error}"[:2000])
                raise
            finally:
                leave_run(token)
                ledger.end(Ending(entry, ending.outcome, boot_clock() - began, ending.error))
                await ledger.flush(timing.request_timeout)
            return True
    except LockHeldError:
        return False
