"""Two jobs, four workers, one run each: the two lines that matter are marked."""

import logging
import os

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from fastapi import FastAPI

from fastapi_singleton import Singleton, current_run

logging.basicConfig(level=logging.INFO, format="%(asctime)s [%(process)d] %(message)s", datefmt="%H:%M:%S")
logging.getLogger("apscheduler").setLevel(logging.WARNING)
logger = logging.getLogger("example_app")


def note(job: str) -> None:
    logger.info("ran %s in worker %d, due at %s", job, os.getpid(), f"{current_run().scheduled_for:%H:%M:%S}")


async def pulse() -> None:
    """A coroutine job: once a second."""
    note("pulse")


def report() -> None:
    """A plain function: runs in a thread, every five seconds."""
    note("report")


scheduler = AsyncIOScheduler(timezone="UTC")
scheduler.add_job(pulse, "cron", second="*", id="pulse")
scheduler.add_job(report, "cron", second="*/5", id="report")

# The store is what $FASTAPI_SINGLETON_URL names, or a SQLite file in the working directory.
singleton = Singleton(scheduler, lease=float(os.environ.get("EXAMPLE_LEASE", "10")))
app = FastAPI(title="fastapi_singleton example", lifespan=singleton.lifespan)  # ← one leader among the workers
app.include_router(singleton.router())  # ← GET /scheduler/status


@app.get("/")
async def index() -> dict[str, object]:
    return {"worker": os.getpid(), "leads": singleton.is_leader, "status": "/scheduler/status"}
