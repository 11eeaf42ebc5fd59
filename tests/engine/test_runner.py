"""The runner holds little between two passes, and frees buffers in time."""

from __future__ import annotations

import mlx.core as mx
import pytest

from rewarm.cache import PrefixCache, transfer
from rewarm.engine import Request, runner
from rewarm.engine.request import Running
from rewarm.engine.runner import Runner
from rewarm.engine.scheduler import Piece
from tests import zoo
from tests.engines import Collected
from tests.runs import joined, prompt, run


def test_logits_that_wait_for_a_place_in_the_batch_are_those_of_one_token() -> None:
    model = zoo.tiny("llama")
    cache = PrefixCache(model, memory="64MB")
    ready = Runner(model, cache)
    # The first pass may make constants that stay: the second one is measured.
    for number in range(2):
        request = Request(prompt(20, seed=number), Collected(), 4)
        sequence = Running(number, stop=19, request=request)
        ready.start(sequence)
        mx.clear_cache()  # a free buffer that is used again may be larger than what is asked for
        before, held = mx.get_active_memory(), cache.stats().held
        ready.prefill(sequence, Piece(number, 0, 20, None, True))
        assert sequence.lease is not None
        assert sequence.lease.logits is not None
        rows = sum(c.nbytes for c in sequence.lease.caches) + cache.stats().held - held
        grown = mx.get_active_memory() - before - rows
        nbytes = sequence.lease.logits.nbytes
        ready.leave([sequence])
    assert grown < 4 * nbytes


@pytest.mark.parametrize(("cuda", "free", "clears"), [(0, 1, 1), (1, 9, 0), (1, 101, 1)])
def test_on_cuda_free_buffers_stay_up_to_a_share(
    cuda: bool, free: int, clears: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared: list[bool] = []
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(True))
    monkeypatch.setattr(mx, "get_cache_memory", lambda: free)
    monkeypatch.setattr(runner, "is_cuda", lambda: bool(cuda))
    monkeypatch.setattr(runner, "device_bytes", lambda: 800)
    model = zoo.tiny("llama")
    alone = Runner(model, PrefixCache(model, memory="64MB"))
    alone._computed(runner.CLEAR_AFTER - 1)
    assert not cleared
    alone._computed(1)
    assert bool(cleared) is bool(clears)


def test_on_cuda_a_restored_cache_is_as_long_as_one_that_grew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then it can reuse the buffer that a grown cache leaves."""
    model = zoo.tiny("llama")
    cache = PrefixCache(model, memory="64MB")
    run(model, cache, prompt(300))
    lengths = []
    for cuda in (True, False):
        monkeypatch.setattr(transfer, "is_cuda", lambda cuda=cuda: cuda)
        with cache.acquire(joined(prompt(300), prompt(20, seed=1)), headroom=5) as lease:
            lengths.append(lease.caches[0].keys.shape[2])
    assert lengths == [512, 325]
