"""PostgreSQL URLs as users have them, and no secret in what is shown of them."""

import pytest

from fastapi_singleton.backends.postgres import PostgresStore
from fastapi_singleton.backends.postgres.backend import lock_key


@pytest.mark.parametrize(
    ("url", "dsn"),
    [
        ("postgres://u:p@h/d", "postgresql://u:p@h/d"),
        ("postgresql+asyncpg://u:p@h:1/d?ssl=require", "postgresql://u:p@h:1/d?sslmode=require"),
        ("postgresql+asyncpg://h/d?ssl=true&prepared_statement_cache_size=0", "postgresql://h/d?sslmode=require"),
        ("postgresql://h/d?sslmode=require&channel_binding=require", "postgresql://h/d?sslmode=require"),
        ("postgresql://h/d?connect_timeout=5", "postgresql://h/d"),
        ("postgresql://u:p@ss@h/d", "postgresql://u:p%40ss@h/d"),
        ("postgresql://u:p%2Fss@h/d", "postgresql://u:p%2Fss@h/d"),
        ("postgresql://a:1,b:2/d", "postgresql://a:1,b:2/d"),
        ("postgresql://[::1]:5432/d", "postgresql://[::1]:5432/d"),
        (
            "postgresql://h/d?sslmode=verify-full&sslrootcert=/ca.pem",
            "postgresql://h/d?sslmode=verify-full&sslrootcert=%2Fca.pem",
        ),
    ],
)
def test_a_url_reaches_asyncpg_in_its_own_spelling(url: str, dsn: str) -> None:
    assert PostgresStore.parse(url).dsn == dsn


def test_no_password_is_shown() -> None:
    store = PostgresStore.parse("postgresql://u:p%40ss@h/d?sslpassword=hush")
    assert store.detail == "postgresql at h/d"
    assert "p@ss" not in repr(store)
    assert store.redact("no p@ss, no p%40ss, no hush") == "no ***, no ***, no ***"


def test_a_session_pooler_is_the_users_word() -> None:
    store = PostgresStore.parse("postgresql://h/d?pooler=session")
    assert store.session_pooler
    assert store.dsn == "postgresql://h/d"


def test_lock_keys_are_fixed_for_ever() -> None:
    # Workers of two versions must meet at the same lock: this figure is part of the protocol.
    assert lock_key("default") == lock_key("default") != lock_key("other")
    assert lock_key("default") == 1510459539717995523
