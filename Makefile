PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test integration soak bench lint lock clean

run: .venv/ready  ## Serve the built-in model, with a page to look at and a line to paste
	$(BIN)/rewarm serve

# Idle workers take tests from busy ones, in runs: a module's server is started once or twice.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

test: .venv/ready lint  ## Format, lint, types, and the tests that need nothing beside the repository
	$(PYTEST)

integration: .venv/ready  ## The tests with real neighbours: a browser, a compiler, files that others recorded
	tools/integration-setup
	REWARM_CORPUS=recorded $(PYTEST) -m "integration or corpus"

soak: .venv/ready  ## Both, each test with its whole range instead of a sample (hours)
	REWARM_SOAK=1 $(PYTEST)
	tools/integration-setup
	REWARM_SOAK=1 REWARM_CORPUS=recorded $(PYTEST) -m "integration or corpus"

bench: .venv/ready  ## The tree beside mlx-lm's trie, the disk beside a plain read, the server beside mlx-lm's
	$(BIN)/rewarm bench index
	$(BIN)/rewarm bench disk
	$(BIN)/rewarm bench burst --model random:attention-small --parallel 8 --system 40 --answer 128 --peer mlx-lm

lint: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# --no-deps: requirements.txt is complete, and what it has no hash for is not installed.
.venv/ready: requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info; (3, 11) <= v < (3, 15) or sys.exit(f"Rewarm needs Python 3.11 to 3.14; {sys.executable} is {v.major}.{v.minor}. Name another one: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --require-hashes \
		 -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

lock:  ## Write requirements.txt anew (needs uv)
	tools/lock

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
