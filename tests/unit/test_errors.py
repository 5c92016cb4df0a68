"""What is shown of errors that are not our own."""

import time

import pytest

from fastapi_singleton.errors import described


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        ("no URL: a@b", "no URL: a@b"),
        ("at postgresql://u:p:@/x@host/db and redis://:q@host", "at postgresql://u:***@host/db and redis://:***@host"),
        ("http://host:8080/a http://u@host", "http://host:8080/a http://u@host"),
        ("://u:@host", "://u:@host"),
        ("http://a/x,http://u:p@host", "http://a/x,http://u:***@host"),
    ],
)
def test_an_error_is_shown_without_the_password_of_a_url_in_it(raised: str, shown: str) -> None:
    assert described(ValueError(raised)) == f"ValueError: {shown}"


def test_an_endless_error_holds_up_nobody() -> None:
    began = time.monotonic()
    assert len(described(ValueError('{"url":"http://host:8080/x"},' * 40_000))) == 2000
    assert time.monotonic() - began < 5.0
