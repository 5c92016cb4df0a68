"""What the fleet remembers of its jobs, on every store: met, paused, removed, rescheduled, and since when it is owed a tick."""

from datetime import UTC, datetime, timedelta

import pytest

from fastapi_singleton.scheduling import succession

from ..conftest import eventually
from ..stores import RealStore
from .ticking import Workers, every_second, look, outcome, pretend_known_since, scheduler_with, seen, soon


async def test_a_paused_job_stays_paused_and_owes_nothing_when_it_is_resumed(
    workers: Workers, store: RealStore
) -> None:
    first, second, third = await workers(), await workers(), await workers()
    duties = await first.lead(every_second())
    await outcome(first, "succeeded")
    duties.scheduler.pause_job("job")
    await first.go_on(duties)
    await first.die()
    duties = await second.lead(every_second())
    assert duties.jobs()[0].paused
    ran = len(seen)
    await pretend_known_since(store, timedelta(minutes=5))
    duties.scheduler.resume_job("job")
    await second.go_on(duties)
    await eventually(lambda: len(seen) > ran, "its runs after the resumption")
    await second.die()
    duties = await third.lead(every_second())
    assert not duties.jobs()[0].paused
    assert not await third.runs("job", "missed", "skipped")


async def test_what_was_done_to_jobs_while_nobody_could_be_told_is_told_at_the_next_term(workers: Workers) -> None:
    first, second = await workers(), await workers()
    scheduler = every_second()
    scheduler.add_job(look, "cron", second="*", id="other")
    duties = await first.lead(scheduler)
    duties.lay_down()
    await first.resign()
    duties.scheduler.pause_job("job")
    duties.scheduler.remove_job("other")
    await first.take_up(duties)
    assert [(job.id, job.paused) for job in duties.jobs()] == [("job", True)]
    await first.die()
    scheduler = every_second()
    scheduler.add_job(look, "cron", second="*", id="other")
    duties = await second.lead(scheduler)
    assert [(job.id, job.paused) for job in duties.jobs()] == [("job", True)]


async def test_what_is_done_to_a_job_is_told_at_once_and_not_at_the_next_renewal(workers: Workers) -> None:
    first, second = await workers(), await workers()
    duties = await first.lead(every_second())
    duties.scheduler.pause_job("job")

    async def told() -> bool:
        [state] = (await first.backend.meet(first.trusted, [duties._settling.note("job", job)])).values()
        return bool(state.paused)

    job = duties.scheduler.get_job("job")
    await eventually(told, "that the store knows", patience=10.0)
    await first.die()
    assert (await second.lead(every_second())).jobs()[0].paused


async def test_a_job_rescheduled_at_run_time_is_caught_up_on_by_its_new_schedule(
    workers: Workers, store: RealStore
) -> None:
    first, second = await workers(), await workers()
    duties = await first.lead(scheduler_with(look, "cron", hour=0))
    duties.scheduler.reschedule_job("job", trigger="cron", minute="*")
    await first.go_on(duties)
    await first.die()
    await pretend_known_since(store, timedelta(minutes=4))
    await second.lead(scheduler_with(look, "cron", minute="*", coalesce=False))
    await eventually(lambda: len(seen) >= 3, "what is caught up on")


async def test_a_leader_moves_on_what_the_next_one_has_to_look_at(
    workers: Workers, store: RealStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await workers()
    duties = await first.lead(every_second(), catch_up=10.0)
    ago = datetime.now(UTC) - timedelta(days=20)
    await pretend_known_since(store, timedelta(days=20))
    monkeypatch.setattr(succession, "_SETTLE_EVERY", 0.0)
    duties._succession._tidied_at = 0.0
    await first.go_on(duties)
    [state] = (
        await first.backend.meet(first.trusted, [duties._settling.note("job", *duties.scheduler.get_jobs())])
    ).values()
    assert state.since > ago + timedelta(days=19)
    assert state.since < datetime.now(UTC) - timedelta(seconds=15)


@pytest.mark.parametrize("odd", ["null \0 inside", "lone \ud800 surrogate"])
async def test_a_job_with_an_odd_name_runs_and_is_no_others(workers: Workers, odd: str) -> None:
    scheduler = every_second()
    scheduler.add_job(look, "cron", second="*", id=odd)
    scheduler.add_job(look, "cron", second="*", id=odd.replace("\0", "").replace("\ud800", "?"))
    await (await workers()).lead(scheduler)
    await eventually(lambda: len({run.job for run in seen}) == 3, "runs of all three")


async def test_a_removed_job_stays_removed_until_it_is_added_again(workers: Workers) -> None:
    first, second, third = await workers(), await workers(), await workers()
    duties = await first.lead(every_second())
    duties.scheduler.remove_job("job")
    await first.go_on(duties)
    await first.die()
    duties = await second.lead(every_second())
    assert duties.jobs() == []
    duties.scheduler.add_job(look, "cron", second="*", id="job")
    await second.go_on(duties)
    await second.die()
    duties = await third.lead(every_second())
    assert [job.id for job in duties.jobs()] == ["job"]


async def test_a_finished_date_is_not_taken_for_removed(workers: Workers) -> None:
    first, second = await workers(), await workers()
    duties = await first.lead(scheduler_with(look, "date", run_date=soon()))
    await outcome(first, "succeeded")
    await first.go_on(duties)
    await first.die()
    later = soon() + timedelta(hours=1)
    duties = await second.lead(scheduler_with(look, "date", run_date=later))
    assert [job.next_run_at for job in duties.jobs()] == [later]
