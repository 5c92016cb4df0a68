"""The ledger's statements on PostgreSQL, and how their rows are read.

Claims run on the session that owns the lock, so that the server itself fences them, and carry the token besides: a claim
whose reply was lost is sent again on a new session, where the token (with the term's row share-locked, so that no election
can pass it) is all that decides.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields
from datetime import timedelta
from typing import Any

from ...records import GONE, LOCK_PREFIX, NEWEST, SILENT, Alive, Crowd, Ending, Entry, JobState, Verdict
from ..views import clean
from .schema import ALIVE

# Accepts an entry iff its token (if it has one) is the newest, its tick lies above the floor and not beyond the store's
# time + lease, and there is no row for the tick and attempt, or one with the same nonce that is still running (then it is
# the same claim, sent again). A claim after its latest start is entered as missed. One that finds as many runs alive as
# may be is not entered, and told of them: under a term nobody else claims, so that it is enough to look; where many do, the
# job's row is held first. Somebody else's row that is there already is only read: to conflict with it would be to wait for
# whoever holds it (`fence` in an open transaction). Any other that conflicts came in after this statement's beginning.
ENTER = f"""
WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now),
term AS MATERIALIZED (
    SELECT t.token, t.floor, t.released_at FROM fastapi_singleton.term AS t WHERE t.name = $1 FOR SHARE
),
a AS MATERIALIZED (
    SELECT * FROM json_to_recordset($4::text::json) AS a (job text, tick timestamptz, attempt int, id text, nonce text,
                                              cause text, token bigint, outcome text, latest timestamptz, error text, most int)
),
raced AS MATERIALIZED (SELECT array_agg(job) AS jobs FROM a WHERE token IS NULL AND most IS NOT NULL),
alive AS MATERIALIZED (
    {ALIVE} AND r.name = $1 AND (SELECT jobs IS NULL FROM raced)
    UNION ALL
    SELECT found.* FROM raced CROSS JOIN LATERAL fastapi_singleton.alive_runs($1, jobs) AS found WHERE jobs IS NOT NULL
),
asked AS MATERIALIZED (
    SELECT a.*, clock.now,
           CASE WHEN most IS NOT NULL AND outcome = 'running' AND job IN (SELECT alive.job FROM alive)
                THEN (SELECT json_agg(alive.run) FROM alive WHERE alive.job = a.job AND alive.tick <> a.tick) END AS alive,
           coalesce(a.tick <= term.floor, false) AS pruned,
           a.token IS NOT NULL AND (term.token IS DISTINCT FROM a.token OR term.released_at IS NOT NULL) AS lost,
           a.tick > clock.now + $3::interval AS early,
           CASE WHEN a.outcome = 'running' AND a.latest < clock.now THEN 'missed' ELSE a.outcome END AS entered_as
    FROM a CROSS JOIN clock LEFT JOIN term ON true
),
judged AS MATERIALIZED (
    SELECT asked.*, alive IS NOT NULL AND entered_as = 'running' AND most <= (
               SELECT count(*) FROM json_array_elements(alive) AS run WHERE run ->> 0 <> ALL ($5::text[])) AS crowded,
           there.nonce IS NOT NULL AS known, coalesce(there.nonce = asked.nonce AND there.outcome = 'running', false) AS mine
    FROM asked LEFT JOIN LATERAL (
        SELECT r.nonce, r.outcome FROM fastapi_singleton.run AS r
        WHERE r.name = $1 AND r.job = asked.job AND r.tick = asked.tick AND r.attempt = asked.attempt
        LIMIT 1
    ) AS there ON true
),
entered AS (
    INSERT INTO fastapi_singleton.run AS r
        (name, job, tick, attempt, id, nonce, outcome, cause, token, worker, started_at, finished_at, error)
    SELECT $1, job, tick, attempt, id, nonce, entered_as, cause, token, $2,
           CASE WHEN entered_as = 'running' THEN now END, CASE WHEN entered_as <> 'running' THEN now END,
           CASE WHEN entered_as = outcome THEN error
                ELSE format('came up only %s s after its time', round(extract(epoch FROM now - tick), 1)) END
    FROM judged WHERE NOT (lost OR pruned OR early OR crowded OR known AND NOT mine)
    ON CONFLICT (name, job, tick, attempt) DO UPDATE SET nonce = excluded.nonce
        WHERE r.nonce = excluded.nonce AND r.outcome = 'running'
    RETURNING r.nonce, r.outcome
)
SELECT judged.nonce, alive::text,
       CASE WHEN entered.outcome = 'running' OR mine AND (lost OR crowded) THEN 'yours'
            WHEN entered.outcome IS NOT NULL THEN 'written'
            WHEN lost THEN 'lost' WHEN pruned THEN 'pruned' WHEN early THEN 'early'
            WHEN crowded AND NOT known THEN 'full' ELSE 'taken' END AS verdict
FROM judged LEFT JOIN entered USING (nonce)
"""

# Said the other way round, or the planner, which expects no such rows, would look each ending up among all unsettled runs.
_OPEN = "r.outcome NOT IN ('succeeded', 'failed', 'missed', 'skipped')"

# Writes down how runs ended; also those given up for dead meanwhile, because this is the truth. A row that somebody
# holds (`fence` in an open transaction) is not waited for: it is returned, to be tried again.
FINISH = f"""
WITH done AS MATERIALIZED (
    SELECT * FROM unnest($2::text[], $3::timestamptz[], $4::int[], $5::text[], $6::text[], $7::text[], $8::float8[])
         AS d (job, tick, attempt, nonce, ending, reason, seconds)
),
free AS MATERIALIZED (
    SELECT done.* FROM done JOIN fastapi_singleton.run AS r ON r.name = $1 AND r.job = done.job AND r.tick = done.tick
        AND r.attempt = done.attempt AND r.nonce = done.nonce AND {_OPEN}
    FOR UPDATE OF r SKIP LOCKED
),
written AS (
    UPDATE fastapi_singleton.run AS r
    SET outcome = free.ending, error = free.reason, finished_at = r.started_at + make_interval(secs => free.seconds)
    FROM free WHERE r.name = $1 AND r.job = free.job AND r.tick = free.tick AND r.attempt = free.attempt
)
SELECT done.nonce FROM done JOIN fastapi_singleton.run AS r ON r.name = $1 AND r.job = done.job AND r.tick = done.tick
    AND r.attempt = done.attempt AND r.nonce = done.nonce AND {_OPEN}
WHERE done.nonce NOT IN (SELECT free.nonce FROM free)
"""

# Makes a job known at its first meeting, and remembers what it was; a changed schedule starts afresh. One that somebody else
# makes known at this very moment may not be among the answers: ask again.
MEET = """
WITH noted AS MATERIALIZED (
    SELECT n.* FROM unnest($2::text[], $3::text[], $4::timestamptz[], $5::boolean[]) AS n (key, fingerprint, anchor, paused)
),
met AS (
    INSERT INTO fastapi_singleton.job AS j (name, key, fingerprint, since, anchor, paused)
    SELECT $1, key, fingerprint, clock_timestamp(), anchor, paused FROM noted ORDER BY key
    ON CONFLICT (name, key) DO UPDATE SET fingerprint = excluded.fingerprint, since = excluded.since,
        anchor = excluded.anchor, paused = excluded.paused, removed = false
    WHERE j.fingerprint <> excluded.fingerprint
    RETURNING key, since, anchor, paused, removed, xmax = 0 AS new
)
SELECT * FROM met
UNION ALL
SELECT key, j.since, j.anchor, j.paused, j.removed, false FROM fastapi_singleton.job AS j JOIN noted USING (key)
WHERE j.name = $1 AND key NOT IN (SELECT met.key FROM met)
"""

RECALL = """
SELECT key, since, anchor, paused, removed, false AS new FROM fastapi_singleton.job WHERE name = $1 AND key = ANY ($2::text[])
"""

# A resumed job owes nothing for the time it was paused.
NOTE = """
UPDATE fastapi_singleton.job AS j
SET paused = coalesce(n.paused, j.paused), removed = coalesce(n.removed, j.removed),
    since = greatest(j.since, n.since, CASE WHEN j.paused AND NOT n.paused THEN clock_timestamp() END)
FROM unnest($2::text[], $3::boolean[], $4::boolean[], $5::timestamptz[]) AS n (key, paused, removed, since)
WHERE j.name = $1 AND j.key = n.key
"""

TICKS = """
SELECT DISTINCT r.job, r.tick FROM unnest($2::text[], $3::timestamptz[]) AS w (job, since)
JOIN fastapi_singleton.run AS r ON r.name = $1 AND r.job = w.job AND r.tick > w.since
"""

_UNSEEN = """NOT EXISTS (
        SELECT FROM fastapi_singleton.worker AS w
        WHERE w.name = $1 AND w.worker = r.worker AND w.last_seen_at > clock_timestamp() - w.lease)"""

UNSEEN = f"""
SELECT DISTINCT r.worker, coalesce(w.process, '') AS process
FROM fastapi_singleton.run AS r LEFT JOIN fastapi_singleton.worker AS w ON w.name = r.name AND w.worker = r.worker
WHERE r.name = $1 AND r.outcome IN ('running', 'abandoned') AND (r.outcome = 'running' OR r.error = '{SILENT}')
  AND r.worker <> $2 AND {_UNSEEN}
"""

# Gives up runs whose worker has not been seen for a whole lease of its own; never waits for a row that somebody holds.
SWEEP = f"""
WITH doubtful AS (
    SELECT r.job, r.tick, r.attempt FROM fastapi_singleton.run AS r
    WHERE r.name = $1 AND r.outcome = 'abandoned' AND r.error = '{SILENT}' AND r.worker <> ALL ($3::text[]) AND {_UNSEEN}
    FOR UPDATE OF r SKIP LOCKED
),
dead AS (
    UPDATE fastapi_singleton.run AS r SET error = '{GONE}'
    FROM doubtful WHERE r.name = $1 AND r.job = doubtful.job AND r.tick = doubtful.tick AND r.attempt = doubtful.attempt
),
gone AS (
    SELECT r.job, r.tick, r.attempt FROM fastapi_singleton.run AS r
    WHERE r.name = $1 AND r.outcome = 'running' AND r.worker <> $2 AND {_UNSEEN}
    LIMIT 1000 FOR UPDATE OF r SKIP LOCKED
)
UPDATE fastapi_singleton.run AS r
SET outcome = 'abandoned', finished_at = clock_timestamp(),
    error = CASE WHEN r.worker = ANY ($3::text[]) THEN '{SILENT}' ELSE '{GONE}' END
FROM gone WHERE r.name = $1 AND r.job = gone.job AND r.tick = gone.tick AND r.attempt = gone.attempt
RETURNING r.job, r.tick, r.attempt, r.worker
"""

# Runs cut short, lately enough, that have no later attempt.
CUT = """
SELECT r.job, r.tick, r.attempt, r.finished_at FROM fastapi_singleton.run AS r
WHERE r.name = $1 AND r.outcome = 'abandoned' AND r.job = ANY($2::text[]) AND r.attempt < $3
  AND r.finished_at > clock_timestamp() - $4::interval
  AND NOT EXISTS (SELECT FROM fastapi_singleton.run AS later
                  WHERE later.name = $1 AND later.job = r.job AND later.tick = r.tick AND later.attempt > r.attempt)
"""

# Deletes old rows, some at a time, and in the same transaction lifts the floor over them: in a term of nobody's, if there was
# none yet. Forgets workers and locks of long ago; a later token is still greater, because it is never behind the clock.
PRUNE = f"""
WITH long_gone AS (
    DELETE FROM fastapi_singleton.worker WHERE last_seen_at < clock_timestamp() - interval '1 day'
),
let_go AS (
    DELETE FROM fastapi_singleton.term
    WHERE starts_with(name, '{LOCK_PREFIX}') AND renewed_at < clock_timestamp() - lease - interval '1 day'
),
old AS (
    SELECT r.job, r.tick, r.attempt FROM fastapi_singleton.run AS r
    WHERE r.name = $1 AND r.tick < clock_timestamp() - $3::interval AND r.outcome <> 'running'
      AND ($2::bigint IS NULL OR EXISTS (SELECT FROM fastapi_singleton.term WHERE name = $1 AND token = $2))
    ORDER BY r.tick LIMIT 1000 FOR UPDATE SKIP LOCKED
),
deleted AS (
    DELETE FROM fastapi_singleton.run AS r USING old
    WHERE r.name = $1 AND r.job = old.job AND r.tick = old.tick AND r.attempt = old.attempt
    RETURNING r.tick
)
INSERT INTO fastapi_singleton.term AS t (name, token, worker, hostname, pid, acquired_at, renewed_at, released_at, floor)
SELECT $1, 0, '', '', 0, clock_timestamp(), clock_timestamp(), clock_timestamp(), max(tick) FROM deleted HAVING count(*) > 0
ON CONFLICT (name) DO UPDATE SET floor = greatest(t.floor, excluded.floor)
RETURNING (SELECT count(*) FROM deleted) AS deleted
"""

_RUN = """json_build_object('id', r.id, 'job', r.job, 'scheduled_for', r.tick, 'started_at', r.started_at,
    'finished_at', r.finished_at, 'outcome', r.outcome, 'error', r.error, 'attempt', r.attempt, 'token', r.token,
    'worker', r.worker, 'cause', r.cause)"""

_NEWEST = f"""SELECT * FROM fastapi_singleton.run WHERE name = $1 ORDER BY tick DESC, job LIMIT {NEWEST}"""

# Changes when the newest runs do.
HISTORY_DIGEST = f"(SELECT md5(string_agg(r.id || r.outcome, '')) FROM ({_NEWEST}) AS r)"

# The newest runs, and the last one of each job the leader shows.
HISTORY = f"""
SELECT (SELECT json_agg({_RUN} ORDER BY r.tick DESC, r.job, r.attempt DESC)::text FROM ({_NEWEST}) AS r) AS runs,
       (SELECT json_agg({_RUN})::text FROM fastapi_singleton.term AS t
        CROSS JOIN jsonb_array_elements(t.jobs) AS j
        CROSS JOIN LATERAL (SELECT * FROM fastapi_singleton.run AS r WHERE r.name = $1 AND r.job = j ->> 'id'
                            ORDER BY r.tick DESC, r.attempt DESC LIMIT 1) AS r
        WHERE t.name = $1) AS last,
       (SELECT jobs::text FROM fastapi_singleton.term WHERE name = $1) AS jobs
"""

RUNS = f"""
SELECT ({_RUN})::text AS run FROM fastapi_singleton.run AS r
WHERE r.name = $1 AND r.job = $2 AND r.tick < coalesce($3, 'infinity'::timestamptz)
ORDER BY r.tick DESC, r.attempt DESC LIMIT $4
"""

_MOST = 2**31 - 1  # what an integer holds

STATEMENTS = {
    "enter": ENTER, "finish": FINISH, "meet": MEET, "recall": RECALL, "note": NOTE, "ticks": TICKS, "unseen": UNSEEN,
    "sweep": SWEEP, "cut": CUT, "prune": PRUNE, "history": HISTORY, "runs": RUNS,
}  # fmt: skip


def entry_arguments(
    name: str, worker: str, lease: float, entries: Sequence[Entry], beside: Collection[str]
) -> tuple[object, ...]:
    return (
        name,
        worker,
        timedelta(seconds=lease),
        # One text: the driver looks at each element of an array several times, which took longer than all the rest.
        # Not escaped: in a database that is not in Unicode the server could not read the escapes.
        json.dumps([_entry_document(entry) for entry in entries], ensure_ascii=False),
        list(beside),
    )


def _entry_document(entry: Entry) -> dict[str, object]:
    return {
        "job": entry.job,
        "tick": entry.tick.isoformat(),
        "attempt": entry.attempt,
        "id": entry.id,
        "nonce": entry.nonce,
        "cause": entry.cause,
        "token": entry.token,
        "outcome": entry.outcome,
        "latest": entry.latest and entry.latest.isoformat(),
        "error": clean(entry.error),
        "most": entry.limit and min(entry.limit, _MOST),
    }


def answer(row: Any) -> Verdict | Crowd:
    verdict = Verdict(row["verdict"])
    return verdict if verdict is not Verdict.FULL else Crowd(tuple(Alive(*run) for run in json.loads(row["alive"])))


def job_states(rows: Iterable[Any]) -> dict[str, JobState]:
    return {row["key"]: JobState(*(row[field.name] for field in fields(JobState))) for row in rows}


def ending_arguments(name: str, endings: Sequence[Ending]) -> tuple[object, ...]:
    return (
        name,
        [e.entry.job for e in endings],
        [e.entry.tick for e in endings],
        [e.entry.attempt for e in endings],
        [e.entry.nonce for e in endings],
        [e.outcome for e in endings],
        [clean(e.error) for e in endings],
        [e.seconds for e in endings],
    )
