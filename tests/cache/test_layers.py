"""A cache that is rebuilt from what a layer kind reads goes on like the first one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

import rewarm
from rewarm.cache import layer_kinds
from rewarm.cache.layer_kinds import Opaque, kind_of, leaves
from rewarm.cache.layout import Layout
from rewarm.cache.payload import SEGMENT, PackedState
from rewarm.cache.tree import Checkpoint, Node, Tree
from tests.cache.test_tree import key

HEADS, WIDTH = 2, 32

CACHES: dict[str, Callable[[], Any]] = {
    "plain": KVCache,
    "quantised": lambda: QuantizedKVCache(group_size=32, bits=4),
    "concatenating": ConcatenateKVCache,
    "window": lambda: RotatingKVCache(24),
    "window that keeps": lambda: RotatingKVCache(24, keep=4),
    "window that keeps nearly all": lambda: RotatingKVCache(9, keep=7),
    "long window": lambda: RotatingKVCache(300),
    "blocks": lambda: ChunkedKVCache(24),
}


def rows(positions: range, layer: int) -> tuple[mx.array, mx.array]:
    """Make keys and values that show their position and layer."""
    at = mx.array(list(positions), dtype=mx.float32).reshape(1, 1, -1, 1)
    scale = mx.arange(1, HEADS * WIDTH + 1).reshape(1, HEADS, 1, WIDTH) / 7
    keys = at * scale + layer
    return keys, -keys


def feed(cache: Any, positions: range, layer: int) -> list[np.ndarray[Any, Any]]:
    if isinstance(cache, ChunkedKVCache):
        cache.maybe_trim_front()  # as the model does before each step
    fetched = cache.update_and_fetch(*rows(positions, layer))
    flat = [a for part in fetched for a in (part if isinstance(part, (list, tuple)) else [part])]
    return [np.array(a) for a in flat]


def visible(cache: Any, fetched: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Return the rows that a step attends to; the order in a ring has no meaning."""
    if isinstance(cache, RotatingKVCache):
        return [np.sort(a, axis=2) for a in fetched]
    return fetched


def node_with(state: PackedState) -> Node:
    node: Node = Tree().root
    node.checkpoint = Checkpoint("end", state, 0)
    return node


steps = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@pytest.mark.parametrize("names", [[n] for n in CACHES] + [["window", "plain", "blocks", "window"]])
@given(before=steps, after=steps, cut=st.integers(0, 100))
@settings(max_examples=25)
def test_a_rebuilt_cache_goes_on_like_the_one_it_was_read_from(
    names: list[str], before: list[int], after: list[int], cut: int
) -> None:
    """Rows are read after every step; the rebuilt cache stands at one of the steps' ends."""
    # The last two layers are composites, one inside the other.
    single = [CACHES[n]() for n in names]

    def composed(single: list[Any]) -> list[Any]:
        return (
            [*single[:-2], CacheList(single[-1])]
            if len(single) == 1
            else [
                *single[:-2],
                CacheList(single[-2], CacheList(single[-1])),
            ]
        )

    caches = composed(single)
    layout = Layout(composed([CACHES[n]() for n in names]))
    tree = Tree()
    node: Node = tree.root
    position = 0
    for step in before:
        span = range(position, position + step)
        for i, cache in enumerate(leaves(caches)):
            feed(cache, span, i)
        first = max(position, layout.first_row(caches, position + step))
        node = tree.add(node, key(*span), "prefill")
        if layout.has_rows:
            node.rows = layout.pack("rows", caches, position, span.stop)
        if layout.has_window:
            node.window = layout.pack("window", caches, first, span.stop)
        position = span.stop
    built = layout.build(composed([CACHES[n]() for n in names]), node, position, cut)
    for step in after:
        span = range(position, position + step)
        for i, (a, b) in enumerate(zip(leaves(caches), leaves(built), strict=True)):
            got, expected = visible(b, feed(b, span, i)), visible(a, feed(a, span, i))
            for x, y in zip(got, expected, strict=True):
                assert np.array_equal(x, y)
        position = span.stop


@pytest.mark.parametrize("keep", [0, 4])
def test_a_ring_after_many_single_steps_gives_back_its_last_rows(keep: int) -> None:
    cache = RotatingKVCache(16, keep=keep)
    for position in range(53):
        feed(cache, range(position, position + 1), 0)
    layout = Layout([RotatingKVCache(16, keep=keep)])
    first = layout.first_row([cache], 53)
    assert first == 53 - (16 - keep)
    got = layout.pack("window", [cache], first, 53).segments[0].arrays[0]
    expected = mx.concatenate(rows(range(first, 53), 0), axis=1)
    assert mx.array_equal(got, expected)


class WithAttributes:
    """A cache class that Rewarm does not know, with everything in its attributes."""

    def __init__(self) -> None:
        self.offset = 0
        self.parts: dict[str, Any] = {"a": None, "b": [None, 1.5]}


class WithState:
    """A cache class with no attributes to read, as one in C would be."""

    __slots__ = ("_hidden",)

    def __init__(self) -> None:
        self._hidden = mx.zeros((2,))

    @property
    def state(self) -> Any:
        return (self._hidden, "text")

    @classmethod
    def from_state(cls, state: Any) -> WithState:
        made = cls()
        made._hidden = state[0]
        return made


class Unreadable:
    __slots__ = ()


def test_an_unknown_class_is_captured_by_its_attributes() -> None:
    cache = WithAttributes()
    cache.offset, cache.parts = 7, {"a": mx.arange(6).reshape(2, 3), "b": [None, 2.5]}
    layout = Layout([WithAttributes()])
    assert isinstance(layout.kinds[0], Opaque)
    state = layout.capture([cache])
    cache.parts["a"][0, 0] = 99  # the copy is not touched
    built = layout.build([WithAttributes()], node_with(state), 7, 0)[0]
    assert built.offset == 7
    assert built.parts["b"] == [None, 2.5]
    assert built.parts["a"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_an_unknown_class_without_attributes_is_captured_by_its_state() -> None:
    cache = WithState()
    cache._hidden = mx.array([3.0, 4.0])
    layout = Layout([WithState()])
    state = layout.capture([cache])
    built = layout.build([WithState()], node_with(state), 1, 0)[0]
    assert built._hidden.tolist() == [3.0, 4.0]


def test_what_cannot_be_captured_is_unknown_and_turns_reuse_off() -> None:
    assert kind_of(Unreadable()) is None
    layout = Layout([KVCache(), CacheList(KVCache(), Unreadable())])
    assert layout.unknown == ["Unreadable"]
    assert not layout.reusable


def test_a_subclass_is_not_taken_for_its_parent() -> None:
    class More(KVCache):
        pass

    assert isinstance(kind_of(More()), Opaque)


def test_a_padded_recurrent_state_is_refused() -> None:
    cache = ArraysCache(1, left_padding=[2])
    with pytest.raises(ValueError, match="padded"):
        Layout([ArraysCache(1)]).capture([cache])


def test_what_is_packed_does_not_pin_the_running_cache() -> None:
    """A slice would keep its whole parent alive."""
    limit = mx.set_cache_limit(0)
    try:
        before = mx.get_active_memory()
        cache = KVCache()
        cache.update_and_fetch(mx.ones((1, 2, 1000, 32)), mx.ones((1, 2, 1000, 32)))
        mx.eval(cache.state)
        packed = Layout([KVCache()]).pack("rows", [cache], 100, 110)
        del cache
        assert mx.get_active_memory() - before <= packed.nbytes + 256
    finally:
        mx.set_cache_limit(limit)


def test_splitting_rows_copies_one_segment_and_pins_nothing() -> None:
    limit = mx.set_cache_limit(0)
    try:
        before = mx.get_active_memory()
        cache = KVCache()
        length = 3 * SEGMENT
        cache.update_and_fetch(*rows(range(length), 0))
        whole = Layout([KVCache()]).pack("rows", [cache], 0, length)
        del cache
        upper, lower = whole.split(SEGMENT + 3)
        assert upper is not None
        assert lower is not None
        assert upper.segments[0] is whole.segments[0]
        assert lower.segments[-1] is whole.segments[-1]
        assert [(s.start, s.stop) for s in (*upper.segments, *lower.segments)] == [
            (0, SEGMENT),
            (SEGMENT, SEGMENT + 3),
            (SEGMENT + 3, 2 * SEGMENT),
            (2 * SEGMENT, 3 * SEGMENT),
        ]
        del whole, lower
        assert mx.get_active_memory() - before <= upper.nbytes + 1024
    finally:
        mx.set_cache_limit(limit)


def test_missing_rows_are_an_error_and_not_a_shorter_cache() -> None:
    cache = KVCache()
    cache.update_and_fetch(*rows(range(50), 0))
    layout = Layout([KVCache()])
    tree = Tree()
    first = tree.add(tree.root, key(*range(20)), "prefill")
    first.rows = layout.pack("rows", [cache], 0, 20)
    last = tree.add(first, key(*range(20, 50)), "prefill")
    last.rows = layout.pack("rows", [cache], 30, 50)
    with pytest.raises(LookupError, match="20"):
        layout.build([KVCache()], last, 50, 0)


class Foreign:
    """A cache class that Rewarm does not know, and cannot capture."""

    def __init__(self) -> None:
        self.seen = {"tokens": object()}
        self.sums = mx.zeros((2,))


class ForeignKind:
    group: ClassVar[layer_kinds.Group] = "state"

    @staticmethod
    def of(cache: Any) -> ForeignKind | None:
        return ForeignKind() if type(cache) is Foreign else None

    def capture(self, cache: Any) -> Any:
        return cache.sums

    def load(self, cache: Any, value: Any) -> Any:
        cache.sums = value
        return cache


def test_a_kind_can_be_registered_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Layout([Foreign()]).unknown == ["Foreign"]
    monkeypatch.setattr(layer_kinds, "KINDS", [*layer_kinds.KINDS])
    rewarm.layer_kinds.register(ForeignKind)
    layout, cache = Layout([Foreign()]), Foreign()
    assert layout.reusable
    cache.sums = mx.array([1.0, 2.0])
    state = layout.capture([cache])
    built = layout.build([Foreign()], node_with(state), 7, 0)[0]
    assert built.sums.tolist() == [1.0, 2.0]
