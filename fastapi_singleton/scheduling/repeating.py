"""Runs cut short by a crash, made again where the job's policy says so: at least once.

A repeat takes its turn among the job's other runs, as `max_instances` has it, and a busy job may seldom have room. So a
repeat that finds none is neither entered as skipped, which would use it up, nor left for a fixed time, which may always fall
into a run: it is tried again after a pause of random length, until it is too late and a row says so. The more there are the
longer the pause, or they would keep the store busy; what no executor takes is left for the next time somebody looks.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeVar

from ..backends import Backend
from ..jobs import policy_of
from ..ledger import Ledger
from ..records import MOST_ATTEMPTS, Cut, Entry, Term
from .gate import Due, Gate

Answer = TypeVar("Answer")
Ask = Callable[[Awaitable[Answer]], Awaitable[Answer]]

_PAUSE = (0.1, 0.6)
# So many repeats are tried again after such a pause; more of them after up to so many times that.
_FEW, _LONGEST = 10, 50
_GRACE = 60.0  # seconds for which a repeat that has come too late is still listed, so that a row can say so


class Repeating:
    """One worker's repeats. `jobs` gives those it can run, `dates` those of one tick, which have left the scheduler by the
    time their run is cut short; `submit` tells whether there is an executor that would take it, given room."""

    def __init__(
        self,
        gate: Gate,
        backend: Backend,
        ledger: Ledger,
        jobs: Callable[[], dict[str, Any]],
        dates: dict[str, Any],
        submit: Callable[[Any, list[Due]], bool],
    ) -> None:
        self._gate = gate
        self._backend = backend
        self._ledger = ledger
        self._jobs = jobs
        self._dates = dates
        self._submit = submit

    async def run(self, term: Term, ask: "Ask[Any]") -> None:
        """Until none is left that could be made. `ask` raises `StoreError` once the term is over."""
        while left := await self._look(term, ask):
            await ask(asyncio.sleep(random.uniform(*_PAUSE) * min(max(1.0, left / _FEW), _LONGEST)))

    async def _look(self, term: Term, ask: "Ask[Any]") -> int:
        """Try what can be tried; how many wait for their end or for room."""
        jobs = await self._repeatable(term, ask)
        if not jobs:
            return 0
        latest_start = {key: self._gate.latest_start(job) for key, job in jobs.items()}
        within = max(latest_start.values()) + _GRACE
        found: list[Cut] = await ask(self._backend.cut(term, list(jobs), MOST_ATTEMPTS, within))
        waiting = self._gate.without_verdict()
        left = 0
        for cut in found:
            attempt = cut.attempt + 1
            latest = cut.found_at + timedelta(seconds=latest_start[cut.job])
            if self._backend.now() > latest:
                self._remark_missed(term, cut, attempt)
                continue
            due = [Due(cut.tick, attempt, "rerun", latest)]
            left += (cut.job, cut.tick, attempt) in waiting or self._submit(jobs[cut.job], due)
        return left

    async def _repeatable(self, term: Term, ask: "Ask[Any]") -> dict[str, Any]:
        jobs = {key: job for key, job in self._jobs().items() if policy_of(job.func).on_crash == "rerun"}
        # A date's definition is enough to run it again, unless the application has removed it.
        spent = {key: job for key, job in self._dates.items() if key not in jobs}
        for key, state in (await ask(self._backend.recall(term, list(spent)))).items() if spent else ():
            if not (state.removed or state.paused):
                jobs[key] = spent[key]
        return jobs

    def _remark_missed(self, term: Term, cut: Cut, attempt: int) -> None:
        reason = "it found no room in time beside the job's other runs"
        self._ledger.remark(
            [Entry(term.name, cut.job, cut.tick, attempt, "rerun", term.fence, outcome="missed", error=reason)]
        )
