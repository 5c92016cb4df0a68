"""What the election's loop does step by step: in which order, how often, and how it ends. The store is scripted here,
because these are promises of the loop alone; what a store does is asked of a real one in tests/contract."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fastapi_singleton.election import Duties, Elector
from fastapi_singleton.errors import StoreError, UnsafeStoreError
from fastapi_singleton.records import Fleet, JobView, Term
from fastapi_singleton.timing import Timing

from ..conftest import eventually

START = 1000.0
AWAY = StoreError("The store is away.", hint="wait.")
UNSAFE = UnsafeStoreError("The store is a replica.", hint="use the primary.")
UNFORESEEN = RuntimeError("nobody thought of this")


class Stage(Duties):
    """Store, duties and clock in one: `acts` says what happens in a step, `log` what did, and who trusted itself."""

    def __init__(self, acts: "Acts", leads: bool) -> None:
        self.acts, self.leads, self.keeps = dict(acts), leads, True
        self.now = START
        self.log: list[tuple[str, bool]] = []
        self.published: list[tuple[int, Sequence[JobView] | None]] = []
        self.elector: Any = None
        self.fleet = Fleet()
        self._tokens = itertools.count(1)

    @property
    def steps(self) -> list[str]:
        return [step for step, _ in self.log]

    def step(self, step: str) -> Any:
        self.log.append((step, self.elector.term is not None))
        return self.acts[step](self) if step in self.acts else None

    async def connect(self) -> None:
        await (self.step("connect") or asyncio.sleep(0))

    async def look(self) -> None:
        if "look" in self.acts:
            self.step("look")

    async def acquire(self) -> Term | None:
        await (self.step("acquire") or asyncio.sleep(0))
        return Term("unit", next(self._tokens), "me") if self.leads else None

    async def renew(self, term: Term, jobs: Sequence[JobView] | None = None) -> bool:
        self.published.append((term.token, jobs))
        await (self.step("renew") or asyncio.sleep(0))
        return self.keeps

    async def release(self, term: Term) -> None:
        await (self.step("release") or asyncio.sleep(0))

    def forfeit(self) -> None:
        self.step("forfeit")

    async def vacancy(self, timeout: float) -> None:
        await (self.step("vacancy") or asyncio.sleep(timeout))

    async def take_up(self, term: Term) -> None:
        await (self.step("take_up") or asyncio.sleep(0))

    def lay_down(self) -> None:
        self.step("lay_down")

    def renewed(self) -> None:
        self.step("renewed")

    def standing_by(self) -> None:
        self.step("standing_by")

    def jobs(self) -> Sequence[JobView]:
        return self.step("jobs") or ()


Act = Callable[[Stage], Any]
Acts = dict[str, Act]


class Hasty(Elector):
    """Writes down how long it would pause, and does not."""

    async def _pause(self, seconds: float) -> None:
        self.pauses = [*getattr(self, "pauses", []), seconds]
        await asyncio.sleep(0)


@asynccontextmanager
async def contending(
    acts: Acts, lease: float = 2.0, *, leads: bool = True, kind: type[Elector] = Elector
) -> AsyncIterator[tuple[Any, Stage, "asyncio.Task[None]"]]:
    """A loop that runs; at the end it must stop soon after it is told to, and leave no task behind."""
    before = asyncio.all_tasks()
    stage: Any = Stage(acts, leads)
    elector = stage.elector = kind(stage, Timing(lease), stage, clock=lambda: stage.now)
    task = asyncio.create_task(elector.run())
    try:
        yield elector, stage, task
        elector.retire()
        await asyncio.wait([task], timeout=30)
        assert task.done()
        assert asyncio.all_tasks() == before
        assert elector.term is None
    finally:
        elector.retire()


def failing(error: Exception, times: float = float("inf")) -> Act:
    """Raises that often, then goes well."""
    counter = itertools.count(1)

    def act(_: Stage) -> None:
        if next(counter) <= times:
            raise error.with_traceback(None)

    return act


def refuse(stage: Stage) -> None:
    stage.keeps = False


def lapse(stage: Stage, seconds: float = 18.0) -> None:
    stage.now += seconds


LOSSES = [("renew", refuse), ("renew", failing(AWAY)), ("renew", lapse), ("take_up", lapse)]


@pytest.mark.parametrize("slow", ["acquire", "connect"])
async def test_trust_counts_from_when_the_election_was_sent_and_connecting_does_not_eat_it(slow: str) -> None:
    go = asyncio.Event()
    acts: Acts = {slow: lambda stage: lapse(stage, 4.0), "take_up": lambda _: go.wait()}
    async with contending(acts, 20.0) as (elector, stage, _):
        await eventually(lambda: "take_up" in stage.steps, "an election")
        sent = START if slow == "acquire" else START + 4.0
        stage.now = sent + 17.99
        assert elector.term is not None
        stage.now = sent + 18.0
        assert elector.term is None
        go.set()


@pytest.mark.parametrize(("lapses", "then"), [("take_up", "renew"), ("renew", "renewed")])
async def test_once_the_trust_has_lapsed_no_renewal_is_sent_and_no_answer_counts(lapses: str, then: str) -> None:
    async with contending({lapses: lapse}, 20.0) as (_, stage, _):
        await eventually(lambda: stage.steps.count("acquire") > 1, "the next election")
        assert then not in stage.steps


@pytest.mark.parametrize(
    ("step", "act", "last"),
    [
        *((*loss, "forfeit") for loss in LOSSES),
        ("renew", lambda stage: stage.elector.retire(), "release"),
        ("renewed", failing(UNFORESEEN), "release"),
        ("take_up", failing(UNFORESEEN), "release"),
    ],
)
async def test_a_term_is_disbelieved_and_laid_down_before_it_is_let_go(step: str, act: Act, last: str) -> None:
    async with contending({step: act}, 20.0) as (_, stage, _):
        await eventually(lambda: last in stage.steps, "the end of the term")
        end = stage.steps.index(last)
        assert stage.log[end - 1 : end + 1] == [("lay_down", False), (last, False)]


@pytest.mark.parametrize("step", ["connect", "acquire"])
@pytest.mark.parametrize("error", [AWAY, UNSAFE, UNFORESEEN])
async def test_a_store_that_fails_is_asked_again_after_a_pause_and_shown(step: str, error: Exception) -> None:
    async with contending({step: failing(error)}) as (elector, stage, _):
        await eventually(lambda: stage.steps.count(step) > 2, "a third try")
        stage.log.clear()
        await asyncio.sleep(0.5)
        assert stage.steps.count(step) < 10
        assert elector.problem == str(error) or (error is UNFORESEEN and "RuntimeError" in elector.problem)
        assert elector.reachable == (error is UNSAFE)
        await eventually(lambda: stage.steps.count(step), "another try")
        assert ("forfeit" in stage.steps) == (error is UNFORESEEN)
        stage.acts.clear()
        await eventually(lambda: elector.term and elector.problem is None and elector.reachable, "an election")


@pytest.mark.parametrize("error", [AWAY, UNFORESEEN])
async def test_a_renewal_that_fails_ends_the_term_is_shown_and_a_new_one_is_sought(error: Exception) -> None:
    async with contending({"renew": failing(error)}) as (elector, stage, _):
        await eventually(lambda: elector.problem, "the problem")
        stage.acts.clear()
        await eventually(lambda: elector.term and elector.term.token > 1 and "renewed" in stage.steps, "a new term")


@pytest.mark.parametrize("error", [AWAY, UNFORESEEN])
async def test_a_release_that_fails_is_survived_and_the_term_forfeited(error: Exception) -> None:
    async with contending({"release": failing(error)}) as (elector, stage, task):
        await eventually(lambda: "renewed" in stage.steps, "a renewal")
        elector.retire()
        await asyncio.wait_for(task, 30)
        assert stage.steps[-3:] == ["lay_down", "release", "forfeit"]


@pytest.mark.parametrize("since", ["standing_by", "renewed", "release"])
@pytest.mark.parametrize("word", ["stop_contending", "retire"])
async def test_a_worker_that_waits_for_hours_hears_at_once_that_it_shall_stop(since: str, word: str) -> None:
    acts: Acts = {"vacancy": lambda _: asyncio.sleep(3600)}
    acts |= {"take_up": failing(UNFORESEEN)} if since == "release" else {}
    async with contending(acts, 86_400.0, leads=since != "standing_by") as (elector, stage, task):
        elector._resignations = 1100
        await eventually(lambda: since in stage.steps, "the wait")
        getattr(elector, word)()
        if since == "renewed" and word == "stop_contending":
            await eventually(lambda: stage.steps.count("renewed") > 1, "a renewal of its own accord")
        else:
            await asyncio.wait_for(task, 30)


async def test_a_draining_leader_goes_on_renewing_at_its_own_pace() -> None:
    async with contending({}, 1.0) as (elector, stage, _):
        await eventually(lambda: "renewed" in stage.steps, "a renewal")
        elector.stop_contending()
        await eventually(lambda: stage.steps.count("renewed") > 3, "more renewals")
        stage.log.clear()
        await asyncio.sleep(0.5)
        assert stage.steps.count("renew") < 5
        assert elector.term is not None


@pytest.mark.parametrize("word", ["stop_contending", "retire"])
async def test_a_term_won_while_stopping_is_given_back_and_never_led(word: str) -> None:
    acts: Acts = {"acquire": lambda stage: getattr(stage.elector, word)()}
    async with contending(acts) as (_, stage, task):
        await asyncio.wait_for(task, 30)
        assert stage.log == [("connect", False), ("acquire", False), ("release", False)]


@pytest.mark.parametrize("step", ["take_up", "renewed"])
async def test_a_resigned_worker_shows_its_problem_until_the_work_goes_on(step: str) -> None:
    shown: list[Any] = []
    acts: Acts = {step: failing(UNFORESEEN, times=3), "lay_down": lambda stage: shown.append(stage.elector.problem)}
    async with contending(acts, 0.4) as (elector, stage, _):
        await eventually(lambda: len(shown) > 4 and elector.term and elector.problem is None, "a term that goes well")
        assert all("could not do the work (RuntimeError)" in str(problem) for problem in shown[1:])
        assert stage.steps.count("release") == 3
        assert "forfeit" not in stage.steps


async def test_the_pauses_of_a_worker_that_resigns_again_and_again_grow_up_to_the_lease() -> None:
    async with contending({"take_up": failing(UNFORESEEN)}, 60.0, kind=Hasty) as (elector, stage, _):
        await eventually(lambda: len(getattr(elector, "pauses", [])) > 6, "resignations")
        assert elector.pauses[:7] == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
        elector._resignations, elector.pauses = 1100, []
        await eventually(lambda: len(elector.pauses) > 2, "more resignations")
        assert set(elector.pauses) == {60.0}
        assert "forfeit" not in stage.steps


@pytest.mark.parametrize(("step", "act"), [*LOSSES, ("renew", failing(UNFORESEEN))])
async def test_a_worker_that_is_elected_and_loses_at_once_does_not_spin(step: str, act: Act) -> None:
    async with contending({}) as (_, stage, _):
        await eventually(lambda: "renewed" in stage.steps, "a term that goes well")
        stage.acts |= {"renew": refuse, step: act}
        await eventually(lambda: stage.steps.count("acquire") > 2, "a term lost at once")
        stage.log.clear()
        await asyncio.sleep(0.5)
        assert stage.steps.count("acquire") < 20


@pytest.mark.parametrize("scene", ["standby", "leader", "connect", "take_up", "renew", "release"])
async def test_cancelling_the_loop_ends_it_whatever_step_it_is_in(scene: str) -> None:
    for steps in range(16):
        acts: Acts = {"vacancy": lambda _: asyncio.sleep(0), scene: lambda _: asyncio.sleep(0)}
        async with contending(acts, leads=scene != "standby", kind=Hasty) as (_, stage, task):
            stage.keeps = scene != "renew"
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task], timeout=10)
            assert task.cancelled()
            assert stage.steps.count("take_up") <= stage.steps.count("lay_down")


async def test_jobs_that_cannot_be_listed_do_not_end_the_term() -> None:
    async with contending({"jobs": failing(UNFORESEEN)}, 0.2) as (_, stage, _):
        await eventually(lambda: len(stage.published) > 2, "renewals")
        assert set(stage.published) == {(1, None)}


async def test_jobs_are_published_when_they_change_and_again_in_a_new_term() -> None:
    nightly = (JobView("nightly", "cron", None, False),)
    async with contending({"jobs": lambda _: nightly}, 0.2) as (_, stage, _):
        await eventually(lambda: len(stage.published) > 2, "renewals")
        assert stage.published[:3] == [(1, nightly), (1, None), (1, None)]
        stage.acts.clear()
        await eventually(lambda: (1, ()) in stage.published, "the change")
        stage.keeps = False
        await eventually(lambda: (2, ()) in stage.published, "the next term's first renewal")


def test_a_worker_is_steady_once_the_store_has_answered_for_a_whole_lease() -> None:
    stage: Any = Stage({}, True)
    elector = stage.elector = Elector(stage, Timing(2.0), stage, clock=lambda: stage.now)

    def after(seconds: float, answer: bool = True) -> bool:
        stage.now += seconds
        if answer:
            elector._answered()
        return elector.is_steady

    assert [after(0), after(1.0), after(0.9), after(0.2)] == [False, False, False, True]
    elector._note(AWAY)
    assert [after(0.1, False), after(0.1), after(1.9), after(0.2)] == [False, False, False, True]
    assert after(5.0) is False  # it was not heard of for longer than a lease
