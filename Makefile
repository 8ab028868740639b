# The commands of this project. `make help` lists them; each does the set-up that it needs.
PYTHON := .venv/bin/python

# One thread a process: engine, trainer and servers share the cores, and OpenMP's spinning starves them otherwise.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-quick chaos soak check bench bench-session

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Install everything into .venv (uv, Python packages); does nothing when that is done
	@sh deploy/setup.sh

demo: setup ## Watch a tiny language model learn from multi-turn conversations (about 6 minutes)
	.venv/bin/segue train --config examples/first_words/run.toml

test: setup ## Run all tests, the real engine, trainer, Redis protocol and Ray included
	$(PYTHON) -m pytest

test-quick: setup ## Run the tests that take seconds
	$(PYTHON) -m pytest -m "not slow"

SIMULATED_DAY := tests/integration/test_simulated_day.py
REPORT := -q -rA --tb=short

chaos: setup ## Kill every part at every event of a simulated run, play five simulated days, send 1,000 requests a route
	$(PYTHON) -m pytest $(REPORT) tests/integration/test_simulated_crashes.py --every-event
	$(PYTHON) -m pytest $(REPORT) $(SIMULATED_DAY) --simulated-hours 24 --simulated-seeds 5
	SEGUE_HTTP_EXAMPLES=1000 $(PYTHON) -m pytest $(REPORT) tests/contract/session_server/test_http_generated.py

soak: setup ## Play fifty simulated days, each with other modes, deaths and habits
	$(PYTHON) -m pytest $(REPORT) $(SIMULATED_DAY) --simulated-hours 24 --simulated-seeds 50

check: setup ## Lint, format, types, layers, sizes and names
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/pyright
	.venv/bin/lint-imports
	$(PYTHON) checks/house.py

bench: setup ## Run every benchmark; each prints a table and writes benchmarks/results/<name>.json
	@for file in benchmarks/[a-z]*.py; do echo "== $$file"; $(PYTHON) "$$file" || exit 1; done

bench-session: setup ## Run the session server's benchmarks beside their rivals (about 8 minutes)
	@for name in session_turns session_growth r3_session sample_frame sessions_idle; do \
		echo "== benchmarks/$$name.py"; $(PYTHON) benchmarks/$$name.py || exit 1; done
