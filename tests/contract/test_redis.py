"""The leadership contract on a real Redis, and what is particular to its lease, its messages and its scripts."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from fastapi_singleton.backends.redis import RedisStore, scripts
from fastapi_singleton.backends.redis.backend import RedisBackend
from fastapi_singleton.backends.redis.session import Session
from fastapi_singleton.errors import StoreError
from fastapi_singleton.records import Term, Worker
from fastapi_singleton.timing import Timing

from ..conftest import eventually
from ..stores.redis import RealRedis, key_of

Open = Callable[..., RedisBackend]

LEADER = """
import asyncio, sys
from fastapi_singleton.backends import find_store
from fastapi_singleton.records import Worker
from fastapi_singleton.timing import Timing

async def main():
    backend = find_store(sys.argv[1], None).open("contract", Worker.here(), Timing(30.0))
    print((await backend.acquire()).token, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
async def worker(redis_store: RealRedis) -> AsyncIterator[Open]:
    """Opens backends as so many workers would, and closes them."""
    opened: list[RedisBackend] = []

    def open_one(url: str = redis_store.url, *, lease: float = 10.0, name: str = "contract") -> RedisBackend:
        backend = RedisStore.parse(url).open(name, Worker.here(), Timing(lease))
        opened.append(backend)
        return backend

    yield open_one
    for backend in opened:
        await backend.close()
    assert [task for task in asyncio.all_tasks() if "listening" in task.get_name()] == []


@pytest.fixture
def elsewhere(redis_store: RealRedis) -> Iterator["subprocess.Popen[str]"]:
    """A leader in a process of its own, with a lease of half a minute."""
    process = subprocess.Popen(
        [sys.executable, "-c", LEADER, redis_store.url], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip().isdecimal()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


async def elected(backend: RedisBackend) -> Term:
    term = await backend.acquire()
    assert term is not None
    return term


def silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Last words do not get through."""
    monkeypatch.setattr(Session, "part", lambda session, *_: session.terminate())


# -- the lease -----------------------------------------------------------------------------------------------------------


async def test_many_workers_meeting_an_empty_server_elect_exactly_one(worker: Open) -> None:
    terms = await asyncio.gather(*(worker().acquire() for _ in range(12)))
    assert sum(term is not None for term in terms) == 1


async def test_tokens_grow_with_every_term_whatever_became_of_the_lease(worker: Open, redis_store: RealRedis) -> None:
    first, second, tokens = worker(), worker(), []
    for backend in (first, second, first, first):
        term = await elected(backend)
        tokens.append(term.token)
        await backend.release(term)
    tokens.append((await elected(first)).token)
    redis_store.client.delete(key_of("contract", scripts.LEASE))  # evicted, or lost
    tokens.append((await elected(second)).token)
    assert tokens == sorted(set(tokens))
    # Also where the whole store was lost: no token is behind the store's clock, and few are drawn in a millisecond.
    await asyncio.sleep(0.02)
    redis_store.client.flushall()
    assert (await elected(first)).token > tokens[-1]


@pytest.mark.parametrize("ahead", [10**12, -(10**12)])
async def test_a_token_exceeds_both_the_last_one_and_the_clock(
    worker: Open, redis_store: RealRedis, ahead: int
) -> None:
    """The server's clock may have been set back, or the server have lost its last writes."""
    backend = worker()
    term = await elected(backend)
    await backend.release(term)
    redis_store.client.hincrby(key_of("contract", scripts.TERM), "token", ahead)
    again = await elected(backend)
    assert again.token == term.token + ahead + 1 if ahead > 0 else again.token >= term.token


async def test_a_term_can_be_renewed_until_it_is_released_and_never_after(worker: Open) -> None:
    backend = worker()
    term = await elected(backend)
    assert await backend.renew(term)
    await backend.release(term)
    assert not await backend.renew(term)


async def test_a_lease_that_ran_out_lets_another_in_and_its_old_holder_cannot_renew(
    worker: Open, redis_store: RealRedis
) -> None:
    leader, standby = worker(lease=0.4), worker(lease=0.4)
    sent = time.monotonic()
    term = await elected(leader)
    assert await standby.acquire() is None
    taken: Any = await eventually(standby.acquire, "the end of the lease")
    assert time.monotonic() - sent >= 0.4  # never before its holder's own trust
    assert taken.token > term.token
    assert not await leader.renew(term)
    assert await leader.acquire() is None
    assert redis_store.client.ttl(key_of("contract", scripts.TERM)) == -1


async def test_a_renewal_prolongs_the_lease(worker: Open, redis_store: RealRedis) -> None:
    backend = worker(lease=10.0)
    term = await elected(backend)
    lease = key_of("contract", scripts.LEASE)
    redis_store.client.pexpire(lease, 1000)
    assert await backend.renew(term)
    assert 9000 < redis_store.client.pttl(lease) <= 10_000


async def test_a_lost_reply_to_the_election_is_followed_by_a_new_term(
    worker: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence(monkeypatch)
    backend, other = worker(), worker()
    run = Session.run

    async def deaf(session: Session, *arguments: Any) -> Any:
        await run(session, *arguments)
        raise StoreError("The reply was lost.", hint="none")

    monkeypatch.setattr(Session, "run", deaf)
    with pytest.raises(StoreError):
        await backend.acquire()
    monkeypatch.setattr(Session, "run", run)
    assert await other.acquire() is None
    leader = other.fleet.leader
    assert leader is not None
    assert (await elected(backend)).token > leader.token


@pytest.mark.parametrize("answered", [True, False])
async def test_a_bid_whose_answer_nobody_waits_for_any_more_is_taken_back(worker: Open, answered: bool) -> None:
    for _ in range(50):
        backend, other = worker(), worker()
        await backend.connect()
        bidding = asyncio.create_task(backend.acquire())
        while not backend._bid:
            await asyncio.sleep(0)
        if answered:
            # The answer lies here unread: closing now would make the network forget what was said last.
            time.sleep(0.002)
        bidding.cancel()
        await asyncio.gather(bidding, return_exceptions=True)
        await backend.close()
        await other.release(await elected(other))


async def test_last_words_free_the_lease_they_mean_and_no_later_one(worker: Open) -> None:
    leader, standby = worker(), worker()
    await elected(leader)
    words = leader._keys, leader._bid, leader._channel, leader._worker.worker
    leader.forfeit()
    await eventually(standby.acquire, "a free lease", patience=5.0)
    standby.forfeit()
    await eventually(leader.acquire, "a free lease again", patience=5.0)
    assert leader._session is not None
    await leader._session.run(scripts.FORFEIT, *words)  # the old ones, late
    assert await standby.acquire() is None


async def test_a_forfeited_term_is_never_renewed_and_its_lease_runs_out_if_nobody_hears_of_it(
    worker: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence(monkeypatch)
    leader, standby = worker(lease=0.4), worker()
    term = await elected(leader)
    leader.forfeit()
    assert not await leader.renew(term)
    assert await standby.acquire() is None
    await eventually(standby.acquire, "the end of the lease")


# -- death, and messages -------------------------------------------------------------------------------------------------


async def test_a_leader_that_is_provably_dead_is_replaced_at_once(
    worker: Open, elsewhere: "subprocess.Popen[str]"
) -> None:
    standby = worker()
    assert await standby.acquire() is None
    waiting = asyncio.create_task(standby.vacancy(100))
    await asyncio.sleep(0)
    elsewhere.kill()
    died = time.monotonic()
    await asyncio.wait_for(waiting, 10)
    await eventually(standby.acquire, "its succession", patience=5.0)
    assert time.monotonic() - died < 5.0  # the lease is six times as long


async def test_a_leader_that_may_be_alive_is_not_replaced(worker: Open, elsewhere: "subprocess.Popen[str]") -> None:
    standby = worker()
    elsewhere.send_signal(signal.SIGSTOP)
    for _ in range(5):
        assert await standby.acquire() is None


async def test_a_release_wakes_a_standby_long_before_its_poll(worker: Open) -> None:
    leader, standby = worker(), worker()
    term = await elected(leader)
    assert await standby.acquire() is None
    waiting = asyncio.create_task(standby.vacancy(100))
    await asyncio.sleep(0)
    await leader.release(term)
    await asyncio.wait_for(waiting, 30)
    await elected(standby)


async def test_news_between_asking_and_waiting_is_not_lost_and_ones_own_is_no_news(worker: Open) -> None:
    leader, standby = worker(), worker()
    term = await elected(leader)
    assert await standby.acquire() is None
    await leader.release(term)
    await eventually(standby._vacancy._news.is_set, "the message")
    await asyncio.wait_for(standby.vacancy(100), 30)
    assert not leader._vacancy._news.is_set()


async def test_a_listener_that_is_cut_off_is_a_reason_to_ask_and_listens_again(
    worker: Open, redis_store: RealRedis
) -> None:
    leader, standby = worker(), worker()
    term = await elected(leader)
    assert await standby.acquire() is None
    waiting = asyncio.create_task(standby.vacancy(100))
    await asyncio.sleep(0)
    redis_store.client.client_kill_filter(_type="pubsub")
    await asyncio.wait_for(waiting, 30)

    async def listens_again() -> bool:
        assert await standby.acquire() is None
        task = standby._listener._task
        return task is not None and not task.done()

    await eventually(listens_again, "a new connection")
    await leader.release(term)
    await asyncio.wait_for(standby.vacancy(100), 30)
    await elected(standby)
