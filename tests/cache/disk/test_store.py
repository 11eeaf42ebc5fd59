"""The disk store gives back what it was given, and only to its owner."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from rewarm.cache.tiers.disk import files
from rewarm.cache.tiers.disk.errors import StoreError
from rewarm.cache.tiers.disk.index import new_id
from rewarm.cache.tiers.disk.store import Store, Verified

from .stores import (
    ONE,
    add,
    commit,
    content,
    file_of,
    flip,
    node_of,
    on_disk,
    opened,
    read,
    same,
    write,
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
    size = kept.write(1, {"x": array})
    assert same(kept.read(1, size), {"x": array})


def test_a_payload_is_a_plain_safetensors_file(kept: Store) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    arrays = {"bytes": np.arange(3, dtype=np.uint8), "wide": np.arange(5.0), **content(1)}
    kept.write(1, arrays)
    found = safetensors.load_file(files.place(kept._payloads, 1))
    assert same({name: found[name] for name in arrays}, arrays)


def test_payloads_are_read_into_arrays_of_mlx(kept: Store) -> None:
    arrays = {
        "0.0": np.arange(5, dtype=np.float32),
        "0.1": np.ones((2, 0), "<f2"),
        "label": np.arange(3, dtype=np.uint8),
    }
    found = kept.read(1, kept.write(1, arrays))
    assert same(found, arrays)
    if mx.default_device() == mx.cpu:
        assert list(found.made) == ["0.0"]
        assert np.shares_memory(np.asarray(found.made["0.0"]), found["0.0"])


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
    """The header is read before the seal can be checked."""
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        files.decode(json.dumps(header).encode(), 16)


def test_strided_and_big_endian_arrays_come_back_equal(kept: Store) -> None:
    strided = np.arange(24, dtype=np.int32).reshape(4, 6)[::2, ::-1].T
    swapped = np.arange(4, dtype=">i8")
    found = kept.read(1, kept.write(1, {"s": strided, "b": swapped}))
    assert same(found, {"s": strided, "b": swapped.astype("<i8")})


def test_an_array_that_no_file_can_hold_is_refused(kept: Store, folder: Path) -> None:
    for arrays in ({"x": np.array(["a"])}, {"__metadata__": np.ones(1)}, {"x": np.array([None])}):
        with pytest.raises(TypeError, match="safetensors"):
            kept.write(1, arrays)
    assert on_disk(folder) == []
    assert kept.verify().clean


def test_nodes_come_back_parents_first_with_every_column(folder: Path) -> None:
    with opened(folder) as kept:
        top, first = add(kept, 1)
        below, second = add(kept, 2, parent=top)
        # A split puts a younger node above an older one.
        middle = new_id()
        lower = node_of(below, 5, second.id, middle)
        lower = lower._replace(window_file=first.id, state_file=second.id)
        upper = node_of(middle, 4, None, top)
        commit(kept, upper, lower)
    with opened(folder) as kept:
        found = kept.index.load(ONE)
        assert found.nodes == [node_of(top, 1, first.id), upper, lower]
        assert found.files == {first.id: first, second.id: second}
        assert (found.lost, found.unused) == ([], [])
        assert same(read(kept, second), content(2))
        assert kept.verify() == Verified(3, 2, first.nbytes + second.nbytes, 0, 0, 0)


def test_a_commit_is_all_or_nothing(kept: Store) -> None:
    id, file = add(kept, 1)
    fresh = write(kept, 2)
    bad = node_of(91, 1, None)._replace(origin=None)
    with pytest.raises(StoreError, match="refused"):
        commit(kept, node_of(90, 1, None), bad, files=[fresh], gone_nodes=[id])
    found = kept.index.load(ONE)
    assert [node.id for node in found.nodes] == [id]
    assert list(found.files) == [file.id]
    assert same(read(kept, file), content(1))
    commit(kept, node_of(91, 2, fresh.id), files=[fresh])
    assert same(read(kept, fresh), content(2))


def test_a_removed_payload_takes_its_file_along(kept: Store, folder: Path) -> None:
    first, file = add(kept, 1)
    _, other = add(kept, 2)
    waiting = write(kept, 3)
    assert len(on_disk(folder)) == 3
    commit(kept, gone_nodes=[first], gone_files={file.id: 0, waiting.id: 0, 12345: 0})
    assert on_disk(folder) == [file_of(kept, other)]
    assert read(kept, file) is None
    assert read(kept, waiting) is None
    assert kept.verify().clean


# Who may look


def test_nobody_else_can_read_anything(folder: Path) -> None:
    before = os.umask(0)
    try:
        with opened(folder) as kept:
            add(kept, 1)
            add(kept, 2)
            flip(file_of(kept, add(kept, 3)[1]), 40)
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
            _, payload = add(kept, 1)
            modes = {stat.S_IMODE(p.stat().st_mode) for p in (folder, file_of(kept, payload))}
            assert modes == {0o700, 0o600}
    finally:
        os.umask(before)


def test_a_folder_with_other_things_in_it_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "letter").write_text("dear")
    with opened(tmp_path) as kept:
        add(kept, 1)
        kept.clear()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "payloads").stat().st_mode) == 0o700
    assert (tmp_path / "letter").read_text() == "dear"


def test_a_closed_store_says_so(folder: Path) -> None:
    kept = opened(folder)
    kept.close()
    kept.close()
    with pytest.raises(StoreError, match="closed"):
        kept.index.load(1)
    with pytest.raises(StoreError, match="closed"):
        kept.write(1, {})


def test_threads_share_a_store(kept: Store) -> None:
    failed: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for n in range(first, first + 15):
                id, file = add(kept, n)
                assert same(read(kept, file), content(n))
                if n % 3 == 0:
                    commit(kept, gone_nodes=[id], gone_files={file.id: 0})
                kept.bytes()
                kept.index.load(ONE)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i * 100,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(kept.index.load(ONE).nodes) == 40
    assert kept.verify().clean
