"""Two jobs, four workers, one run each: the two lines that matter are marked."""

import logging
import os

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from fastapi import FastAPI

from fastapi_singleton import Singleton

logging.basicConfig(level=logging.INFO, format="%(asctime)s [%(process)d] %(message)s", datefmt="%H:%M:%S")
logging.getLogger("apscheduler").setLevel(logging.WARNING)
logger = logging.getLogger("example_app")


async def pulse() -> None:
    """A coroutine job: once a second."""
    logger.info("ran pulse in worker %d", os.getpid())


def report() -> None:
    """A plain function: runs in a thread, every five seconds."""
    logger.info("ran report in worker %d", os.getpid())


scheduler = AsyncIOScheduler(timezone="UTC")
scheduler.add_job(pulse, "cron", second="*", id="pulse")
scheduler.add_job(report, "cron", second="*/5", id="report")

singleton = Singleton(
    scheduler,
    os.environ.get("FASTAPI_SINGLETON_URL", "postgresql://localhost/app"),
    lease=float(os.environ.get("EXAMPLE_LEASE", "10")),
)
app = FastAPI(title="fastapi_singleton example", lifespan=singleton.lifespan)  # ← one leader among the workers
app.include_router(singleton.router())  # ← GET /scheduler/status


@app.get("/")
async def index() -> dict[str, object]:
    return {"worker": os.getpid(), "leads": singleton.is_leader, "status": "/scheduler/status"}
