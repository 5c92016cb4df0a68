"""The tables, beside whatever else the file holds. Forward-only: a released step is never edited, only followed.

Times that people read are text, ISO 8601 in UTC and of one width, so that they sort as the moments they name. What a lease
is decided by is a number: seconds on the clock that starts with the machine, together with the id of that start.
"""

import sqlite3
from datetime import UTC, datetime

# Step by step; entry N brings the tables to version N + 1. Only additions, so that older workers go on beside newer ones;
# each can be repeated, so that a table that somebody dropped comes back. One statement each: a script would commit.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE IF NOT EXISTS fastapi_singleton_schema_version (version INTEGER PRIMARY KEY, applied_at TEXT NOT NULL)",
        # One row per name: who leads, or led last. The token only ever grows; the row is never deleted. `floor` is the
        # greatest tick ever deleted from the ledger; nothing at or before it can be claimed again.
        """
        CREATE TABLE IF NOT EXISTS fastapi_singleton_term (
            name TEXT PRIMARY KEY,
            token INTEGER NOT NULL,
            worker TEXT NOT NULL,
            hostname TEXT NOT NULL,
            pid INTEGER NOT NULL,
            process TEXT NOT NULL,
            boot TEXT NOT NULL,
            expires_after_boot REAL NOT NULL,
            lease REAL NOT NULL,
            acquired_at TEXT NOT NULL,
            renewed_at TEXT NOT NULL,
            released_at TEXT,
            floor TEXT NOT NULL DEFAULT '',
            jobs TEXT NOT NULL DEFAULT '[]',
            jobs_revision INTEGER NOT NULL DEFAULT 0
        )
        """,
        # One row per worker that was seen lately.
        """
        CREATE TABLE IF NOT EXISTS fastapi_singleton_worker (
            name TEXT NOT NULL,
            worker TEXT NOT NULL,
            hostname TEXT NOT NULL,
            pid INTEGER NOT NULL,
            version TEXT NOT NULL,
            boot TEXT NOT NULL,
            seen_after_boot REAL NOT NULL,
            started_at TEXT NOT NULL,
            last_seen_at TEXT NOT NULL,
            PRIMARY KEY (name, worker)
        )
        """,
        # The ledger: one row per tick and attempt. Whoever enters it runs it; no second row, no second run.
        """
        CREATE TABLE IF NOT EXISTS fastapi_singleton_run (
            name TEXT NOT NULL,
            job TEXT NOT NULL,
            tick TEXT NOT NULL,
            attempt INTEGER NOT NULL,
            id TEXT NOT NULL,
            nonce TEXT NOT NULL,
            outcome TEXT NOT NULL,
            cause TEXT NOT NULL,
            token INTEGER,
            worker TEXT NOT NULL,
            started_at TEXT,
            finished_at TEXT,
            error TEXT,
            PRIMARY KEY (name, job, tick, attempt)
        )
        """,
        """
        CREATE INDEX IF NOT EXISTS fastapi_singleton_run_newest
        ON fastapi_singleton_run (name, tick DESC, job, attempt DESC)
        """,
        # One for each outcome that is looked for: SQLite uses a partial index only where its very condition is asked.
        """
        CREATE INDEX IF NOT EXISTS fastapi_singleton_run_running
        ON fastapi_singleton_run (name, worker) WHERE outcome = 'running'
        """,
        """
        CREATE INDEX IF NOT EXISTS fastapi_singleton_run_abandoned
        ON fastapi_singleton_run (name, job, finished_at) WHERE outcome = 'abandoned'
        """,
        # What the fleet remembers of a job: ticks after `since` may lack a row; `anchor` is the phase of its interval.
        """
        CREATE TABLE IF NOT EXISTS fastapi_singleton_job (
            name TEXT NOT NULL,
            key TEXT NOT NULL,
            fingerprint TEXT NOT NULL,
            since TEXT NOT NULL,
            anchor TEXT,
            paused INTEGER NOT NULL DEFAULT 0,
            removed INTEGER NOT NULL DEFAULT 0,
            PRIMARY KEY (name, key)
        )
        """,
    ),
    (
        "ALTER TABLE fastapi_singleton_worker ADD COLUMN process TEXT NOT NULL DEFAULT ''",
        # Each worker is seen, or not, by its own lease.
        "ALTER TABLE fastapi_singleton_worker ADD COLUMN lease REAL NOT NULL DEFAULT 10",
        "ALTER TABLE fastapi_singleton_worker ADD COLUMN role TEXT NOT NULL DEFAULT 'standby'",
        """
        CREATE INDEX IF NOT EXISTS fastapi_singleton_run_running_of_job
        ON fastapi_singleton_run (name, job) WHERE outcome = 'running'
        """,
    ),
)

_TABLES = 5
# How many of our tables there are; the file's user_version is the application's, so the version has a table of its own.
_PRESENT = """
SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name IN ('fastapi_singleton_schema_version',
    'fastapi_singleton_term', 'fastapi_singleton_worker', 'fastapi_singleton_run', 'fastapi_singleton_job')
"""
_VERSION = "SELECT coalesce(max(version), 0) FROM fastapi_singleton_schema_version"
_NOTE_VERSION = "INSERT OR IGNORE INTO fastapi_singleton_schema_version VALUES (?, ?)"


def ensure_schema(connection: sqlite3.Connection) -> None:
    """Bring the tables up to date. Workers that come at the same time do not collide: one migrates, the others wait."""
    if _version(connection) >= len(MIGRATIONS):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Read again under the lock: somebody may have finished in between.
        for number in range(_version(connection), len(MIGRATIONS)):
            for statement in MIGRATIONS[number]:
                _repeatable(connection, statement)
            connection.execute(_NOTE_VERSION, (number + 1, stamp(datetime.now(UTC))))
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _repeatable(connection: sqlite3.Connection, statement: str) -> None:
    try:
        connection.execute(statement)
    except sqlite3.OperationalError as error:
        if "duplicate column name" not in str(error):
            raise


def _version(connection: sqlite3.Connection) -> int:
    """Which steps have been taken; 0 also if a table is missing that they made."""
    if connection.execute(_PRESENT).fetchone()[0] < _TABLES:
        return 0
    version: int = connection.execute(_VERSION).fetchone()[0]
    return version


def stamp(time: datetime) -> str:
    """A moment as it stands in the tables."""
    return time.astimezone(UTC).isoformat(timespec="microseconds")
