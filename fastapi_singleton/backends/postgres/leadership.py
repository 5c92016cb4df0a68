"""The statements of leadership and fleet on PostgreSQL, each with what it guarantees."""

from . import ledger
from .ledger import HISTORY_DIGEST

# Shows that this worker lives; rewrites its row only when it has grown old. Not much older
# than the margin by which trust ends before the lease: whoever trusts in itself must have been seen.
_SEEN = """
    INSERT INTO fastapi_singleton.worker AS w
        (name, worker, hostname, pid, started_at, lease, version, process, role, last_seen_at)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, clock_timestamp())
    ON CONFLICT (name, worker) DO UPDATE SET last_seen_at = clock_timestamp()
    WHERE w.last_seen_at < clock_timestamp() - $6::interval / 20
    RETURNING w.*
"""
# A statement does not see what it writes itself, so its own row is put beside the others.
_WORKERS = """
    (SELECT coalesce(json_agg(w ORDER BY w.started_at, w.worker), '[]')::text FROM (
        SELECT * FROM seen UNION ALL
        SELECT * FROM fastapi_singleton.worker AS other
        WHERE other.name = $1 AND other.last_seen_at > clock_timestamp() - other.lease
          AND other.worker NOT IN (SELECT seen.worker FROM seen)
    ) AS w) AS workers
"""

# Changes when the jobs or the newest runs do: what every poll would otherwise carry is fetched only then.
_DIGEST = f"concat(t.token, ' ', t.jobs_revision, ' ', {HISTORY_DIGEST}) AS digest"
_TERM = "t.worker, t.hostname, t.pid, t.token, t.acquired_at, t.renewed_at"

_TERM_IF_ANY = f"""(SELECT) AS always LEFT JOIN LATERAL (
    SELECT {_TERM}, t.jobs_revision, t.released_at IS NULL AND t.renewed_at > clock_timestamp() - t.lease AS current
    FROM fastapi_singleton.term AS t WHERE t.name = $1
) AS t ON true"""

# Tries the lock without ever waiting for it, and reads the fleet, in one round trip. Gives at most one session `won`.
CONTEND = f"""
WITH seen AS ({_SEEN})
SELECT pg_try_advisory_lock($10) AS won, {_WORKERS}, clock_timestamp() AS now, {_DIGEST}, t.* FROM {_TERM_IF_ANY}
"""

# The same for a worker that does not want to lead, and perhaps publishes its jobs: in a term of nobody's, then.
ATTEND = f"""
WITH seen AS ({_SEEN}),
published AS (
    INSERT INTO fastapi_singleton.term AS t
        (name, token, worker, hostname, pid, acquired_at, renewed_at, released_at, jobs, jobs_revision)
    SELECT $1, 0, '', '', 0, clock_timestamp(), clock_timestamp(), clock_timestamp(), $10::text::jsonb, 1
    WHERE $10::text IS NOT NULL
    ON CONFLICT (name) DO UPDATE SET jobs = excluded.jobs, jobs_revision = t.jobs_revision + 1
)
SELECT {_WORKERS}, clock_timestamp() AS now, {_DIGEST}, t.* FROM {_TERM_IF_ANY}
"""

# The same view of the fleet for somebody who is not of it: takes nothing, leaves no trace.
LOOK = f"""
WITH seen AS (SELECT * FROM fastapi_singleton.worker WHERE false)
SELECT {_WORKERS}, clock_timestamp() AS now, {_DIGEST}, t.* FROM {_TERM_IF_ANY}
"""

# Opens a term. The token grows even if the store lost its last writes, because it is never behind the store's clock.
ELECT = """
INSERT INTO fastapi_singleton.term AS t (name, token, worker, hostname, pid, acquired_at, renewed_at, lease)
VALUES ($1, (extract(epoch FROM clock_timestamp()) * 1000)::bigint, $2, $3, $4, clock_timestamp(), clock_timestamp(), $6)
ON CONFLICT (name) DO UPDATE
SET token = greatest(t.token + 1, excluded.token), worker = excluded.worker, hostname = excluded.hostname,
    pid = excluded.pid, acquired_at = excluded.acquired_at, renewed_at = excluded.renewed_at, released_at = NULL,
    lease = excluded.lease
RETURNING t.token, pg_notify($5, 'elected')
"""

# Touches the term only while its token is still the newest; the lock itself lives as long as this session does.
RENEW = f"""
WITH seen AS ({_SEEN}),
mine AS (
    UPDATE fastapi_singleton.term AS t SET renewed_at = clock_timestamp(), jobs = coalesce($11::text::jsonb, jobs),
        jobs_revision = jobs_revision + ($11::text IS NOT NULL)::int
    WHERE name = $1 AND token = $10 AND worker = $2 AND released_at IS NULL
    RETURNING {_TERM}, true AS current, {_DIGEST}
)
SELECT mine.*, {_WORKERS}, clock_timestamp() AS now FROM mine
"""

# Ends the term, keeps its token, frees the lock, then (at commit, so after the unlock) wakes the standbys.
RELEASE = """
WITH ended AS (
    UPDATE fastapi_singleton.term SET released_at = clock_timestamp() WHERE name = $1 AND token = $2
)
SELECT pg_advisory_unlock($3), pg_notify($4, 'released')
"""

# A worker with a thread still running stays known until its lease is over, so that its run is not given up before.
LEAVE = """
DELETE FROM fastapi_singleton.worker WHERE name = $1 AND worker = $2 AND NOT EXISTS (
    SELECT FROM fastapi_singleton.run WHERE name = $1 AND worker = $2 AND outcome = 'running')
"""

EXAMINE = """
WITH client AS (SELECT usename, datname FROM pg_stat_activity WHERE backend_type = 'client backend')
SELECT current_setting('server_version') AS version, current_setting('max_connections')::int AS most,
       (SELECT count(*)::int FROM client) AS used,
       least(
           current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
               - (SELECT count(*) FROM client),
           (SELECT nullif(rolconnlimit, -1) FROM pg_roles WHERE rolname = current_user)
               - (SELECT count(*) FROM client WHERE usename = current_user),
           (SELECT nullif(datconnlimit, -1) FROM pg_database WHERE datname = current_database())
               - (SELECT count(*) FROM client WHERE datname = current_database())
       )::int AS left
"""

STATEMENTS = {
    "examine": EXAMINE, "contend": CONTEND, "attend": ATTEND, "look": LOOK, "elect": ELECT, "renew": RENEW, "release": RELEASE,
    "leave": LEAVE, **ledger.STATEMENTS,
}  # fmt: skip
