"""`make test-containers`: the whole suite on each PostgreSQL image, where a Docker engine is there."""

import os
import subprocess
import sys

from testcontainers.community.postgres import PostgresContainer

VERSIONS = (14, 15, 16, 17, 18)


def docker_is_there() -> bool:
    try:
        found = subprocess.run(["docker", "info"], capture_output=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0


def suite_on(version: int, arguments: list[str]) -> int:
    print(f"== PostgreSQL {version} ==", flush=True)
    with PostgresContainer(f"postgres:{version}", driver=None).with_command("-c max_connections=200") as container:
        environment = {**os.environ, "TEST_POSTGRES_URL": container.get_connection_url()}
        return subprocess.run([sys.executable, "-m", "pytest", *arguments], env=environment, check=False).returncode


def main() -> int:
    if not docker_is_there():
        print("No Docker engine answers here, so nothing was tested. `make test` needs none.", file=sys.stderr)
        return 2
    results = {version: suite_on(version, sys.argv[1:]) for version in VERSIONS}
    for version, code in results.items():
        print(f"PostgreSQL {version}: {'passed' if code == 0 else f'FAILED ({code})'}")
    return 1 if any(results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
