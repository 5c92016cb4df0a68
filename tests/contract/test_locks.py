"""Locks and leader tasks on every store."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from fastapi_singleton import ConfigurationError, LockHeldError, Singleton, current_run
from fastapi_singleton.ledger import open_ledger
from fastapi_singleton.records import Ending, Entry, JobView, Verdict

from ..conftest import eventually
from ..leading import leading
from ..stores import RealStore

HOLDER = """
import asyncio, sys
from fastapi_singleton import Singleton

async def main():
    async with Singleton(url=sys.argv[1], lease=float(sys.argv[2])).lock("reports", wait=30):
        print("held", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def holder(store: RealStore, lease: float) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, store.url, str(lease)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


async def test_a_lock_excludes_others_also_in_the_same_worker_and_names_the_holder(store: RealStore) -> None:
    here, there = Singleton(url=store.url, lease=2.0), Singleton(url=store.url, lease=2.0)
    async with here.lock("reports") as lock:
        assert not lock.lost
        for other in (here, there):
            with pytest.raises(LockHeldError, match=str(os.getpid())) as caught:
                async with other.lock("reports"):
                    raise AssertionError("ran unlocked")
            assert caught.value.holder is not None
        async with there.lock("something else"):
            pass
        async with Singleton(url=store.url, name="another fleet").lock("reports"):
            pass
    async with there.lock("reports") as again:
        assert again.token > lock.token
    assert lock.lost


async def test_a_lock_is_waited_for_and_comes_at_once_when_it_is_released(store: RealStore) -> None:
    singleton = Singleton(url=store.url, lease=8.0)
    order: list[str] = []

    async def second() -> None:
        async with singleton.lock("reports", wait=30):
            order.append("second")

    async with singleton.lock("reports"):
        waiting = asyncio.create_task(second())
        await asyncio.sleep(0.2)
        order.append("first")
    await asyncio.wait_for(waiting, 30)
    assert order == ["first", "second"]


async def test_locks_of_long_ago_are_forgotten_and_their_tokens_grow_nevertheless(store: RealStore) -> None:
    singleton = Singleton(url=store.url)
    tokens = []
    for _ in range(2):
        async with singleton.lock("once in a while") as lock:
            tokens.append(lock.token)
        assert await singleton.once(f"key {tokens[-1]}", lambda: None)
        async with leading(store.url) as leader:
            term = await leader.elect()
            await leader.backend.prune(term, 86_400.0)
            await store.locks_after_two_days()
            await leader.backend.prune(term, 86_400.0)
        assert await store.locks_after_two_days() == 0
    assert tokens[0] < tokens[1]


async def test_a_lock_is_kept_for_longer_than_its_lease(store: RealStore) -> None:
    singleton = Singleton(url=store.url, lease=0.4)
    async with singleton.lock("reports") as lock:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            assert not lock.lost
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_holder_that_is_killed_or_frozen_is_followed_by_another(store: RealStore, how: signal.Signals) -> None:
    process = await asyncio.to_thread(holder, store, 1.0)
    try:
        process.send_signal(how)
        async with Singleton(url=store.url, lease=1.0).lock("reports", wait=30) as lock:
            assert not lock.lost
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_wrong_names_and_waits_are_refused() -> None:
    singleton = Singleton(url="sqlite:///locks.sqlite3")
    for name, wait in (("", 0), ("x", -1), ("x", "soon")):
        with pytest.raises(ConfigurationError):
            singleton.lock(name, wait=wait)  # type: ignore[arg-type]


async def test_once_is_at_most_once_whoever_asks_and_whatever_becomes_of_it(store: RealStore) -> None:
    workers = [Singleton(url=store.url, lease=2.0) for _ in range(4)]
    ran: list[str] = []

    async def work() -> None:
        ran.append(current_run().job)

    results = await asyncio.gather(*(worker.once("import", work) for worker in workers for _ in range(3)))
    assert sum(results) == 1
    assert ran == ["once:import"]
    assert not await workers[0].once("import", work)

    def fails() -> None:
        raise ValueError("half done")

    with pytest.raises(ValueError, match="half done"):
        await workers[1].once("other", fails)
    assert not await workers[2].once("other", fails)
    async with workers[0].lifespan():
        [row] = await workers[0].runs("once:other")
    assert (row.outcome, row.error) == ("failed", "ValueError: half done")


@pytest.mark.parametrize("published", [True, False])
async def test_rows_are_kept_for_as_long_as_the_application_says_also_while_it_is_away(
    store: RealStore, published: bool
) -> None:
    keeps = Singleton(url=store.url, name="unit", lease=2.0, keep_runs=365 * 86_400)
    async with leading(store.url, lease=2.0) as worker:
        term = await worker.elect()
        if published:
            assert await worker.backend.renew(term, [JobView("job", "cron", None, False)])
        old = Entry("unit", "once:import", datetime.now(UTC) - timedelta(days=40))
        assert await worker.ledger.enter(old) is Verdict.YOURS
        await worker.backend.finish([Ending(old, "succeeded", 0.1)])
        await worker.resign()
    if published:  # somebody who does not know what the application says
        async with open_ledger(worker.store, "unit", worker.timing):
            pass
    for _ in range(2):  # the first might forget what the second looks for
        assert not await keeps.once("import", lambda: None)


async def test_a_task_runs_only_on_the_leader_and_is_cancelled_with_its_term(store: RealStore) -> None:
    running: set[str] = set()

    def worker(label: str) -> Singleton:
        singleton = Singleton(url=store.url, lease=2.0)

        @singleton.task
        async def warm_the_cache() -> None:
            running.add(label)
            try:
                await asyncio.Event().wait()
            finally:
                running.discard(label)

        return singleton

    first, second = worker("first"), worker("second")
    async with first.lifespan():
        await eventually(lambda: running == {"first"}, "the first worker's task")
        async with second.lifespan():

            async def shown() -> Any:
                return [job.trigger for job in (await second.status()).jobs] == ["task, running"]

            await eventually(shown, "the task in the status of a standby")
            assert running == {"first"}
            first._elector.retire()  # type: ignore[union-attr]
            await eventually(lambda: running == {"second"}, "the second worker's task")
    assert running == set()


async def test_a_task_that_fails_is_started_again(store: RealStore, caplog: pytest.LogCaptureFixture) -> None:
    singleton = Singleton(url=store.url)
    starts: list[int] = []

    @singleton.task
    async def stumble() -> None:
        starts.append(1)
        if len(starts) < 2:
            raise ValueError("not yet")

    async with singleton.lifespan():
        await eventually(lambda: len(starts) == 2, "the second start")
    assert any("stumble" in record.message for record in caplog.records)


async def test_a_cancellation_that_was_not_meant_for_a_task_is_a_failure_of_its(store: RealStore) -> None:
    singleton = Singleton(url=store.url)
    starts: list[int] = []

    @singleton.task
    async def awaits_what_others_cancel() -> None:
        starts.append(1)
        if len(starts) < 2:
            raise asyncio.CancelledError

    async with singleton.lifespan():
        await eventually(lambda: len(starts) == 2, "the second start")


async def test_a_task_that_does_not_heed_its_cancellation_keeps_nobody_from_leading(store: RealStore) -> None:
    singleton = Singleton(url=store.url, lease=1.0, drain=0.1)
    go_on = asyncio.Event()

    @singleton.task
    async def stubborn() -> None:
        while not go_on.is_set():
            with suppress(asyncio.CancelledError):
                await go_on.wait()

    async with singleton.lifespan():
        await eventually(lambda: singleton.is_leader, "an election")
        first = singleton.term
        await asyncio.sleep(0)
        assert singleton._backend is not None
        singleton._backend.forfeit()
        await eventually(lambda: singleton.term and singleton.term != first, "the next term")

        async def told() -> Any:
            return any("stubborn" in problem for problem in (await singleton.status()).problems)

        await eventually(told, "the problem in the status")
        go_on.set()


async def test_a_task_that_takes_long_to_tidy_up_is_started_again_once_it_has(store: RealStore) -> None:
    singleton = Singleton(url=store.url, lease=1.0)
    starts: list[Any] = []

    @singleton.task
    async def tidies_up() -> None:
        starts.append(singleton.term)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1.0)

    async with singleton.lifespan():
        await eventually(lambda: starts, "the task")
        assert singleton._backend is not None
        singleton._backend.forfeit()
        await eventually(lambda: len(starts) == 2, "the second start")
        assert starts[1] is not None
        assert starts[1] != starts[0]
        assert not (await singleton.status()).problems


async def test_a_task_that_fails_when_it_is_cancelled_is_not_started_again(store: RealStore) -> None:
    singleton = Singleton(url=store.url, lease=1.0)
    starts: list[bool] = []

    @singleton.task
    async def fails_to_tidy_up() -> None:
        starts.append(singleton.is_leader)
        if len(starts) > 1:
            return  # or the process would never end
        try:
            await asyncio.Event().wait()
        finally:
            raise ConnectionError("the other side is gone")

    async with singleton.lifespan():
        await eventually(lambda: starts, "the task")
        singleton._elector.retire()  # type: ignore[union-attr]
        await eventually(lambda: not singleton.is_leader, "the end of the term")
        [task] = singleton._tasks._running.values()
        await eventually(task.done, "the end of the task")
        assert starts == [True]


async def test_a_task_may_tidy_up_for_as_long_as_jobs_are_waited_for(store: RealStore) -> None:
    scheduler = AsyncIOScheduler()
    begun, working, tidied = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def takes_a_while() -> None:
        begun.set()
        await asyncio.sleep(0.5)

    scheduler.add_job(takes_a_while, id="while")
    singleton = Singleton(scheduler, store.url, drain=5.0)

    @singleton.task
    async def tidies_up() -> None:
        try:
            working.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1.0)
            tidied.set()

    async with singleton.lifespan():
        await asyncio.wait_for(asyncio.gather(begun.wait(), working.wait()), 30)
    assert tidied.is_set()


async def test_a_lock_whose_renewal_fails_unforeseen_is_lost(store: RealStore) -> None:
    async with Singleton(url=store.url, lease=1.0).lock("reports") as lock:

        async def fail(*_: object) -> bool:
            raise RuntimeError("nobody thought of this")

        lock._backend.renew = fail  # type: ignore[method-assign, assignment]
        async with asyncio.timeout(30):
            await lock.wait_lost()
        assert lock.lost


async def test_names_that_look_alike_are_not_the_same(store: RealStore) -> None:
    a, ab = (Singleton(url=store.url, name=name, lease=2.0) for name in ("a", "a:lock:b"))
    async with a.lock("b:lock:c"), ab.lock("c"), a.lock("once:import"):
        assert await a.once("import", lambda: None)
    with pytest.raises(ConfigurationError, match="cannot name a fleet"):
        Singleton(url=store.url, name="lock:a:lock:b")


async def test_a_task_must_be_a_coroutine_function() -> None:
    singleton = Singleton(url="sqlite:///tasks.sqlite3")
    with pytest.raises(ConfigurationError, match="coroutine"):
        singleton.task(lambda: None)  # type: ignore[arg-type, return-value]
