"""A model that cannot be loaded: the program says why in a sentence, and ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A load that leaves behind what building a model leaves behind: a random key of its thread.
FAILS = """
import os, sys
from rewarm.engine import Engine
import mlx.core as mx

def load():
    mx.random.uniform(shape=(4,))
    {work}
    raise ValueError("no")

engine = Engine(load)
engine.start()
assert engine.wait() == "failing"
thread = engine._thread.native_id
engine.stop()
print("lingers" if os.path.exists(f"/proc/self/task/{{thread}}") else "gone", flush=True)
sys.exit(2)
"""
WORK = "a = mx.ones((1000, 1000)); [a := a @ a for _ in range(8)]; mx.async_eval(a)"


@pytest.mark.parametrize("work", ["", WORK])
def test_a_process_ends_in_order_after_a_load_that_failed(work: str) -> None:
    """A thread that lingers aborts it now and then, and work that goes on never lets it end."""
    done = subprocess.run(
        [sys.executable, "-c", FAILS.format(work=work)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout == "gone\n"
    assert "terminate called" not in done.stderr
    assert done.returncode == 2
