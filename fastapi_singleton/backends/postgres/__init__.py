"""PostgreSQL: a session advisory lock, kept honest by a lease the server itself enforces.

address.py     which server, without a secret in any text
session.py     the one dedicated connection per worker, and every reason to refuse it
schema.py      the tables, created by whichever worker comes first
leadership.py  the statements of leadership and fleet
ledger.py      the statements of the ledger
fence.py       a run's right to write, in the user's own transaction
backend.py     the lock, the term, the fleet; the one place that sends statements
"""

from .address import PostgresStore

__all__ = ["PostgresStore"]
