"""APScheduler 3, unmodified: started only when elected, paused between terms, drained at the end.

stock.py       what is used of APScheduler's insides, and nowhere else
names.py       what each job is called in the whole fleet
gate.py        between a tick and its run: trusted term? → claim → run → how it ended
guard.py       stands before each executor and sends its calls through the gate
looking.py     which jobs are due, by the store's clock
repeating.py   runs cut short by a crash, made again
settling.py    one job at the beginning of a term
succession.py  from leader to leader: what is caught up on, swept, repeated, forgotten
duties.py      what a leader does with the scheduler: start, pause, drain, stop
"""

from .duties import SchedulerDuties
from .stock import check_scheduler, job_key

__all__ = ["SchedulerDuties", "check_scheduler", "job_key"]
