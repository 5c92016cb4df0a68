"""The fence: a run's right to write, proved and held in the user's own transaction.

It is the run's row that is held, not the term's: a frozen worker's open transaction must not keep the next leader from being
elected. Neither the run's ending nor a sweep waits for a row that is held.
"""

from typing import Any

from ...errors import ConfigurationError, LostLeadershipError
from ...records import Run

# In the user's own transaction: the run's row, held against whoever would give it up for dead.
FENCE = """
SELECT outcome FROM fastapi_singleton.run
WHERE name = $1 AND job = $2 AND tick = $3 AND attempt = $4 AND nonce = $5 FOR SHARE
"""


async def fence(connection: Any, name: str, run: Run) -> None:
    """Raise unless, as of this transaction and until its end, the run is still the one that may write."""
    if not hasattr(connection, "fetchrow") or not hasattr(connection, "is_in_transaction"):
        raise ConfigurationError(
            f"fence() needs an asyncpg connection, not {type(connection).__name__}.",
            hint="with SQLAlchemy pass (await connection.get_raw_connection()).driver_connection.",
        )
    if not connection.is_in_transaction():
        raise ConfigurationError(
            "fence() was called outside a transaction, where it would protect nothing.",
            hint="call it first thing inside `async with connection.transaction():`.",
        )
    elsewhere = ConfigurationError(
        "fence() found no trace of this run in the connection's database.",
        hint="use a connection to the database that the singleton's URL names.",
    )
    if await connection.fetchval("SELECT to_regclass('fastapi_singleton.run')") is None:
        raise elsewhere
    row = await connection.fetchrow(FENCE, name, run.job, run.scheduled_for, run.attempt, run.nonce)
    if row is None:
        raise elsewhere
    if row["outcome"] != "running":
        raise LostLeadershipError(
            f"The run of {run.job} due at {run.scheduled_for:%Y-%m-%d %H:%M:%S} was given up: it is {row['outcome']}.",
            hint="let the transaction fail; if the job's policy is rerun, a later attempt does the work.",
        )
