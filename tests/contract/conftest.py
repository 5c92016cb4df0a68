from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from ..leading import Leading, leading
from ..stores import RealStore
from .ticking import Workers, seen


@pytest.fixture
async def workers(store: RealStore) -> AsyncIterator[Workers]:
    """Makes workers, each with a session of its own."""
    seen.clear()
    async with AsyncExitStack() as stack:

        async def make(*, elected: bool = False, **options: Any) -> Leading:
            worker: Leading = await stack.enter_async_context(leading(store.url, **options))
            if elected:
                await worker.elect()
            return worker

        yield make
