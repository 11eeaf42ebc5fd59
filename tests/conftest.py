"""Fix what the bits and the speed of the tests depend on, before anything imports MLX.

Three sets (docs/testing.md):
- `make test`: all tests but those marked `integration`, on inputs that tests/corpus generates;
- `make integration`: those marked `integration` (they need a neighbour, such as a browser or a
  compiler), and those marked `corpus` again, on recorded inputs (REWARM_CORPUS=recorded);
- `make soak`: both, each test with its whole range instead of a sample (REWARM_SOAK=1).
In each, a skip fails unless tests/sets.py expects its reason on this machine.
"""

from __future__ import annotations

import gc
import os
from importlib import import_module

# Tests run in parallel: more threads than cores would only wait for one another.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import pytest

from rewarm import accel
from rewarm.accel import cpu, replacement

# Models run here as `Session` and the server run them. Functions of mlx-lm are replaced now: a test
# that is the first to import a module would undo only half of the replacement.
for place in cpu.COMPILED:
    import_module(replacement.MODELS + place.module)
accel.install()

from .leaks import uncollected  # noqa: E402, F401
from .sets import (  # noqa: E402, F401
    SOAK,
    pytest_make_collect_report,
    pytest_runtest_makereport,
)

hypothesis.settings.register_profile("test", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=2000, database=None)
hypothesis.settings.load_profile("soak" if SOAK else "test")

# Objects imported by now stay, so a collection skips them. With them, each takes 0.1 s.
gc.collect()
gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the long tests: a long test at the end would run while other workers are idle."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
