"""APScheduler 3, unmodified: started only when elected, paused between terms, drained at the end.

stock.py   what is used of APScheduler's insides, and nowhere else
guard.py   stands before each executor: claim → run → record
duties.py  what a leader does with the scheduler: start, catch up, sweep, pause, drain
"""

from .duties import SchedulerDuties
from .stock import check_scheduler, job_key

__all__ = ["SchedulerDuties", "check_scheduler", "job_key"]
