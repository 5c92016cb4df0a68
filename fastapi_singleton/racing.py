"""No leader: every worker's scheduler fires, and whoever claims a tick first runs it.

What an election does for a leader, the presence in the fleet does for a racer: while it can show that it lives it may run
jobs, and its runs are not given up. Nothing has to be handed over when it dies, because the others fire anyway.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from .backends import Backend
from .election import Duties, Elector
from .records import JobView, Role, Term
from .timing import Timing, boot_clock


class Racer(Elector):
    """One worker's part in a race: it takes part for as long as it can show that it is alive."""

    _strangers: frozenset[Role] = frozenset({"leader", "standby"})
    _won = "This worker runs jobs beside the others: the claim decides"
    _gave_back = "Left the race"
    _lost = "Dropped out of the race: %s"

    def __init__(
        self, backend: Backend, timing: Timing, duties: Duties, *, term: Term, clock: Callable[[], float] = boot_clock
    ) -> None:
        super().__init__(backend, timing, duties, clock=clock)
        self._part = term

    async def _seek(self) -> Term | None:
        await self._backend.attend()
        # Two modes that come at the same moment have not seen each other before: then it is the racer who steps back.
        self._check_company()
        return replace(self._part)  # a new one each time: what was begun under an earlier one must not go on under this

    async def _renew(self, term: Term) -> bool:
        await self._backend.attend(self._unpublished_jobs())
        self._check_company()
        return True

    async def _release(self, term: Term) -> None:
        """Nothing was held."""

    async def _wait(self, seconds: float) -> None:
        await self._pause(seconds)  # there is no vacancy to hear of

    def _unpublished_jobs(self) -> Sequence[JobView] | None:
        # All racers show the same jobs; one of them is enough.
        shown = [replace(job, last_run=None) for job in self._backend.fleet.jobs]
        return None if (jobs := super()._unpublished_jobs()) == shown else jobs
