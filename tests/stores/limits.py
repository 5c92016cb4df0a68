"""PostgreSQL as it must not be led on: behind a pooler, with a role that has no rights."""

import asyncio
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from example_app.embedded import EmbeddedPostgres
from example_app.ports import free_port

from ..conftest import eventually

PGBOUNCER = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/bin")


@asynccontextmanager
async def plain_role(database: str, admin: Any) -> AsyncIterator[tuple[str, str]]:
    """A role that may log in and nothing else, and a URL with it."""
    role = f"plain_{uuid.uuid4().hex[:8]}"
    await admin.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'plain'")
    try:
        parts = urlsplit(database)
        yield role, urlunsplit(parts._replace(netloc=f"{role}:plain@{parts.netloc.rpartition('@')[2]}"))
    finally:
        await admin.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


@asynccontextmanager
async def pgbouncer(database: str, mode: str) -> AsyncIterator[str]:
    """The URL of a PgBouncer in that mode before the database."""
    directory = Path(tempfile.mkdtemp(prefix="fastapi_singleton_pooler_"))
    parts, port = urlsplit(database), free_port()
    (directory / "pgbouncer.ini").write_text(
        f"[databases]\n* = host={parts.hostname} port={parts.port} user=postgres\n[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nauth_type = any\npool_mode = {mode}\nunix_socket_dir =\n"
        f"logfile = {directory}/log\nignore_startup_parameters = extra_float_digits\n"
    )
    directory.chmod(0o777)
    assert PGBOUNCER is not None
    process = subprocess.Popen(
        [PGBOUNCER, str(directory / "pgbouncer.ini")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        user="nobody" if EmbeddedPostgres.needs_another_user() else None,
    )  # fmt: skip
    try:

        async def up() -> bool:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                return False
            writer.close()
            return True

        await eventually(up, "pgbouncer's start")
        yield f"postgresql://postgres@127.0.0.1:{port}{parts.path}"
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory)
