"""Redis (and Valkey): a lease with a time to live, and scripts that check the term and write in one step.

address.py         which server, without a secret in any text
server.py          every reason to refuse a server, and what its errors mean
session.py         the connection for commands
farewell.py        how it is left with last words that nobody waits for
listening.py       the connection that hears of hand-overs: two connections per worker in all
scripts.py         what all scripts share; the lease, the term, the fleet
ledger_scripts.py  the ledger, and what the fleet remembers of jobs
tidying_scripts.py what is given up, repeated, forgotten
rows.py            how ticks are keyed, and how rows are written and read
sight.py           what the scripts answer of the fleet
backend.py         the one place that runs scripts

All keys of a name begin with `fastapi_singleton:{name}:`; the braces put them into one slot of a cluster.
"""

from .address import RedisStore

__all__ = ["RedisStore"]
