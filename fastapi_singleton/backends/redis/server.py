"""What a Redis server must be, and what its errors mean.

Refused, each with the cause and the cure: a replica (it is read-only and lags behind), a server that evicts keys at will
(it could forget a claim), one older than 6.2. A server without an append-only file is taken, and said so: it forgets what
it has acknowledged when it dies.
"""

import logging
import re
from collections.abc import Iterator
from typing import Literal

from redis import exceptions

from ...errors import StoreError, UnsafeStoreError
from .address import RedisStore

logger = logging.getLogger("fastapi_singleton")

OLDEST_SERVER = (6, 2)
_FEW_CONNECTIONS = 20

REPLICA = UnsafeStoreError(
    "This Redis server is a read-only replica.", hint="use the URL of the primary; with Sentinel, that of its proxy."
)


def information(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines() if not line.startswith("#"))
    return {key: value.strip() for key, _, value in pairs}


def check(store: RedisStore, server: dict[str, str]) -> None:
    version = server.get("redis_version", "0")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_SERVER:
        raise UnsafeStoreError(f"Redis {version} is too old.", hint="upgrade to Redis 6.2 or newer, or to Valkey.")
    if server.get("role") != "master":
        raise REPLICA
    policy = server.get("maxmemory_policy", "unknown")
    if policy != "noeviction":
        what = "a lease that is held" if policy.startswith("volatile-") else "what has been run already"
        raise UnsafeStoreError(
            f"This Redis server may evict keys (maxmemory-policy {policy}), and with them {what}.",
            hint="set maxmemory-policy to noeviction, or use another server than the cache.",
        )
    remark = ", without AOF" if server.get("aof_enabled") == "0" else ""
    if remark and remark != store.remark:
        logger.warning(
            "%s keeps no append-only file: when it dies it forgets runs, which may then be run again. "
            "Set appendonly yes.", store.detail,
        )  # fmt: skip
    store.remark = remark


def findings(server: dict[str, str]) -> Iterator[tuple[Literal["ok", "warning"], str, str]]:
    """What an operator should know of a server that was not refused: level, finding, what to do."""
    kind = "Valkey" if server.get("server_name") == "valkey" else "Redis"
    version = server.get("valkey_version") or server["redis_version"]
    yield "ok", f"{kind} {version}, a primary, maxmemory-policy {server['maxmemory_policy']}", ""
    if server.get("aof_enabled") == "0":
        yield "warning", "no append-only file: a server that dies forgets runs", "set appendonly yes."
    elif server.get("appendfsync", "always") != "always":
        lost = f"the append-only file is written with appendfsync {server['appendfsync']}"
        yield "warning", f"{lost}: a server that dies may forget the last two seconds", "set appendfsync always."
    else:
        yield "ok", "an append-only file is kept", ""
    used, most = int(server.get("connected_clients", 0)), int(server.get("maxclients", 0))
    if most:
        few = most - used <= _FEW_CONNECTIONS
        hint = "raise maxclients: each worker needs two connections beside its own pool." if few else ""
        yield "warning" if few else "ok", f"{used} of {most} connections are in use", hint


def explain(error: Exception, store: RedisStore) -> StoreError:
    """The same failure in words an operator can act on, without secrets."""
    if isinstance(error, StoreError):
        return error
    text = store.redact(f"{type(error).__name__}: {error}".strip().rstrip(":"))
    where = store.detail
    if isinstance(error, TimeoutError | exceptions.TimeoutError):
        return StoreError(f"{where} did not answer in time.", hint="check the network and the server's load.")
    # An error inside a script may come as an error of the script, with the original's first word somewhere in its text.
    for kinds, words, what, hint in _KNOWN:
        if isinstance(error, kinds) or re.search(rf"\b({words})\b", text):
            kind = UnsafeStoreError if kinds is exceptions.NoPermissionError else StoreError
            return REPLICA if kinds is exceptions.ReadOnlyError else kind(f"{where} {what} ({text}).", hint=hint)
    if isinstance(error, exceptions.ResponseError):
        return StoreError(f"{where} refused a request ({text}).", hint="see the server's log.")
    return StoreError(f"{where} cannot be reached ({text}).", hint="check that it runs and the URL is right.")


_KNOWN: tuple[tuple[type[Exception], str, str, str], ...] = (
    (exceptions.AuthenticationError, "WRONGPASS|NOAUTH", "refused the login", "check user and password in the URL."),
    (
        exceptions.NoPermissionError,
        "NOPERM|The user executing the script",
        "does not let this user do what is needed",
        "allow it with ACL SETUSER … ~fastapi_singleton:* resetchannels &fastapi_singleton:* +@all -@dangerous +info.",
    ),
    (exceptions.ReadOnlyError, "READONLY", "is a replica", "use the URL of the primary."),
    (exceptions.BusyLoadingError, "LOADING", "is still loading its data", "wait: it is tried again."),
    (exceptions.OutOfMemoryError, "OOM", "has no memory left", "raise maxmemory, or delete what is not needed."),
    (
        exceptions.ClusterDownError,
        "CLUSTERDOWN|MISCONF|NOREPLICAS|MASTERDOWN",
        "takes no writes just now",
        "see its log: a full disk, a failed snapshot, or nodes that are missing.",
    ),
    (exceptions.MovedError, "MOVED|ASK|TRYAGAIN", "has moved our keys to another node", "wait: it is tried again."),
)
