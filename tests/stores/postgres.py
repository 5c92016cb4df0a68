"""A database of its own on the PostgreSQL that all tests share."""

from datetime import datetime

import asyncpg

from fastapi_singleton.backends.postgres.backend import lock_key
from fastapi_singleton.records import Entry


class RealPostgres:
    def __init__(self, url: str) -> None:
        self.url = url

    async def unsee(self, name: str, worker: str) -> None:
        await self._execute(
            "UPDATE fastapi_singleton.worker SET last_seen_at = now() - interval '1 hour' WHERE name = $1 AND worker = $2",
            name, worker,
        )  # fmt: skip

    async def expire(self, name: str) -> None:
        await self._execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_locks WHERE locktype = 'advisory' AND granted"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            " AND ((classid::bigint << 32) | objid::bigint) = $1", lock_key(name),
        )  # fmt: skip

    async def give_up(self, name: str) -> None:
        await self._execute(
            "UPDATE fastapi_singleton.run SET outcome = 'abandoned', finished_at = now()"
            " WHERE name = $1 AND outcome = 'running'", name,
        )  # fmt: skip

    async def put(self, entry: Entry, worker: str) -> None:
        await self._execute(
            "INSERT INTO fastapi_singleton.run"
            " (name, job, tick, attempt, id, nonce, outcome, cause, token, worker, started_at)"
            " VALUES ($1, $2, $3, $4, $5, $6, 'running', $7, $8, $9, now())",
            entry.name, entry.job, entry.tick, entry.attempt, entry.id, entry.nonce, entry.cause, entry.token, worker,
        )  # fmt: skip

    async def set_job(
        self,
        name: str,
        key: str,
        *,
        since: datetime | None = None,
        anchor: datetime | None = None,
        removed: bool = False,
    ) -> None:
        await self._execute(
            "UPDATE fastapi_singleton.job SET since = coalesce($3, since), anchor = coalesce($4, anchor), removed = $5"
            " WHERE name = $1 AND key = $2", name, key, since, anchor, removed,
        )  # fmt: skip

    async def locks_after_two_days(self) -> int:
        await self._execute(
            "UPDATE fastapi_singleton.term SET renewed_at = renewed_at - interval '2 days' WHERE name LIKE 'lock:%'"
        )
        return await self._count("SELECT count(*) FROM fastapi_singleton.term WHERE name LIKE 'lock:%'")

    def close(self) -> None:
        """The database is dropped by its fixture."""

    async def _count(self, sql: str) -> int:
        connection = await asyncpg.connect(self.url)
        try:
            return int(await connection.fetchval(sql))
        finally:
            await connection.close()

    async def _execute(self, sql: str, *arguments: object) -> None:
        connection = await asyncpg.connect(self.url)
        try:
            await connection.execute(sql, *arguments)
        finally:
            await connection.close()
