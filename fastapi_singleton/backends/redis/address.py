"""Which Redis server, and how to speak of it without a secret."""

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from ...errors import ConfigurationError
from ...records import Run, Worker
from ...timing import Timing

if TYPE_CHECKING:
    from .backend import RedisBackend

_KEPT = frozenset({"username", "password", "socket_keepalive"})  # and ssl_*: they reach redis-py as they are
# How the application's own client is tuned. Here time limits follow from the lease, and the driver must repeat nothing:
# a claim is sent again by the ledger, which knows what its answer means.
_OTHERS_TUNING = frozenset(
    {
        "client_name",
        "decode_responses",
        "encoding",
        "encoding_errors",
        "health_check_interval",
        "legacy_responses",
        "max_connections",
        "protocol",
        "retry_on_error",
        "retry_on_timeout",
        "socket_connect_timeout",
        "socket_read_size",
        "socket_timeout",
        "timeout",
    }
)
_ENCODE = ConfigurationError(
    "The Redis URL cannot be read.",
    hint="its form is redis://user:password@host:port/0, rediss:// for TLS, redis:///0?path=/run/redis.sock for a socket; "
    "percent-encode special characters in user and password (urllib.parse.quote(password, safe='')).",
)


@dataclass
class RedisStore:
    """A checked address. `remark` is what the server has shown of itself that an operator should know."""

    address: str
    url: str = field(repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)
    kind: str = "redis"
    remark: str = ""

    @classmethod
    def parse(cls, url: str) -> "RedisStore":
        try:
            from . import session
        except ImportError:
            raise ConfigurationError(
                "The package redis is not installed.", hint='pip install "fastapi-singleton-scheduler[redis]".'
            ) from None
        try:
            parts = urlsplit(url)
            query = dict(parse_qsl(parts.query, keep_blank_values=True))
            port = parts.port or 6379
            database = int(query.pop("db", "") or parts.path.strip("/") or 0)
        except ValueError:
            raise _ENCODE from None
        if parts.fragment or database < 0:
            raise _ENCODE
        path = query.pop("path", "")
        kept = {key: value for key, value in query.items() if _is_kept(key)}
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or "localhost"
        store = cls(
            address=f"{path}, database {database}" if path else f"{host}:{port}/{database}",
            url=_for_the_driver(parts, path, {**kept, "db": str(database)}),
            secrets=_secrets(parts, query),
        )
        try:
            session.make_connection(store)
        except Exception as error:  # redis-py has many; its text may quote a value
            raise ConfigurationError(
                f"The Redis URL has a parameter that redis-py does not take ({type(error).__name__}).",
                hint="check its query: for TLS ssl_ca_certs, ssl_certfile, ssl_keyfile, ssl_cert_reqs, ssl_check_hostname.",
            ) from None
        return store

    @property
    def detail(self) -> str:
        return f"redis at {self.address}{self.remark}"

    def open(self, name: str, worker: Worker, timing: Timing) -> "RedisBackend":
        from .backend import RedisBackend

        return RedisBackend(self, name, worker, timing)

    async def fence(self, connection: Any, name: str, run: Run) -> None:
        raise ConfigurationError(
            "fence() needs PostgreSQL: a run's row in Redis cannot be held by a transaction elsewhere.",
            hint="use current_run().id as an idempotency key, or write current_run().token beside your data and refuse "
            "smaller ones.",
        )

    def redact(self, text: str) -> str:
        """The text without the password, whoever put it there."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def _is_kept(key: str) -> bool:
    if key in _KEPT or key.startswith("ssl_"):
        return True
    if key not in _OTHERS_TUNING:
        # Only a word is repeated: a value, or what follows a stray question mark, may be a secret.
        word = repr(key) if re.fullmatch(r"[a-z_]{1,40}", key) else "after the question mark"
        raise ConfigurationError(
            f"The Redis URL has an unknown parameter {word}.",
            hint="leave it out, or correct its spelling; a ? in a password is written %3F.",
        )
    return False


def _for_the_driver(parts: SplitResult, path: str, query: dict[str, str]) -> str:
    if not path:
        return urlunsplit((parts.scheme, parts.netloc, "", urlencode(query), ""))
    if parts.scheme == "rediss" or parts.hostname:
        raise ConfigurationError(
            "The Redis URL names both a host and a socket's path.", hint="write redis:///0?path=/run/redis.sock."
        )
    return urlunsplit(("unix", parts.netloc, quote(path), urlencode(query), ""))


def _secrets(parts: SplitResult, query: dict[str, str]) -> tuple[str, ...]:
    password = parts.password or ""
    candidates = (unquote(password), password, query.get("password"), query.get("ssl_password"))
    return tuple({secret for secret in candidates if secret})
