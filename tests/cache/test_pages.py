"""Rows are copied into new memory of a running cache, in large pages, once."""

from __future__ import annotations

import resource
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from rewarm.accel import cpu_rows
from rewarm.accel.cpu_rows import unfilled
from rewarm.cache.payload import Packing, Rows, join
from tests import zoo
from tests.cache.disk.caches import ARCHITECTURES, cache_on
from tests.runs import cold, divergence, prompt, run

linux_cpu = pytest.mark.skipif(not cpu_rows.available(), reason="only on a Linux CPU")
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@linux_cpu
def test_what_is_unfilled_was_never_touched() -> None:
    small = 64 << 20 >> 12  # pages
    before = faults()
    kept = unfilled(64 << 20)
    mx.eval(kept)
    assert faults() - before < small // 100
    if LARGE_PAGES.exists() and "[never]" not in LARGE_PAGES.read_text():
        np.asarray(kept)[:] = 1
        assert faults() - before < small // 2


def rows_of(dtype: mx.Dtype, start: int, stop: int) -> Rows:
    """Make two layers with arrays of several widths, one of them 0."""
    mx.random.seed(start)
    shape = {"keys": (1, 2, stop - start, 32), "values": (1, 2, stop - start, 48)}
    keys, values = (mx.random.normal(s).astype(dtype) for s in shape.values())
    none = mx.zeros((1, 2, stop - start, 0), dtype)
    layers = [[keys, values], [values, none]]
    return Packing.of(layers).pack(layers, start, stop)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16, mx.uint32], ids=str)
@pytest.mark.parametrize("room", [0, 9])
@pytest.mark.parametrize("spans", [[(0, 1500)], [(0, 4), (1100, 1490)]])
def test_rows_are_joined_alike_in_large_pages_and_in_small_ones(
    dtype: mx.Dtype, room: int, spans: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = [rows_of(dtype, 0, 700), rows_of(dtype, 700, 1500)]
    found = []
    for least in (0, 1 << 60):
        monkeypatch.setattr(cpu_rows, "WORTH_A_THREAD", least)
        found.append(join(pieces, spans, range(4), room))
    tokens = sum(stop - start for start, stop in spans)
    for a, b in zip(*found, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        left, right = (np.asarray(each.view(mx.uint8)) for each in (a, b))
        assert np.array_equal(left, right)
        assert not left[:, :, tokens:].any()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_answer_from_disk_is_the_same_in_large_pages(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_rows, "WORTH_A_THREAD", 0)
    model, asked = zoo.tiny(name), prompt(150, 1, zoo.vocabulary(name))
    first = cache_on(tmp_path, model)
    run(model, first, asked)
    first.close()
    again = cache_on(tmp_path, model)
    for tier in ("disk", "memory"):
        ran = run(model, again, asked, decode=8)
        assert (ran.match.tier, ran.match.resume) == (tier, len(asked) - 1)
        alone = cold(model, asked, decode=8, like=again)
        assert divergence(ran.logits, alone.logits) <= 1e-5
        assert ran.tokens == alone.tokens
    again.verify()
    again.close()
