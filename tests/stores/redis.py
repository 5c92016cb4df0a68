"""The Redis that all tests share, emptied for each of them."""

import json
from datetime import datetime
from typing import Any

import redis

from fastapi_singleton.backends.redis import rows
from fastapi_singleton.backends.redis.scripts import ABANDONED, INDEX, JOBS, LEASE, RUNNING, RUNS, SEEN, TICKS
from fastapi_singleton.records import Entry


class RealRedis:
    def __init__(self, url: str) -> None:
        self.url = url
        # Typed loosely: redis-py's answers are typed for its asynchronous client as well.
        self.client: Any = redis.Redis.from_url(url, decode_responses=True)
        self.client.flushall()

    async def unsee(self, name: str, worker: str) -> None:
        self.client.zadd(key_of(name, SEEN), {worker: self._now() - 3600 * 10**6})

    async def expire(self, name: str) -> None:
        self.client.delete(key_of(name, LEASE))

    async def give_up(self, name: str) -> None:
        for field in self.client.hkeys(key_of(name, RUNNING)):
            row = json.loads(self.client.hget(key_of(name, RUNS), field))
            row |= {"outcome": "abandoned", "finished_at": str(self._now())}
            self.client.hset(key_of(name, RUNS), field, json.dumps(row))
            self.client.hdel(key_of(name, RUNNING), field)
            self.client.zadd(key_of(name, ABANDONED), {field: self._now()})

    async def put(self, entry: Entry, worker: str) -> None:
        row = {
            "id": entry.id, "job": entry.job, "tick": rows.digits(entry.tick), "attempt": str(entry.attempt),
            "nonce": entry.nonce, "outcome": "running", "cause": entry.cause, "token": str(entry.token),
            "worker": worker, "started_at": str(self._now()), "error": "",
        }  # fmt: skip
        field, name = rows.field(entry), entry.name
        self.client.hset(key_of(name, RUNS), field, json.dumps(row))
        self.client.hset(key_of(name, RUNNING), field, worker)
        self.client.zadd(key_of(name, TICKS), {field: rows.digits(entry.tick)})
        self.client.zadd(key_of(name, INDEX), {field: 0})

    async def set_job(
        self,
        name: str,
        key: str,
        *,
        since: datetime | None = None,
        anchor: datetime | None = None,
        removed: bool = False,
    ) -> None:
        job = json.loads(self.client.hget(key_of(name, JOBS), key))
        changes = {"since": rows.digits(since), "anchor": rows.digits(anchor)}
        job |= {word: digits for word, digits in changes.items() if digits} | {"removed": str(int(removed))}
        self.client.hset(key_of(name, JOBS), key, json.dumps(job))

    async def locks_after_two_days(self) -> int:
        keys = self.client.keys("*{lock:*")
        for key in keys:
            if 0 < self.client.ttl(key) <= 172_800:
                self.client.delete(key)
        return len(self.client.keys("*{lock:*"))

    def close(self) -> None:
        self.client.close()

    def _now(self) -> int:
        seconds, microseconds = self.client.time()
        return int(seconds) * 10**6 + int(microseconds)


def key_of(name: str, word: str) -> str:
    return rows.prefix(name) + word
