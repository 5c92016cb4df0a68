"""The application the storm goes over: two jobs each second, each run a line in a file that outlives every worker."""

import os

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from fastapi import FastAPI

from fastapi_singleton import Singleton, current_run, job_policy

EFFECTS = os.environ["CHAOS_EFFECTS"]


def note_effect() -> None:
    run = current_run()
    line = f"{run.job} {run.scheduled_for:%Y-%m-%dT%H:%M:%S%z} {run.attempt} {run.token} {os.getpid()}\n"
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


scheduler = AsyncIOScheduler(timezone="UTC")
for job in (once, again):
    scheduler.add_job(job, "cron", second="*", id=job.__name__, coalesce=False)

singleton = Singleton(scheduler, name="chaos", lease=float(os.environ["EXAMPLE_LEASE"]), drain=2.0)
app = FastAPI(lifespan=singleton.lifespan)
app.include_router(singleton.router())
