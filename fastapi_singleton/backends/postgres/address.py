"""Which PostgreSQL server, and how to speak of it without a secret."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from ...errors import ConfigurationError
from ...records import Run, Worker
from ...timing import Timing

if TYPE_CHECKING:
    from .backend import PostgresBackend

# libpq's and SQLAlchemy's own parameters: asyncpg would send them to the server, which does not know them.
_CLIENT_ONLY = frozenset(
    {
        "async_fallback",
        "channel_binding",
        "command_timeout",
        "connect_timeout",
        "connection_limit",
        "fallback_application_name",
        "gssencmode",
        "keepalives",
        "keepalives_count",
        "keepalives_idle",
        "keepalives_interval",
        "load_balance_hosts",
        "pgbouncer",
        "pool_timeout",
        "prepared_statement_cache_size",
        "prepared_statement_name_func",
        "require_auth",
        "requirepeer",
        "sslcompression",
        "sslsni",
        "statement_cache_size",
    }
)
_SSL_WORDS = {"true": "require", "1": "require", "on": "require", "false": "disable", "0": "disable", "off": "disable"}
_SSL_MODES = frozenset({"disable", "allow", "prefer", "require", "verify-ca", "verify-full"})
_ENCODE = ConfigurationError(
    "The PostgreSQL URL cannot be read.",
    hint="its form is postgresql://user:password@host:port/database; percent-encode special characters in user and "
    "password (urllib.parse.quote(password, safe='')).",
)


@dataclass(frozen=True)
class PostgresStore:
    """A checked address. `session_pooler` is the user's word that a pooler in between works in session mode."""

    detail: str
    dsn: str | None = field(repr=False)
    connect: Callable[[], Awaitable[Any]] | None = field(default=None, repr=False)
    session_pooler: bool = False
    secrets: tuple[str, ...] = field(default=(), repr=False)
    kind: str = "postgresql"

    @classmethod
    def parse(cls, url: str | None, connect: Callable[[], Awaitable[Any]] | None = None) -> "PostgresStore":
        if connect is not None and not callable(connect):
            raise ConfigurationError(
                "connect must be a function.",
                hint="pass `async def connect(): return await asyncpg.connect(...)`, called for each new connection.",
            )
        if url is None:
            return cls("postgresql through connect=", None, connect)
        try:
            parts = urlsplit(url)
            query = parse_qsl(parts.query, keep_blank_values=True)
        except ValueError:
            raise _ENCODE from None
        userinfo, _, hosts = parts.netloc.rpartition("@")
        if parts.fragment or "@" in unquote(parts.path) or not all(_is_host(host) for host in hosts.split(",")):
            raise _ENCODE
        user, colon, password = userinfo.partition(":")
        kept, session_pooler = _asyncpg_parameters(query)
        # asyncpg splits at the first @; quoting again lets a bare one stand in a password.
        auth = _requote(user) + colon + _requote(password) + ("@" if userinfo else "")
        named = dict(query)
        return cls(
            detail=f"postgresql at {named.get('host') or hosts or 'the default host'}"
            f"/{unquote(parts.path.lstrip('/')) or named.get('dbname', '')}",
            dsn=urlunsplit(("postgresql", auth + hosts, parts.path, urlencode(kept), "")),
            connect=connect,
            session_pooler=session_pooler,
            secrets=tuple(
                {s for s in (unquote(password), password, named.get("password"), named.get("sslpassword")) if s}
            ),
        )

    def open(self, name: str, worker: Worker, timing: Timing) -> "PostgresBackend":
        from .backend import PostgresBackend

        return PostgresBackend(self, name, worker, timing)

    async def fence(self, connection: Any, name: str, run: Run) -> None:
        from .fence import fence

        await fence(connection, name, run)

    def dsn_from(self, attempt: int) -> str | None:
        """The address with its hosts in turn: asyncpg spends its whole patience on the first that does not answer."""
        if self.dsn is None:
            return None
        parts = urlsplit(self.dsn)
        auth, at, hosts = parts.netloc.rpartition("@")
        several = hosts.split(",")
        first = attempt % len(several)
        return urlunsplit(parts._replace(netloc=auth + at + ",".join(several[first:] + several[:first])))

    def redact(self, text: str) -> str:
        """The text without the password, whoever put it there."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def _asyncpg_parameters(query: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], bool]:
    kept, session_pooler = [], False
    for key, value in query:
        if key == "pooler":
            if value != "session":
                raise ConfigurationError(
                    f"pooler={value} is not supported.",
                    hint="only a pooler in session mode keeps a lock with its session: ?pooler=session.",
                )
            session_pooler = True
        elif key == "ssl":  # SQLAlchemy's spelling
            kept.append(("sslmode", _SSL_WORDS.get(value.lower(), value)))
        elif key not in _CLIENT_ONLY:
            kept.append((key, value))
    for key, value in kept:
        if key == "sslmode" and value not in _SSL_MODES:
            raise ConfigurationError(
                f"sslmode={value} is unknown.", hint=f"use one of {', '.join(sorted(_SSL_MODES))}."
            )
    return kept, session_pooler


def _is_host(text: str) -> bool:
    """host, host:port, [v6], [v6]:port, or nothing at all (a socket, or the environment's host)."""
    tail = text.rpartition("]")[2] if text.startswith("[") else text
    _, colon, port = tail.partition(":")
    return not colon or (port.isdecimal() and 0 < int(port) < 65536)


def _requote(text: str) -> str:
    return quote(unquote(text), safe="")
