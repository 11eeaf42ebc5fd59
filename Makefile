PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test soak bench lint lock clean

run: .venv/ready  ## Serve the built-in model, with a page to look at and a line to paste
	$(BIN)/rewarm serve

test: .venv/ready lint  ## Format, lint, types and tests
	$(BIN)/python -m pytest -n 2

soak: .venv/ready  ## The tests, each with its whole range instead of a sample (hours)
	REWARM_SOAK=1 $(BIN)/python -m pytest -n 2

bench: .venv/ready  ## The tree beside mlx-lm's trie, the disk beside a plain read, the server beside mlx-lm's
	$(BIN)/python tools/bench_tree.py
	$(BIN)/python tools/bench_disk.py
	$(BIN)/python tools/bench_server.py

lint: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# --no-deps: requirements.txt is complete, and what it has no hash for is not installed.
# --ignore-requires-python: see README, "Python 3.10".
.venv/ready: requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info; (3, 10) <= v < (3, 14) or sys.exit(f"Rewarm needs Python 3.10 to 3.13; {sys.executable} is {v.major}.{v.minor}. Name another one: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python \
		--require-hashes -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

lock:  ## Write requirements.txt anew (needs uv)
	tools/lock

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
