"""Memory that a step frees stays at hand for the next one."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from typing import Any

import mlx_lm
import pytest

import rewarm
from rewarm.accel import heap

glibc = pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="needs glibc on Linux"
)

STEPS = """
import resource, sys
import rewarm
import mlx.core as mx
from rewarm.accel import heap

mx.set_default_device(mx.cpu)
print(heap.install())

def step():
    mx.eval([mx.arange(n << 18) for n in range(1, 16)])  # 1 to 15 MB each

step(); step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20): step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(**environment: str) -> tuple[bool, int]:
    """Say whether the heap is set up, and count the pages that the system gave in 20 steps."""
    kept = {k: v for k, v in os.environ.items() if k not in (*heap.SETTINGS, "REWARM_ACCEL")}
    told = subprocess.run(
        [sys.executable, "-c", STEPS],
        env={**kept, **environment},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return told[0] == "True", int(told[1])


@glibc
def test_a_step_gets_the_memory_that_the_one_before_it_freed() -> None:
    in_use, kept = run()
    assert in_use
    in_use, handed_out = run(REWARM_ACCEL="0")
    assert not in_use
    assert kept < handed_out / 10


@glibc
@pytest.mark.parametrize("name", heap.SETTINGS)
def test_whoever_sets_the_c_library_up_is_not_overruled(name: str) -> None:
    value = "glibc.malloc.perturb=0" if name == "GLIBC_TUNABLES" else "1048576"
    assert not run(**{name: value})[0]


FILLED = """
import resource
import numpy as np
import rewarm
from rewarm import PrefixCache, Session, load

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

model, tokenizer = load("pocket")
session = Session(model, tokenizer, PrefixCache(model, memory="200MB"))
for seed in range(6):
    prompt = np.random.default_rng(seed).integers(10, 1000, 2000)
    session.generate(prompt, max_tokens=1)
held, before = session.cache.stats().held, resident()
session.cache.clear()
print(held, before - resident())
"""


@glibc
def test_what_is_cleared_goes_back_to_the_system() -> None:
    told = subprocess.run(
        [sys.executable, "-c", FILLED], check=True, capture_output=True, text=True
    ).stdout
    held, given_back = map(int, told.split())
    assert given_back > 0.8 * held


def test_weights_are_loaded_before_anything_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    stock = mlx_lm.load

    def loading(*args: Any, **options: Any) -> Any:
        loaded = stock(*args, **options)
        order.append("loaded")
        return loaded

    monkeypatch.setattr(mlx_lm, "load", loading)
    monkeypatch.setattr(heap, "install", lambda: order.append("set"))
    rewarm.load("pocket")
    assert order == ["loaded", "set"]


def test_elsewhere_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not heap.install()
