"""What is tidied up in the ledger, on every store: runs given up, and set right by their ending; old rows, deleted for good."""

from datetime import timedelta

from fastapi_singleton.ledger import open_ledger
from fastapi_singleton.records import Ending, Entry, Term, Verdict

from ..leading import Leading
from ..stores import RealStore
from .test_ledger import NOW, claim, judged, leader
from .ticking import Workers

__all__ = ["leader"]


async def test_runs_of_workers_that_are_gone_are_given_up_and_no_others(workers: Workers, store: RealStore) -> None:
    gone, alive = await workers(elected=True), await workers()
    await alive.backend.acquire()
    entries = [claim(gone, NOW - timedelta(seconds=n)) for n in range(2)]
    await judged(gone, entries[0])
    assert await judged(alive, entries[1]) == [Verdict.YOURS]
    await gone.die()
    leader = await workers(elected=True)
    assert await leader.backend.sweep(leader.trusted) == 0
    await store.unsee("unit", gone.worker.worker)
    assert await leader.backend.sweep(leader.trusted) == 1
    outcomes = {row.scheduled_for: row.outcome for row in await leader.backend.runs("job", 10)}
    assert outcomes == {entries[0].tick: "abandoned", entries[1].tick: "running"}


async def test_a_leader_does_not_give_up_its_own_runs_though_it_stood_still(leader: Leading, store: RealStore) -> None:
    """Frozen between its renewal and its sweep, it knows best that its runs go on."""
    entry = claim(leader)
    await judged(leader, entry)
    await store.unsee("unit", leader.worker.worker)
    assert await leader.backend.unseen(leader.trusted) == {}
    assert await leader.backend.sweep(leader.trusted) == 0
    assert await judged(leader, entry) == [Verdict.YOURS]


async def test_a_run_that_outlasts_its_worker_is_not_given_up_before_the_lease_is_over(
    workers: Workers, store: RealStore
) -> None:
    """A thread that the drain did not wait for: until its process is gone it may well go on."""
    stopped, idle, leader = await workers(), await workers(), await workers(elected=True)
    for worker in (stopped, idle):
        await worker.backend.attend()
    assert await judged(stopped, Entry("unit", "job", NOW)) == [Verdict.YOURS]
    await stopped.backend.close()
    await idle.backend.close()
    assert await leader.backend.renew(leader.trusted)
    assert {w.worker for w in leader.backend.fleet.workers} == {leader.worker.worker, stopped.worker.worker}
    assert await leader.backend.sweep(leader.trusted) == 0
    await store.unsee("unit", stopped.worker.worker)
    assert await leader.backend.sweep(leader.trusted) == 1


async def test_a_run_given_up_too_early_is_set_right_by_its_ending(workers: Workers, store: RealStore) -> None:
    frozen = await workers(elected=True)
    entry = claim(frozen)
    await judged(frozen, entry)
    await store.give_up("unit")
    assert await judged(frozen, entry) == [Verdict.TAKEN]  # asked again before it begins, it must not begin
    frozen.ledger.end(Ending(entry, "succeeded", 3.0))
    assert [row.outcome for row in await frozen.runs("job")] == ["succeeded"]


async def test_a_run_given_up_under_a_newer_term_must_not_begin_any_more(workers: Workers, store: RealStore) -> None:
    """Its claimer was frozen between the answer and the call, and asks again: a later attempt may be running by now."""
    frozen, new = await workers(elected=True), await workers()
    given_up, finished = claim(frozen), claim(frozen, NOW - timedelta(seconds=1))
    assert await judged(frozen, given_up, finished) == [Verdict.YOURS, Verdict.YOURS]
    await frozen.backend.finish([Ending(finished, "succeeded", 1.0)])
    await store.give_up("unit")
    await new.take_from(frozen)()
    assert await judged(frozen, given_up, finished) == [Verdict.LOST, Verdict.LOST]


async def test_what_was_cut_short_is_listed_until_a_later_attempt_has_a_row(leader: Leading) -> None:
    assert leader.trusted is not None
    entry = claim(leader)
    await judged(leader, entry)
    await leader.backend.finish([Ending(entry, "abandoned", 0.0)])
    [cut] = await leader.backend.cut(leader.trusted, ["job"], 5, 60)
    assert (cut.job, cut.tick, cut.attempt) == ("job", NOW, 1)
    assert await leader.backend.cut(leader.trusted, ["other"], 5, 60) == []
    assert await leader.backend.cut(leader.trusted, ["job"], 1, 60) == []
    await judged(leader, claim(leader, attempt=2))
    assert await leader.backend.cut(leader.trusted, ["job"], 5, 60) == []


async def test_a_deleted_tick_cannot_be_claimed_again(leader: Leading) -> None:
    assert leader.trusted is not None
    old, older_running, young = (claim(leader, NOW - timedelta(days=days)) for days in (3, 4, 1))
    await judged(leader, old, older_running, young)
    await leader.backend.finish([Ending(old, "succeeded", 0.0), Ending(young, "succeeded", 0.0)])
    assert await leader.backend.prune(leader.trusted, 2 * 86_400) == 1
    assert await leader.backend.prune(leader.trusted, 2 * 86_400) == 0
    ticks = {row.scheduled_for for row in await leader.backend.runs("job", 10)}
    assert ticks == {older_running.tick, young.tick}
    again = [claim(leader, old.tick), claim(leader, old.tick - timedelta(hours=1)), claim(leader, young.tick)]
    assert await judged(leader, *again) == [Verdict.PRUNED, Verdict.PRUNED, Verdict.TAKEN]
    assert await judged(leader, claim(leader, NOW - timedelta(days=2))) == [Verdict.YOURS]


async def test_a_deleted_tick_stays_so_when_an_older_run_ends_and_is_deleted_after_it(leader: Leading) -> None:
    term = leader.trusted
    assert term is not None
    old, older_running = (claim(leader, NOW - timedelta(days=days)) for days in (3, 4))
    await judged(leader, old, older_running)
    await leader.backend.finish([Ending(old, "succeeded", 0.0)])
    assert await leader.backend.prune(term, 2 * 86_400) == 1
    await leader.backend.finish([Ending(older_running, "succeeded", 0.0)])
    assert await leader.backend.prune(term, 2 * 86_400) == 1
    assert await judged(leader, claim(leader, old.tick)) == [Verdict.PRUNED]


async def test_a_tick_of_a_race_cannot_be_claimed_again_though_nobody_ever_led(workers: Workers) -> None:
    """Where nothing holds the floor yet, there is something now."""
    racer = await workers()
    await racer.backend.attend()
    old = Entry("unit", "job", NOW - timedelta(days=3))
    assert await judged(racer, old) == [Verdict.YOURS]
    await racer.backend.finish([Ending(old, "succeeded", 0.0)])
    await racer.backend.prune(Term.race("unit", racer.worker.worker), 86_400)
    assert await judged(racer, Entry("unit", "job", old.tick)) == [Verdict.PRUNED]
    assert await racer.backend.runs("job", 5) == []


async def test_a_fleet_of_cron_lines_forgets_too(workers: Workers, store: RealStore) -> None:
    cron = await workers(name="cron")
    await cron.backend.attend()
    old, late = (Entry("cron", "job", NOW - timedelta(days=days)) for days in (40, 20))
    assert await judged(cron, old, late) == [Verdict.YOURS] * 2
    await cron.backend.finish([Ending(entry, "succeeded", 0.0) for entry in (old, late)])
    await cron.die()
    await store.unsee("cron", cron.worker.worker)
    async with open_ledger(cron.store, "cron", cron.timing) as (backend, _):
        assert [run.scheduled_for for run in await backend.runs("job", 5)] == [late.tick]
