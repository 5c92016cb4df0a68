"""A thousand coroutine jobs due in the same second: plain APScheduler beside one that claims each tick in the ledger.

Measured is the time from the tick to the start of the last of its jobs, in one process, by one clock, against a real
PostgreSQL; with an empty ledger and with a million rows in it. `python -m benchmarks.ledger [--quick]`
"""

import argparse
import asyncio
import logging
import statistics
import sys
import time
import warnings
from typing import Any

import asyncpg
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from fastapi_singleton import Singleton

from .table import Row, table

with warnings.catch_warnings():
    # The embedded server's package looks for a runtime directory that it is never asked to use.
    warnings.simplefilter("ignore")
    from example_app.embedded import EmbeddedPostgres

JOBS = 1000
PERIOD = 2
ROWS = 1_000_000

FILL = f"""
INSERT INTO fastapi_singleton.run (name, job, tick, attempt, id, nonce, outcome, cause, token, worker, started_at, finished_at)
SELECT 'bench', 'job-' || n % {JOBS}, date_trunc('second', now()) - (n / {JOBS} + 60) * interval '1 minute', 1,
       md5(n::text), md5((-n)::text), 'succeeded', 'schedule', 1, 'bench', now(), now()
FROM generate_series(1, {ROWS}) AS n
"""


class Rounds:
    """When the jobs of each tick began."""

    def __init__(self) -> None:
        self.begun: dict[int, list[float]] = {}

    async def job(self) -> None:
        now = time.time()
        self.begun.setdefault(int(now) // PERIOD * PERIOD, []).append(now)

    def scheduler(self) -> Any:
        scheduler = AsyncIOScheduler(timezone="UTC")
        for n in range(JOBS):
            scheduler.add_job(self.job, "cron", second=f"*/{PERIOD}", id=f"job-{n}")
        return scheduler

    async def measure(self, rounds: int) -> list[float]:
        """The first round warms up and is left out."""
        while sum(len(starts) == JOBS for starts in self.begun.values()) <= rounds:
            await asyncio.sleep(0.05)
        complete = [max(starts) - tick for tick, starts in self.begun.items() if len(starts) == JOBS]
        return complete[1 : rounds + 1]


async def plain(rounds: int) -> list[float]:
    measured = Rounds()
    scheduler = measured.scheduler()
    scheduler.start()
    try:
        return await measured.measure(rounds)
    finally:
        scheduler.shutdown(wait=False)


async def claimed(url: str, rounds: int) -> list[float]:
    measured = Rounds()
    async with Singleton(measured.scheduler(), url, name="bench").lifespan():
        return await measured.measure(rounds)


async def fill(url: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(FILL)
        await connection.execute("VACUUM ANALYZE fastapi_singleton.run")
    finally:
        await connection.close()


async def compare(url: str, rounds: int) -> list[Row]:
    def say(what: str) -> None:
        print(f"measuring: {what} …", file=sys.stderr, flush=True)

    say(f"{JOBS} jobs, plain APScheduler")
    stock = statistics.median(await plain(rounds))
    say("the same, each tick claimed; empty ledger")
    empty = statistics.median(await claimed(url, rounds))
    say(f"the same with {ROWS:,} rows in the ledger")
    await fill(url)
    full = statistics.median(await claimed(url, rounds))
    return [
        Row(f"{JOBS} jobs due at once, all started: plain APScheduler", f"{stock * 1e3:.0f} ms"),
        Row("the same, each tick claimed first", f"{empty * 1e3:.0f} ms = {empty / stock:.2f} ×", "≤ 1.5 ×"),
        Row(f"the same, ledger of {ROWS:,} rows", f"{full * 1e3:.0f} ms = {full / empty:.2f} × of that", "≤ 1.2 ×"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger", description="What claiming each tick costs.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 5 if parser.parse_args().quick else 15
    logging.getLogger("apscheduler").setLevel(logging.ERROR)
    with EmbeddedPostgres(settings={"shared_buffers": "128MB"}) as store:
        print(table(asyncio.run(compare(store.url, rounds))))


if __name__ == "__main__":
    main()
