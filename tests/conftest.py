"""Fixes what the tests' bits and speed depend on, before anything imports MLX."""

import os

# Tests run beside each other: more threads than cores would only wait for one another.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis

from rewarm import accel  # loads the BLAS

# As `Session` and the server do: what is promised is promised of models that run like this.
accel.install()

SOAK = os.environ.get("REWARM_SOAK") == "1"

hypothesis.settings.register_profile("test", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=2000, database=None)
hypothesis.settings.load_profile("soak" if SOAK else "test")
