"""Who leads: a loop that contends for ever, and a trust that ends by itself.

                      acquire → None: wait for a vacancy
                        ┌──────┐
                        ▼      │
                   ┌───────────┴─┐   acquire → Term    ┌────────────┐
       start ────▶ │   standby   ├────────────────────▶│   leader   ├──┐ renew → True: trusted for
                   └──────┬──────┘                     └─┬────────┬─┘◀─┘ lease − margin after *sending*
                          │  ▲        lost               │        │
                          │  └───────────────────────────┘        │ retire
         stop_contending  ▼                                       ▼
                       stopped ◀──────────────────────────── release, notify

Rules:

1. Trust is a deadline on a local clock that goes on during suspend: `sent + lease − margin`, where `sent` is when the last
   good renewal left, not when its answer came. No callback and no `is_closed()` takes its place.
2. Any doubt is loss: renewal refused, failed or late, trust lapsed while nobody looked, duties that could not be taken up.
   A lost term is never renewed back; the worker lets go of it and contends for a new one.
3. A lost leader lays down its duties before it does anything else.
4. Nothing that the store does ends the loop, and the loop never raises: it logs, backs off and tries again.
5. At shutdown: stop contending, (the owner drains while the term is still renewed,) retire.
6. Before it first shows itself, and again after any failure, a worker looks who else is there: under one name there is one
   mode, and whoever comes later steps back.

A race (racing.py) goes the same way without opponents: where the claim alone decides, everybody is elected.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from .backends import Backend
from .errors import StoreError, UnsafeStoreError
from .records import JobView, Role, Term
from .timing import Timing, boot_clock

logger = logging.getLogger("fastapi_singleton")


class Duties:
    """What a leader does besides leading. This one: nothing at all."""

    async def take_up(self, term: Term) -> None:
        """Begin. Raising means that this worker cannot do the work: it resigns rather than lead idle."""

    def lay_down(self) -> None:
        """Stop beginning anything new, at once. Called whenever a term ends; must not raise or wait."""

    def renewed(self) -> None:
        """The term has been renewed. Raising means that the work has failed since: as in `take_up`."""

    def standing_by(self) -> None:
        """Somebody else leads."""

    def jobs(self) -> Sequence[JobView]:
        """What the leader shows the fleet of its jobs."""
        return ()


class SeveralDuties(Duties):
    """Duties that are taken up in their order and laid down together."""

    def __init__(self, *duties: Duties) -> None:
        self._duties = duties

    async def take_up(self, term: Term) -> None:
        for each in self._duties:
            await each.take_up(term)

    def lay_down(self) -> None:
        for each in self._duties:
            each.lay_down()

    def renewed(self) -> None:
        for each in self._duties:
            each.renewed()

    def standing_by(self) -> None:
        for each in self._duties:
            each.standing_by()

    def jobs(self) -> Sequence[JobView]:
        return [job for each in self._duties for job in each.jobs()]


class Elector:
    """One worker's part in the election. `term` may be read from any thread."""

    _strangers: frozenset[Role] = frozenset({"racer"})  # roles of another mode
    _won = "Elected: this worker leads with token {token}"
    _gave_back = "Released the leadership"
    _lost = "Lost the leadership: %s"

    def __init__(
        self, backend: Backend, timing: Timing, duties: Duties, *, clock: Callable[[], float] = boot_clock
    ) -> None:
        self._backend = backend
        self._timing = timing
        self._duties = duties
        self._clock = clock
        self._contending = True
        self._retiring = False
        self._newcomer = True
        self._woken = asyncio.Event()
        # Term and deadline change together, so that a thread never sees one without the other.
        self._trusted: tuple[Term, float] | None = None
        self._published: Sequence[JobView] | None = None
        self._failures = 0
        self._resignations = 0
        self._renewals = 0
        self.problem: str | None = None
        self.reachable = False
        self.seen_at: float | None = None
        self._in_contact_since: float | None = None

    @property
    def is_away(self) -> bool:
        """Whether the store is known not to answer; not yet known of one that has not been asked."""
        return self.problem is not None and not self.reachable

    @property
    def is_steady(self) -> bool:
        """Whether the store has answered for a whole lease: only then does it know who else is there."""
        since = self._in_contact_since
        return since is not None and self._clock() - since >= self._timing.lease

    @property
    def term(self) -> Term | None:
        """The term, as long as this worker may believe in it; None from the moment trust lapses."""
        trusted = self._trusted
        return trusted[0] if trusted is not None and self._clock() < trusted[1] else None

    def stop_contending(self) -> None:
        """Seek no new term. A term in hand is kept and renewed until `retire`."""
        self._contending = False
        self._woken.set()

    def retire(self) -> None:
        """Give the term back and end the loop."""
        self._contending = False
        self._retiring = True
        self._woken.set()

    async def run(self) -> None:
        """Contend until told to stop."""
        while self._contending:
            try:
                await self._contend()
            except StoreError as error:
                self._newcomer = True
                self._note(error)
                await self._pause(self._timing.backoff(self._failures))
            except Exception as error:
                self._failures += 1
                self.problem = f"The election failed unexpectedly ({type(error).__name__}); see the log of this worker."
                logger.exception("Unexpected error in the election; trying again")
                self._backend.forfeit()
                await self._pause(self._timing.backoff(self._failures))

    async def _seek(self) -> Term | None:
        return await self._backend.acquire()

    async def _renew(self, term: Term) -> bool:
        return await self._backend.renew(term, self._unpublished_jobs())

    async def _contend(self) -> None:
        await self._backend.connect()
        if self._newcomer:
            await self._backend.look()
            self._check_company()
            self._newcomer = False
        sent = self._clock()
        term = await self._seek()
        self._answered()
        if term is None:
            self._duties.standing_by()
            await self._wait(self._timing.jittered(self._timing.poll))
        elif not self._contending:
            await self._release(term)
        else:
            await self._lead(term, sent)

    async def _lead(self, term: Term, sent: float) -> None:
        self._trusted = term, sent + self._timing.trust
        self._published = None
        self._renewals = 0
        logger.info(self._won.format(token=term.token), extra=_extra(term))
        try:
            await self._duties.take_up(term)
            reason = await self._keep(term)
        except Exception as error:
            await self._resign(term, error)
            return
        finally:
            # Before anything else: whatever ended the term, from here on nothing may begin under it.
            self._trusted = None
            self._duties.lay_down()
        if reason is None:
            await self._release(term)
            logger.info(self._gave_back, extra=_extra(term))
        else:
            self._newcomer = True
            self._backend.forfeit()
            logger.warning(self._lost, reason, extra=_extra(term))
            if not self._renewals:
                # Elected and lost at once: whatever the reason, it must not become a spin.
                self._failures += 1
                await self._pause(self._timing.backoff(self._failures))

    async def _keep(self, term: Term) -> str | None:
        """Renew until the term is lost (why) or given back (None)."""
        while not self._retiring:
            assert self._trusted is not None
            deadline = self._trusted[1]
            sent = self._clock()
            if sent >= deadline:
                return "this process did not run for longer than its lease allows"
            try:
                kept = await self._renew(term)
            except StoreError as error:
                self._note(error)
                return str(error)
            if not kept:
                return "the store has ended the term"
            # Also when the answer is good: trust that has lapsed for a moment must not come back.
            if self._clock() >= deadline:
                return "the renewal was answered too late"
            self._answered()
            self._trusted = term, sent + self._timing.trust
            self._duties.renewed()
            self._renewals += 1
            self._resignations = 0
            await self._wait(self._timing.renew_every)
        return None

    async def _resign(self, term: Term, error: Exception) -> None:
        """The duties cannot be done here; perhaps another worker can, so step back for a while."""
        self._trusted = None
        self._duties.lay_down()
        self._resignations += 1
        self.problem = f"This worker was elected but could not do the work ({type(error).__name__}); see its log."
        logger.error("Resigning: the scheduler cannot be run on this worker", exc_info=error, extra=_extra(term))
        await self._release(term)
        await self._pause(min(self._timing.lease, self._timing.poll * 2 ** min(self._resignations, 10)))

    async def _release(self, term: Term) -> None:
        try:
            await self._backend.release(term)
        except StoreError as error:
            # The lock ends with its session or its lease; nobody has to be told.
            logger.warning("Could not release the leadership: %s", error, extra=_extra(term))
            self._backend.forfeit()

    def _check_company(self) -> None:
        found = [worker.worker for worker in self._backend.fleet.workers if worker.role in self._strangers]
        if found:
            raise UnsafeStoreError(
                f"Workers under the same name run in another mode ({', '.join(found[:3])}).",
                hint="use one mode everywhere, or another name=; after a deploy that changes it, this ends with the last "
                "of the old workers.",
            )

    def _unpublished_jobs(self) -> Sequence[JobView] | None:
        try:
            jobs = self._duties.jobs()
        except Exception:
            logger.exception("The jobs could not be listed")
            return None
        if jobs == self._published:
            return None
        self._published = jobs
        return jobs

    def _answered(self) -> None:
        if self.problem is not None and self._failures:
            logger.info("The store answers again")
        now = self._clock()
        if self._in_contact_since is None or self.seen_at is None or now - self.seen_at > self._timing.lease:
            self._in_contact_since = now
        self.seen_at = now
        self.reachable = True
        self._failures = 0
        if not self._resignations:
            self.problem = None

    def _note(self, error: StoreError) -> None:
        self._failures += 1
        if str(error) != self.problem:
            logger.warning("%s", error)
        self._in_contact_since = None
        self.problem = str(error)
        self.reachable = isinstance(error, UnsafeStoreError)

    async def _wait(self, seconds: float) -> None:
        """Wait for news from the store, that long at most; `stop_contending` and `retire` end it early."""
        await self._first(self._backend.vacancy(seconds))

    async def _pause(self, seconds: float) -> None:
        """Wait whatever the store has to say."""
        await self._first(asyncio.sleep(seconds))

    async def _first(self, waiting: Coroutine[Any, Any, None]) -> None:
        tasks = asyncio.ensure_future(waiting), asyncio.ensure_future(self._woken.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()  # what went wrong in it must not pass for news
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        # Heard once. While a draining leader goes on renewing, it must not spin.
        self._woken.clear()


def _extra(term: Term) -> dict[str, object]:
    return {"singleton_name": term.name, "token": term.token, "worker": term.worker}
