"""The application the storm goes over: two jobs each second, each run a line in a file that outlives every worker, and one
that takes longer than its period and finds out whether it is alone."""

import asyncio
import fcntl
import os
import time

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from fastapi import FastAPI

from fastapi_singleton import Singleton, current_run, job_policy

EFFECTS = os.environ["CHAOS_EFFECTS"]


def note_effect() -> None:
    run = current_run()
    tick = f"{run.scheduled_for:%Y-%m-%dT%H:%M:%S%z}"
    line = f"{run.job} {tick} {run.attempt} {run.token} {os.getpid()} {time.time():.3f}\n"
    handle = os.open(EFFECTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(handle, line.encode())  # one write, so that lines of several workers never mix
    finally:
        os.close(handle)


async def once() -> None:
    """At most once: what a crash cuts short stays so."""
    note_effect()


@job_policy(on_crash="rerun")
def again() -> None:
    """At least once, in a thread: what a crash cuts short is run again."""
    note_effect()


async def slow() -> None:
    """With max_instances=1, never two at once. The kernel judges: it frees the lock when the process dies, and not while it
    is frozen."""
    with open(f"{EFFECTS}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with open(f"{EFFECTS}.overlaps", "a") as overlaps:
                overlaps.write(f"{current_run().scheduled_for}\n")
        await asyncio.sleep(1.7)


scheduler = AsyncIOScheduler(timezone="UTC")
for job in (once, again):
    # Three at once may be alive, so that a frozen run holds up no tick.
    scheduler.add_job(job, "cron", second="*", id=job.__name__, coalesce=False, max_instances=3)
scheduler.add_job(slow, "cron", second="*", id="slow")

mode = os.environ.get("CHAOS_MODE", "leader")
singleton = Singleton(scheduler, name="chaos", mode=mode, lease=float(os.environ["EXAMPLE_LEASE"]), drain=2.0)
app = FastAPI(lifespan=singleton.lifespan)
app.include_router(singleton.router())
