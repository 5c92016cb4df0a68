"""SQLite: a lease in a row, for workers of one host that share a file. The embedded default.

address.py      which file, and every reason to refuse it before anything is opened
database.py     the open file on a thread of its own: transactions, time limits, a file deleted underneath
faults.py       what SQLite complains of, in words an operator can act on
schema.py       the tables, created by whichever worker comes first, and how times are written in them
lease.py        who leads: a token that grows, a lease by the boot's clock
fleet.py        what every worker sees of the others, the jobs and the runs
ledger.py       which ticks were claimed and how their runs ended
memory.py       what the fleet remembers of its jobs
examination.py  what an operator should know of the file and of where it lies
backend.py      one worker's term and its view of the fleet; the one place that asks the database
"""

from .address import SqliteStore

__all__ = ["SqliteStore"]
