"""The tables, in a schema of their own. Forward-only: a released step is never edited, only followed."""

import asyncio
from typing import Any

import asyncpg

from ...errors import StoreError

# Step by step; entry N brings the schema to version N + 1. Only additions, so that older workers go on beside newer ones.
MIGRATIONS = (
    """
CREATE SCHEMA IF NOT EXISTS fastapi_singleton;

CREATE TABLE fastapi_singleton.schema_version (
    version integer PRIMARY KEY,
    applied_at timestamptz NOT NULL DEFAULT now()
);

-- One row per name: who leads, or led last. The token only ever grows; the row is never deleted.
CREATE TABLE fastapi_singleton.term (
    name text PRIMARY KEY,
    token bigint NOT NULL,
    worker text NOT NULL,
    hostname text NOT NULL,
    pid integer NOT NULL,
    acquired_at timestamptz NOT NULL,
    renewed_at timestamptz NOT NULL,
    released_at timestamptz,
    jobs jsonb NOT NULL DEFAULT '[]'
) WITH (fillfactor = 50);

-- One row per worker that was seen lately.
CREATE TABLE fastapi_singleton.worker (
    name text NOT NULL,
    worker text NOT NULL,
    hostname text NOT NULL,
    pid integer NOT NULL,
    started_at timestamptz NOT NULL,
    last_seen_at timestamptz NOT NULL,
    PRIMARY KEY (name, worker)
) WITH (fillfactor = 50);
""",
)

# Any fixed number will do; it only has to be the same in every worker.
_MIGRATION_LOCK = 0x6661_7374_6170_6973

_VERSION = """
SELECT CASE WHEN to_regclass('fastapi_singleton.schema_version') IS NULL THEN 0 ELSE 1 END
"""


def schema_sql(role: str = "your_application_role") -> str:
    """What an administrator runs where the application's own role may not create tables."""
    steps = [
        f"{sql.strip()}\nINSERT INTO fastapi_singleton.schema_version (version) VALUES ({number});"
        for number, sql in enumerate(MIGRATIONS, start=1)
    ]
    role = role.replace('"', '""')
    grants = (
        f'GRANT USAGE ON SCHEMA fastapi_singleton TO "{role}";\n'
        f'GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA fastapi_singleton TO "{role}";'
    )
    return "\n\n".join(["BEGIN;", *steps, grants, "COMMIT;"])


async def ensure_schema(connection: "asyncpg.Connection[Any]", patience: float) -> None:
    """Bring the tables up to date. Workers that come at the same time do not collide: one migrates, the others look on."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    while await _version(connection) < len(MIGRATIONS):
        async with connection.transaction():
            # Tried, not waited for: a waiter's open snapshot would hold up VACUUM and concurrent index builds.
            if await connection.fetchval("SELECT pg_try_advisory_xact_lock($1)", _MIGRATION_LOCK):
                # Read again under the lock: somebody may have finished in between.
                for number in range(await _version(connection), len(MIGRATIONS)):
                    await connection.execute(MIGRATIONS[number])
                    await connection.execute(
                        "INSERT INTO fastapi_singleton.schema_version (version) VALUES ($1)", number + 1
                    )
                return
        if loop.time() > deadline:
            raise StoreError(
                "Another session has been creating the tables of fastapi_singleton for too long.",
                hint="look for a stuck session that holds an advisory lock in pg_locks.",
            )
        await asyncio.sleep(0.02)


async def _version(connection: "asyncpg.Connection[Any]") -> int:
    if not await connection.fetchval(_VERSION):
        return 0
    version: int = await connection.fetchval("SELECT coalesce(max(version), 0) FROM fastapi_singleton.schema_version")
    return version
