"""The disk store on real files: killed, damaged, full, held by another, and large."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rewarm.cache.tiers.disk import files
from rewarm.cache.tiers.disk.files import Written
from rewarm.cache.tiers.disk.records import (
    AddNode,
    AddPayload,
    RemoveNode,
    RemovePayload,
    StoredPayload,
    StoreError,
    UpdateNode,
    Verified,
)
from rewarm.cache.tiers.disk.store import Store

from .stores import (
    ABOUT,
    add,
    content,
    file_of,
    flip,
    node_of,
    on_disk,
    opened,
    same,
)

SOAK = os.environ.get("REWARM_SOAK") == "1"


# What is stored comes back

EVERY = sorted(files.DTYPES)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("shape", [(3, 5), (), (0,), (4, 0, 2)])
def test_every_dtype_and_shape_comes_back(kept: Store, name: str, shape: tuple[int, ...]) -> None:
    dtype = files.DTYPES[name]
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(1).integers(0, 2, size, dtype=np.uint8)  # valid bits for bool, too
    array = np.frombuffer(raw.tobytes(), dtype).reshape(shape)
    payload = kept.put_payload({"x": array}, (1, 1))
    assert same(kept.read(payload), {"x": array})


def test_a_payload_is_a_plain_safetensors_file(kept: Store) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    arrays = {"bytes": np.arange(3, dtype=np.uint8), "wide": np.arange(5.0), **content(1)}
    payload = kept.put_payload(arrays, None)
    found = safetensors.load_file(file_of(kept, payload))
    assert same({name: found[name] for name in arrays}, arrays)


def test_arrays_are_read_into_what_the_caller_makes_for_them(kept: Store) -> None:
    arrays = {
        "odd": np.arange(3, dtype=np.uint8),
        "wide": np.arange(5.0),
        "nothing": np.ones((2, 0), "<f2"),
    }
    made: dict[str, np.ndarray[Any, Any]] = {}

    def new(entries: Sequence[files.Entry]) -> dict[str, np.ndarray[Any, Any]]:
        made.update({entry.name: np.zeros(entry.shape, entry.dtype) for entry in entries})
        return dict(made)

    found = kept.read(kept.put_payload(arrays, None), new)
    assert same(found, arrays)
    assert found is not None
    assert all(found[name] is made[name] for name in arrays)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}},
        {"a": {"dtype": "F32", "shape": [4, -1, -1], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}},
        {"a": {"dtype": "F64", "shape": [4], "data_offsets": [0, 16]}},
        {"a": {"dtype": "Q4", "shape": [4], "data_offsets": [0, 16]}},
        {"a": [1]},
        ["a"],
        {
            "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
            "b": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        },
    ],
)
def test_a_header_that_lies_gets_no_memory(header: Any) -> None:
    """It is read before its checksum can be known."""
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        files.entries(json.dumps(header).encode(), 16)


def test_strided_and_big_endian_arrays_come_back_equal(kept: Store) -> None:
    strided = np.arange(24, dtype=np.int32).reshape(4, 6)[::2, ::-1].T
    swapped = np.arange(4, dtype=">i8")
    found = kept.read(kept.put_payload({"s": strided, "b": swapped}, None))
    assert same(found, {"s": strided, "b": swapped.astype("<i8")})


def test_an_array_that_no_file_can_hold_is_refused(kept: Store, folder: Path) -> None:
    for arrays in ({"x": np.array(["a"])}, {"__metadata__": np.ones(1)}, {"x": np.array([None])}):
        with pytest.raises(TypeError, match="safetensors"):
            kept.put_payload(arrays, None)
    assert on_disk(folder) == []
    assert kept.verify().clean


def test_nodes_come_back_parents_first_with_every_column(folder: Path) -> None:
    with opened(folder) as kept:
        space = kept.namespace("one", ABOUT)
        top, first = add(kept, space, 1)
        below, second = add(kept, space, 2, parent=top)
        # A split puts a younger node above an older one.
        middle = kept.next_id()
        lower = replace(node_of(below, 3, second.id, middle), window=first.id, state=second.id)
        kept.commit(space, [AddNode(node_of(middle, 4, None, top)), UpdateNode(lower)])
    with opened(folder) as kept:
        assert kept.namespace("one", ABOUT) == space
        nodes, payloads = kept.nodes(space)
        upper = node_of(top, 1, first.id)
        assert nodes == [upper, node_of(middle, 4, None, top), lower]
        assert payloads == {first.id: first, second.id: second}
        assert same(kept.read(second), content(2))
        assert kept.verify() == Verified(3, 2, first.nbytes + second.nbytes, 0, 0, 0)


def test_numbers_that_are_numpys_come_back_as_plain_ones(kept: Store) -> None:
    space = kept.namespace("one", ABOUT)
    odd: Any = np.int64(4)
    node = replace(node_of(kept.next_id(), 1, None), hits=odd, start=odd, used=7, hint=-0.0)
    kept.commit(space, [AddNode(node)])
    (found,) = kept.nodes(space)[0]
    assert found == node
    assert (type(found.hits), type(found.start), type(found.used)) == (int, int, float)


def test_ids_grow_beyond_everything_in_the_index(folder: Path) -> None:
    with opened(folder) as kept:
        space = kept.namespace("one", ABOUT)
        id = kept.next_id() + 100
        kept.commit(space, [AddNode(replace(node_of(id, 1, None), rows=id + 7))])
    with opened(folder) as kept:
        assert kept.next_id() == id + 8  # what a node still names is not given to another
        assert kept.next_id() == id + 9


def test_a_commit_is_all_or_nothing(kept: Store, folder: Path) -> None:
    space = kept.namespace("one", ABOUT)
    id, payload = add(kept, space, 1)
    fresh = kept.put_payload(content(2), (2, 2))
    with pytest.raises(StoreError, match="refused"):  # the last change names a number twice
        kept.commit(
            space,
            [
                RemoveNode(id),
                RemovePayload(payload.id),
                AddPayload(fresh),
                AddNode(node_of(90, 1, None)),
                AddNode(node_of(90, 1, None)),
            ],
        )
    nodes, payloads = kept.nodes(space)
    assert [n.id for n in nodes] == [id]
    assert list(payloads) == [payload.id]
    assert same(kept.read(payload), content(1))
    kept.commit(space, [AddPayload(fresh), AddNode(node_of(91, 2, fresh.id))])
    assert same(kept.read(fresh), content(2))


def test_a_removed_payload_takes_its_file_along(kept: Store, folder: Path) -> None:
    space = kept.namespace("one", ABOUT)
    first, payload = add(kept, space, 1)
    _, other = add(kept, space, 2)
    waiting = kept.put_payload(content(3), None)
    assert len(on_disk(folder)) == 3
    kept.commit(0, [RemoveNode(first), RemovePayload(payload.id)])  # no namespace is needed for it
    kept.remove_payloads([waiting.id, 12345])
    assert on_disk(folder) == [file_of(kept, other)]
    assert kept.read(payload) is None
    assert kept.read(waiting) is None


def test_only_what_was_written_here_can_be_committed(kept: Store) -> None:
    space = kept.namespace("one", ABOUT)
    with pytest.raises(StoreError, match="not written here"):
        kept.commit(space, [AddPayload(StoredPayload(77, Written("0" * 32, 10, bytes(16))))])
    with pytest.raises(StoreError, match="no namespace 5"):
        kept.commit(5, [AddNode(node_of(1, 1, None))])


# Who may look


def test_nobody_else_can_read_anything(folder: Path) -> None:
    before = os.umask(0)
    try:
        with opened(folder) as kept:
            add(kept, kept.namespace("one", ABOUT), 1)
            add(kept, kept.namespace("one", ABOUT), 2)
            flip(file_of(kept, add(kept, kept.namespace("one", ABOUT), 3)[1]), 40)
            kept.verify()
            found = [folder, *folder.rglob("*")]
            names = {p.name for p in found}
            assert {"index.sqlite", "index.sqlite-wal", "lock", "quarantine"} <= names
            for path in found:
                mode = stat.S_IMODE(path.stat().st_mode)
                assert mode == (0o700 if path.is_dir() else 0o600), path
    finally:
        os.umask(before)


def test_a_strict_umask_takes_nothing_from_us(folder: Path) -> None:
    before = os.umask(0o777)
    try:
        with opened(folder) as kept:
            _, payload = add(kept, kept.namespace("one", ABOUT), 1)
            modes = {stat.S_IMODE(p.stat().st_mode) for p in (folder, file_of(kept, payload))}
            assert modes == {0o700, 0o600}
    finally:
        os.umask(before)


def test_a_folder_with_other_things_in_it_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "letter").write_text("dear")
    with opened(tmp_path) as kept:
        add(kept, kept.namespace("one", ABOUT), 1)
        kept.clear()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "payloads").stat().st_mode) == 0o700
    assert (tmp_path / "letter").read_text() == "dear"


def test_a_closed_store_says_so(folder: Path) -> None:
    kept = opened(folder)
    kept.close()
    kept.close()
    with pytest.raises(StoreError, match="closed"):
        kept.nodes(1)
    with pytest.raises(StoreError, match="closed"):
        kept.put_payload({}, None)


def test_threads_share_a_store(kept: Store) -> None:
    space = kept.namespace("one", ABOUT)
    failed: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for n in range(first, first + 15):
                id, payload = add(kept, space, n)
                assert same(kept.read(payload), content(n))
                if n % 3 == 0:
                    kept.commit(space, [RemoveNode(id), RemovePayload(payload.id)])
                kept.bytes()
                kept.nodes(space)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i * 100,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(kept.nodes(space)[0]) == 40
    assert kept.verify().clean
