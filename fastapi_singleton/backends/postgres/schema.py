"""The tables, in a schema of their own. Forward-only: a released step is never edited, only followed."""

import asyncio
from typing import Any

import asyncpg

from ...errors import EmptyStoreError, StoreError
from ...records import SILENT

# Runs that are alive: worker, process, whether it was seen within its lease.
ALIVE = f"""
        SELECT r.job, r.tick, json_build_array(r.worker, coalesce(w.process, ''),
                                               coalesce(w.last_seen_at > clock_timestamp() - w.lease, false)) AS run
        FROM fastapi_singleton.run AS r LEFT JOIN fastapi_singleton.worker AS w ON w.name = r.name AND w.worker = r.worker
        WHERE r.outcome IN ('running', 'abandoned') AND (r.outcome = 'running' OR r.error = '{SILENT}')"""

# Step by step; entry N brings the schema to version N + 1. Only additions, so that older workers go on beside newer ones;
# each can be repeated, so that a table that somebody dropped comes back.
MIGRATIONS = (
    """
CREATE SCHEMA IF NOT EXISTS fastapi_singleton;

CREATE TABLE IF NOT EXISTS fastapi_singleton.schema_version (
    version integer PRIMARY KEY,
    applied_at timestamptz NOT NULL DEFAULT now()
);

-- One row per name: who leads, or led last. The token only ever grows; the row is never deleted.
CREATE TABLE IF NOT EXISTS fastapi_singleton.term (
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
CREATE TABLE IF NOT EXISTS fastapi_singleton.worker (
    name text NOT NULL,
    worker text NOT NULL,
    hostname text NOT NULL,
    pid integer NOT NULL,
    started_at timestamptz NOT NULL,
    last_seen_at timestamptz NOT NULL,
    PRIMARY KEY (name, worker)
) WITH (fillfactor = 50);
""",
    """
-- `floor` is the greatest tick ever deleted from the ledger; nothing at or before it can be claimed again.
ALTER TABLE fastapi_singleton.term
    ADD COLUMN IF NOT EXISTS floor timestamptz NOT NULL DEFAULT '-infinity',
    ADD COLUMN IF NOT EXISTS jobs_revision bigint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS lease interval NOT NULL DEFAULT interval '10 seconds';

-- Each worker is seen, or not, by its own lease.
ALTER TABLE fastapi_singleton.worker
    ADD COLUMN IF NOT EXISTS version text NOT NULL DEFAULT '',
    ADD COLUMN IF NOT EXISTS lease interval NOT NULL DEFAULT interval '10 seconds';

-- The ledger: one row per tick and attempt. Whoever enters it runs it; no second row, no second run.
CREATE TABLE IF NOT EXISTS fastapi_singleton.run (
    name text NOT NULL,
    job text NOT NULL,
    tick timestamptz NOT NULL,
    attempt integer NOT NULL,
    id text NOT NULL,
    nonce text NOT NULL,
    outcome text NOT NULL,
    cause text NOT NULL,
    token bigint,
    worker text NOT NULL,
    started_at timestamptz,
    finished_at timestamptz,
    error text,
    PRIMARY KEY (name, job, tick, attempt)
);
CREATE INDEX IF NOT EXISTS run_newest ON fastapi_singleton.run (name, tick DESC, job);
CREATE INDEX IF NOT EXISTS run_unsettled ON fastapi_singleton.run (name, outcome) WHERE outcome IN ('running', 'abandoned');

-- What the fleet remembers of a job: ticks after `since` may lack a row; `anchor` is the phase of its interval.
CREATE TABLE IF NOT EXISTS fastapi_singleton.job (
    name text NOT NULL,
    key text NOT NULL,
    fingerprint text NOT NULL,
    since timestamptz NOT NULL,
    anchor timestamptz,
    paused boolean NOT NULL DEFAULT false,
    removed boolean NOT NULL DEFAULT false,
    PRIMARY KEY (name, key)
);
""",
    f"""
ALTER TABLE fastapi_singleton.worker
    ADD COLUMN IF NOT EXISTS process text NOT NULL DEFAULT '',
    ADD COLUMN IF NOT EXISTS role text NOT NULL DEFAULT 'standby';

-- The runs of some jobs that are alive. Whoever asks holds the rows of these jobs until its transaction ends, and only then are
-- the runs read: two that want to begin one of the same job at the same time do not both find room.
CREATE OR REPLACE FUNCTION fastapi_singleton.alive_runs(fleet text, jobs text[])
RETURNS TABLE (job text, tick timestamptz, run json) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM fastapi_singleton.job AS j WHERE j.name = fleet AND j.key = ANY (jobs) ORDER BY j.key FOR UPDATE;
    RETURN QUERY {ALIVE} AND r.name = fleet AND r.job = ANY (jobs);
END $$;
""",
)

# Any fixed number will do; it only has to be the same in every worker.
_MIGRATION_LOCK = 0x6661_7374_6170_6973

_TABLES = ("schema_version", "term", "worker", "run", "job")
# Asked of the catalogue's tables: to_regclass() answers from a cache, which may not know of a commit a moment ago.
_PRESENT = """
SELECT count(*) FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = 'fastapi_singleton' AND c.relname = ANY($1::text[])
"""
_NOTE_VERSION = "INSERT INTO fastapi_singleton.schema_version (version) VALUES ({}) ON CONFLICT DO NOTHING;"


def schema_sql(role: str = "your_application_role") -> str:
    """What an administrator runs where the application's own role may not create tables."""
    steps = [f"{sql.strip()}\n{_NOTE_VERSION.format(number)}" for number, sql in enumerate(MIGRATIONS, start=1)]
    role = role.replace('"', '""')
    grants = (
        f'GRANT USAGE ON SCHEMA fastapi_singleton TO "{role}";\n'
        f'GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA fastapi_singleton TO "{role}";\n'
        f'GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA fastapi_singleton TO "{role}";'
    )
    return "\n\n".join(["BEGIN;", *steps, grants, "COMMIT;"])


async def ensure_schema(connection: "asyncpg.Connection[Any]", patience: float, *, create: bool = True) -> None:
    """Bring the tables up to date. Workers that come at the same time do not collide: one migrates, the others look on."""
    if not create and await _version(connection) == 0:
        if not await connection.fetchval("SELECT has_database_privilege(current_database(), 'CREATE')"):
            raise asyncpg.InsufficientPrivilegeError("there are none yet, and it may create no schema")
        raise EmptyStoreError("There are no tables of fastapi_singleton in the database")
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    while await _version(connection) < len(MIGRATIONS):
        # Not asyncpg's `transaction()`: on a line that has gone dead its roll-back would wait for ever. Whatever goes wrong
        # here ends the session, and the transaction with it.
        await connection.execute("BEGIN")
        # Tried, not waited for: a waiter's open snapshot would hold up VACUUM and concurrent index builds.
        if await connection.fetchval("SELECT pg_try_advisory_xact_lock($1)", _MIGRATION_LOCK):
            # Read again under the lock: somebody may have finished in between.
            for number in range(await _version(connection), len(MIGRATIONS)):
                await connection.execute(MIGRATIONS[number])
                await connection.execute(_NOTE_VERSION.format(number + 1))
            await connection.execute("COMMIT")
            return
        await connection.execute("ROLLBACK")
        if loop.time() > deadline:
            raise StoreError(
                "Another session has been creating the tables of fastapi_singleton for too long.",
                hint="look for a stuck session that holds an advisory lock in pg_locks.",
            )
        await asyncio.sleep(0.02)


async def _version(connection: "asyncpg.Connection[Any]") -> int:
    """Which steps have been taken; 0 also if a table is missing that they made."""
    present = await connection.fetchval(_PRESENT, list(_TABLES[:1]))
    if not present:
        return 0
    version: int = await connection.fetchval("SELECT coalesce(max(version), 0) FROM fastapi_singleton.schema_version")
    if version >= len(MIGRATIONS) and await connection.fetchval(_PRESENT, list(_TABLES)) < len(_TABLES):
        return 0
    return version
