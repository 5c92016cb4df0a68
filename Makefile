# Everything here sets itself up: Python 3.11+ and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
UV := $(shell command -v uv 2>/dev/null)

.PHONY: help check test test-slow test-containers bench chaos demo clean format

help:
	@echo "make demo              the example on four gunicorn workers and a real PostgreSQL (ARGS=--once: by itself)"
	@echo "make test              all tests, against real parts"
	@echo "make test-slow         the storm over more stores and modes, and what else takes long"
	@echo "make test-containers   the same on PostgreSQL 14 to 18 in Docker"
	@echo "make check             format, lint, types, import contracts"
	@echo "make chaos             ten minutes of faults; no tick doubled, none missed (ARGS='--seed 7 --minutes 2')"
	@echo "make bench             fail-over times and costs, as a table"

$(STAMP): pyproject.toml
ifneq ($(UV),)
	uv venv --quiet --allow-existing --python $(PYTHON) $(VENV)
	uv pip install --quiet --python $(BIN)/python -e ".[dev]"
else
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
endif
	@touch $(STAMP)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Most tests wait for a lease or a tick, so that two at a time take half as long; each side has servers of its own.
test: $(STAMP)
	$(BIN)/pytest -n 2 --dist worksteal $(ARGS)

test-slow: $(STAMP)
	$(BIN)/pytest -n 2 --dist worksteal -m slow $(ARGS)

test-containers: $(STAMP)
	$(BIN)/python -m tests.containers $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks.failover $(ARGS)
	$(BIN)/python -m benchmarks.ledger $(ARGS)
	$(BIN)/python -m benchmarks.command $(ARGS)

chaos: $(STAMP)
	$(BIN)/python -m tests.chaos $(ARGS)

demo: $(STAMP)
	$(BIN)/python -m example_app.demo $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache dist
