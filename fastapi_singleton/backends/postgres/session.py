"""The one dedicated connection of a worker, checked before anything rests on it.

A session advisory lock is only as good as its session. Refused, each with the cause and the cure: a transaction pooler
(two clients share the lock), a replica (it grants what the primary grants), a server without `idle_session_timeout`, and
a session on which the lease did not stick. The lease: the server ends this session by itself once it has heard nothing for
`lease` seconds, in *every* state of the session, because

- idle                          → idle_session_timeout
- idle inside a transaction     → idle_in_transaction_session_timeout (and transaction_timeout on 17+)
- waiting for a row or table    → lock_timeout and statement_timeout end the wait, then the session is idle
- between Parse and Bind        → never entered while the lock is held: every statement is prepared beforehand, so that
                                  each request is one packet and the server never waits for the rest of it
- running for a client that has gone, or half a packet on a cut line → client_connection_check_interval, keep-alives
"""

import asyncio
import inspect
import math
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import asyncpg
from asyncpg.connect_utils import SessionAttribute
from asyncpg.pool import PoolConnectionProxy

from ...errors import StoreError, UnsafeStoreError
from ...timing import Timing
from .address import PostgresStore
from .schema import ensure_schema

OLDEST_SERVER = 140_000
# Connecting holds up nobody, so it may take longer than a short lease would allow. It is some forty round trips.
_CONNECT_TIMEOUT = 5.0
_SETUP_TIMEOUT = 15.0

# While the tables are made and the statements prepared: nobody has to wait for a worker that freezes meanwhile.
_SETUP_SETTINGS = {
    "statement_timeout": "5000",
    "lock_timeout": "2000",
    "idle_in_transaction_session_timeout": "5000",
    "client_connection_check_interval": "2000",
    "default_transaction_isolation": "read committed",
}
# Connections made by the application that are in use here; two sessions on one would share its locks.
_taken: "weakref.WeakSet[asyncpg.Connection[Any]]" = weakref.WeakSet()

_ABOUT = """
SELECT pg_backend_pid() AS backend_pid, pg_is_in_recovery() AS replica,
       current_setting('server_version_num')::int AS version
"""
_APPLY = "SELECT set_config(name, value, false) FROM unnest($1::text[], $2::text[]) AS wanted (name, value)"
_READ_BACK = "SELECT name, setting FROM pg_settings WHERE name = ANY($1::text[])"

POOLER = UnsafeStoreError(
    "This connection goes through a pooler such as PgBouncer, where a session lock does not belong to one client.",
    hint="give fastapi_singleton a URL that reaches PostgreSQL directly; if the pooler works in session mode, say so "
    "with ?pooler=session in the URL.",
)
REPLICA = UnsafeStoreError(
    "This PostgreSQL server is a read-only replica, which grants the same locks as its primary.",
    hint="use the primary's URL, or list all hosts in it (postgresql://a,b/app): the primary is picked.",
)


def lease_settings(timing: Timing, version: int) -> dict[str, str]:
    """Settings without which the session must not lead; in milliseconds, as pg_settings shows them."""
    lease, request = _milliseconds(timing.lease), _milliseconds(timing.request_timeout)
    settings = {
        "idle_session_timeout": lease,
        "idle_in_transaction_session_timeout": lease,
        "statement_timeout": request,
        "lock_timeout": request,
        "client_connection_check_interval": request,
        "synchronous_commit": "on",
        "default_transaction_isolation": "read committed",
    }
    if version >= 170_000:
        settings["transaction_timeout"] = lease
    return settings


def _comfort_settings(timing: Timing, application_name: str) -> dict[str, str]:
    """Settings that help but may not take (a Unix socket has no keep-alives)."""
    return {
        "application_name": application_name,
        "tcp_keepalives_idle": str(math.ceil(timing.lease / 2)),
        "tcp_keepalives_interval": str(math.ceil(timing.lease / 8)),
        "tcp_keepalives_count": "4",
        # A plan made while the ledger was empty reads all of it, and a session would keep that plan until the next ANALYZE.
        "plan_cache_mode": "force_custom_plan",
    }


class Session:
    """A checked connection with its statements prepared. Whatever goes wrong on it ends it: nothing is half-owned."""

    def __init__(self, store: PostgresStore, connection: "asyncpg.Connection[Any]", timing: Timing) -> None:
        self._store = store
        self._connection = connection
        self._timeout = timing.request_timeout
        self._statements: dict[str, Any] = {}
        self._one_at_a_time = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        store: PostgresStore,
        timing: Timing,
        application_name: str,
        statements: Mapping[str, str],
        *,
        attempt: int = 0,
        create: bool = True,
        channel: str | None = None,
        on_message: Callable[[int], None] = lambda pid: None,
        on_cut: Callable[[], None] = lambda: None,
    ) -> "Session":
        """`attempt` picks which of several hosts is tried first, so that a dead one does not stand in the way for ever. Tables
        are made, if there are none, only with `create`."""
        try:
            async with asyncio.timeout(max(_SETUP_TIMEOUT, timing.request_timeout)):
                connection = await _connect(store, attempt)
                session = cls(store, connection, timing)
                try:
                    await session._check()
                    # From here on the server ends whatever this worker freezes in; the lease itself comes last, because
                    # a short one would not leave the time for all that comes before.
                    await session._apply(_SETUP_SETTINGS)
                    await ensure_schema(connection, patience=_CONNECT_TIMEOUT, create=create)
                    # Kept for the session's whole life: a statement parsed later would leave a moment in which a
                    # frozen client keeps the server waiting outside every time limit.
                    for name, sql in statements.items():
                        session._statements[name] = await connection.prepare(sql)
                    if channel is not None:
                        connection.add_termination_listener(lambda _: on_cut())
                        await connection.add_listener(channel, lambda _, pid, *__: on_message(pid))
                    await session._bind(timing, application_name)
                except BaseException:
                    connection.terminate()
                    raise
                return session
        except Exception as error:
            raise explain(error, store) from None

    async def _check(self) -> None:
        about = await self._connection.fetchrow(_ABOUT)
        assert about is not None
        # A pooler answers the connection's start-up itself, so the process it names is not the one that runs the query.
        if not self._store.session_pooler and about["backend_pid"] != self._connection.get_server_pid():
            raise POOLER
        if about["replica"]:
            raise REPLICA
        if about["version"] < OLDEST_SERVER:
            raise UnsafeStoreError(
                f"PostgreSQL {about['version'] // 10000} cannot end an idle session by itself.",
                hint="upgrade to PostgreSQL 14 or newer.",
            )
        self._version: int = about["version"]

    async def _apply(self, settings: Mapping[str, str]) -> None:
        await self._connection.fetch(_APPLY, list(settings), list(settings.values()))

    async def _bind(self, timing: Timing, application_name: str) -> None:
        wanted = lease_settings(timing, self._version)
        await self._apply(wanted | _comfort_settings(timing, application_name))
        found = {row["name"]: row["setting"] for row in await self._connection.fetch(_READ_BACK, list(wanted))}
        lost = sorted(name for name in wanted if found.get(name) != wanted[name])
        if lost:
            raise UnsafeStoreError(
                f"The server did not keep the session's {', '.join(lost)}, so a frozen leader could hold its lock for ever.",
                hint="connect directly to PostgreSQL, without a proxy that changes session settings.",
            )

    @property
    def backend_pid(self) -> int:
        return self._connection.get_server_pid()

    @property
    def alive(self) -> bool:
        """Not a proof of ownership: a cut connection may look alive for a moment."""
        return not self._connection.is_closed()

    async def fetch(self, statement: str, *arguments: object) -> list[Any]:
        """Run one of the prepared statements. Any failure, and any doubt whether it ran, ends the session."""
        async with self._one_at_a_time:
            try:
                rows: list[Any] = await self._statements[statement].fetch(*arguments, timeout=self._timeout)
            except BaseException as error:
                self.terminate()
                if isinstance(error, Exception):
                    raise explain(error, self._store) from None
                raise
            return rows

    def terminate(self) -> None:
        """Drop the connection at once. A polite close may hang for as long as the network does."""
        self._connection.terminate()

    async def close(self) -> None:
        try:
            await self._connection.close(timeout=self._timeout)
        except (Exception, asyncio.CancelledError):
            self.terminate()
            raise


async def _connect(store: PostgresStore, attempt: int) -> "asyncpg.Connection[Any]":
    if store.connect is None:
        return await asyncpg.connect(
            store.dsn_from(attempt),
            timeout=_CONNECT_TIMEOUT,
            target_session_attrs=SessionAttribute.read_write,
            max_cached_statement_lifetime=0,
        )
    try:
        connection = store.connect()
        if inspect.isawaitable(connection):
            connection = await connection
    except BaseException as error:
        cancelled = isinstance(error, asyncio.CancelledError)
        task = asyncio.current_task()
        if (cancelled and task is not None and task.cancelling()) or not (cancelled or isinstance(error, Exception)):
            raise
        # Its text is not ours and may hold a credential.
        raise StoreError(
            f"connect() raised {type(error).__name__}.", hint="see that your function returns a new connection."
        ) from None
    reason = _unfit(connection)
    if reason is not None:
        await _give_back(connection)
        raise UnsafeStoreError(
            f"connect() returned {reason}, not a connection of its own.",
            hint="return `await asyncpg.connect(...)`; a pool takes its connections back, and the lock with them.",
        )
    _taken.add(connection)
    return connection  # type: ignore[no-any-return]


def _unfit(connection: Any) -> str | None:
    # A pool's proxy passes for a connection, hence the second look.
    if not isinstance(connection, asyncpg.Connection) or isinstance(connection, PoolConnectionProxy):
        return type(connection).__name__
    if connection in _taken and not connection.is_closed():
        return "a connection that is in use here already"
    return "a connection inside a transaction" if connection.is_in_transaction() else None


async def _give_back(connection: Any) -> None:
    """A pool must not be drained of connections that were refused; one that is in use stays so."""
    if isinstance(connection, PoolConnectionProxy) or connection not in _taken:
        with suppress(Exception):
            await connection.close(timeout=1.0)


def explain(error: Exception, store: PostgresStore) -> StoreError:
    """The same failure in words an operator can act on, without secrets."""
    text = store.redact(f"{type(error).__name__}: {error}".strip().rstrip(":"))
    where = store.detail
    match error:
        case StoreError():
            return error
        case asyncpg.InsufficientPrivilegeError():
            return UnsafeStoreError(
                f"The role may not use or create the tables of fastapi_singleton ({text}).",
                hint="let an administrator run what `fastapi-singleton schema` prints.",
            )
        case asyncpg.ReadOnlySQLTransactionError() | asyncpg.TargetServerAttributeNotMatched():
            return REPLICA
        case asyncpg.ProtocolViolationError() if "startup parameter" in text:
            return POOLER
        case asyncpg.UndefinedTableError() | asyncpg.InvalidSchemaNameError():
            return StoreError(
                f"Tables of fastapi_singleton are gone ({text}).", hint="they are created again at the next try."
            )
        case asyncpg.InvalidPasswordError() | asyncpg.InvalidAuthorizationSpecificationError():
            return StoreError(f"{where} refused the login ({text}).", hint="check user, password and pg_hba.conf.")
        case asyncpg.InvalidCatalogNameError():
            return StoreError(f"{where} does not exist ({text}).", hint="create the database or correct the URL.")
        case asyncpg.TooManyConnectionsError():
            return StoreError(
                f"{where} has no connection left ({text}).", hint="raise max_connections: each worker needs one."
            )
        case asyncpg.QueryCanceledError() | asyncpg.LockNotAvailableError():
            return StoreError(
                f"A statement waited too long at {where} ({text}).", hint="look in pg_locks for who holds our tables."
            )
        case TimeoutError():
            return StoreError(f"{where} did not answer in time.", hint="check the network and the server's load.")
        case _:
            return StoreError(f"{where} cannot be reached ({text}).", hint="check that it runs and the URL is right.")


def _milliseconds(seconds: float) -> str:
    return str(max(1, round(seconds * 1000)))
