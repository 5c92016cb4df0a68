"""What Redis keeps of a fleet: who is there, under which keys, for how long."""

import pytest

from fastapi_singleton.backends.redis import scripts
from fastapi_singleton.records import Entry, JobChange, JobNote, JobView, Verdict

from ..stores.redis import RealRedis, key_of
from .test_ledger import NOW
from .test_redis import Open, elected, worker

__all__ = ["worker"]


async def test_every_worker_sees_the_same_fleet_and_an_onlooker_is_not_of_it(worker: Open) -> None:
    leader, standby, onlooker = worker(), worker(), worker()
    term = await elected(leader)
    assert await leader.renew(term, [JobView("nightly", "cron", None, True)])
    assert await standby.acquire() is None
    assert await leader.renew(term)
    await onlooker.look()
    for backend in (leader, standby, onlooker):
        fleet = backend.fleet
        assert fleet.leader is not None
        assert (fleet.leader.worker, fleet.leader.token) == (term.worker, term.token)
        assert [w.role for w in fleet.workers] == ["leader", "standby"]
        assert fleet.jobs == (JobView("nightly", "cron", None, True),)
    await standby.close()
    assert await leader.renew(term)
    assert len(leader.fleet.workers) == 1


async def test_two_connections_per_worker_and_one_script_per_poll_and_renewal(
    worker: Open, redis_store: RealRedis
) -> None:
    leader, standby = worker(), worker()
    term = await elected(leader)
    for ask in (lambda: leader.renew(term), standby.acquire):
        await ask()  # the first look at the jobs and runs takes one script more
        redis_store.client.config_resetstat()
        await ask()
        assert redis_store.client.info("commandstats")["cmdstat_evalsha"]["calls"] == 1
    ours = [each for each in redis_store.client.client_list() if each["name"].startswith("fastapi_singleton:")]
    assert len(ours) == 4


async def test_a_server_that_forgot_the_scripts_is_told_them_again(worker: Open, redis_store: RealRedis) -> None:
    backend = worker()
    term = await elected(backend)
    redis_store.client.script_flush()
    assert await backend.renew(term)
    redis_store.client.script_flush()
    assert await backend.enter([Entry("contract", "job", NOW, token=term.token)]) == [Verdict.YOURS]


@pytest.mark.parametrize("name", ["plain", "with {braces} in it", "}{", "100%", "ümläut \n"])
async def test_all_keys_begin_with_the_name_and_only_the_lease_ends_by_itself(
    worker: Open, redis_store: RealRedis, name: str
) -> None:
    backend, other = worker(name=name), worker(name=name + "}")
    term = await elected(backend)
    await elected(other)  # another fleet
    assert await backend.renew(term, [JobView("job", "cron", None, False)])
    await backend.meet(term, [JobNote("job", "hourly", NOW, False)])
    await backend.enter([Entry(name, "job", NOW, token=term.token)])
    keys = redis_store.client.keys("*")
    own, others = key_of(name, ""), key_of(name + "}", "")
    assert all(key.startswith((own, others)) for key in keys)
    assert {key.removeprefix(own) for key in keys if key.startswith(own)} == {*scripts.KEYS} - {
        scripts.ABANDONED,
        scripts.SILENT,
    }
    assert own.count("{") == own.count("}") == 1
    assert {key for key in keys if redis_store.client.ttl(key) != -1} == {own + scripts.LEASE, others + scripts.LEASE}


async def test_jobs_that_nobody_meets_any_more_are_forgotten_but_not_what_was_said_of_them(
    worker: Open, redis_store: RealRedis
) -> None:
    backend = worker()
    term = await elected(backend)
    keys = ["shown", "paused", "removed", "gone"]
    assert await backend.renew(term, [JobView("shown", "cron", None, False)])
    await backend.meet(term, [JobNote(key, "hourly", None, False) for key in keys])
    await backend.note(term, [JobChange("paused", paused=True), JobChange("removed", removed=True)])
    redis_store.client.zadd(key_of("contract", scripts.MET), dict.fromkeys(keys, 1))
    await backend.prune(term, 86_400)
    assert set(redis_store.client.hkeys(key_of("contract", scripts.JOBS))) == {"shown", "paused", "removed"}


async def test_whoever_was_seen_before_the_servers_clock_was_set_back_must_show_itself_again(
    worker: Open, redis_store: RealRedis
) -> None:
    gone, leader = worker(), worker()
    await gone.attend()
    assert await gone.enter([Entry("contract", "job", NOW)]) == [Verdict.YOURS]
    term = await elected(leader)
    seen = key_of("contract", scripts.SEEN)
    for name, score in redis_store.client.zrange(seen, 0, -1, withscores=True):
        redis_store.client.zadd(seen, {name: score + 3600e6})  # as if an hour had been taken back since
    assert await leader.renew(term)
    assert [present.role for present in leader.fleet.workers] == ["leader"]
    assert await leader.sweep(term) == 1


async def test_a_small_step_back_of_the_servers_clock_gives_nobodys_runs_up(
    worker: Open, redis_store: RealRedis
) -> None:
    other, leader = worker(), worker()
    await other.attend()
    assert await other.enter([Entry("contract", "job", NOW)]) == [Verdict.YOURS]
    term = await elected(leader)
    seen = key_of("contract", scripts.SEEN)
    for name, score in redis_store.client.zrange(seen, 0, -1, withscores=True):
        redis_store.client.zadd(seen, {name: score + 0.2e6})  # as if so much had been taken back since
    assert await leader.unseen(term) == {}
    assert await leader.sweep(term) == 0


async def test_rows_that_somebody_has_taken_away_keep_nobody_from_leading(worker: Open, redis_store: RealRedis) -> None:
    leader = worker()
    term = await elected(leader)
    assert await leader.renew(term, [JobView("job", "cron", None, False)])
    assert await leader.enter([Entry("contract", "job", NOW, token=term.token)]) == [Verdict.YOURS]
    redis_store.client.delete(key_of("contract", scripts.RUNS))
    assert await leader.renew(term, [JobView("job", "hourly", None, False)])
    assert await leader.runs("job", 5) == []
    assert await leader.sweep(term) == 0
    assert redis_store.client.hlen(key_of("contract", scripts.RUNNING)) == 0


async def test_a_job_that_somebody_has_taken_away_keeps_nobody_from_leading(
    worker: Open, redis_store: RealRedis
) -> None:
    leader = worker()
    term = await elected(leader)
    redis_store.client.zadd(key_of("contract", scripts.MET), {"job": 1})
    await leader.prune(term, 86_400)
    assert await leader.renew(term)
    assert redis_store.client.zcard(key_of("contract", scripts.MET)) == 0
