"""Four workers, one of which leads. Used by the compose demo, by `make demo` and by the tests."""

import os

bind = os.environ.get("BIND", "0.0.0.0:8000")
workers = int(os.environ.get("WEB_CONCURRENCY", "4"))
worker_class = "uvicorn_worker.UvicornWorker"

# Stopping takes up to `drain` (10 s) plus a few requests to the store. Both limits must be well above that, or gunicorn
# kills a worker whose jobs are still finishing: the first counts on TERM, the second on HUP and for a silent worker.
graceful_timeout = 30
timeout = 30

# One control socket per user by default: two applications of one user would fight over it.
control_socket_disable = True

# Heartbeat files in memory, so that a slow disk is not taken for a dead worker.
if os.path.isdir("/dev/shm"):
    worker_tmp_dir = "/dev/shm"
