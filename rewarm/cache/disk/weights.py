"""What tells models apart for good: the content of their weights, read in full once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import xxhash
from mlx.utils import tree_flatten

BLOCK = 16 << 20
MEMO = "weights.json"
KINDS = ("*.safetensors", "*.npz", "config.json", "adapter_config.json")


def weights_digest(model: Any, source: str | None, adapter: str, folder: Path) -> str:
    """Of a model's files, remembered by inode, size and time; of its arrays where it has none."""
    digest = xxhash.xxh3_128(type(model).__module__.encode())
    if source is None:
        for part in _arrays(model):
            digest.update(part)
        return digest.hexdigest()
    memo = _Memo(folder / MEMO)
    for place in (source, adapter):
        found = {p for kind in KINDS for p in Path(place).glob(kind)} if place else set()
        if place == source and not any(p.suffix == ".safetensors" for p in found):
            return weights_digest(model, None, adapter, folder)
        for path in sorted(found):
            digest.update(f"{path.name} {memo.digest(path)}".encode())
    memo.save()
    return digest.hexdigest()


def _arrays(model: Any) -> Iterator[bytes]:
    found = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    for name, value in found:
        yield f"{name} {value.shape} {value.dtype}".encode()
        plain = value.view(mx.uint16) if value.dtype == mx.bfloat16 else value
        yield np.ascontiguousarray(np.asarray(plain)).tobytes()


class _Memo:
    """Digests of files that have not changed since."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, str] = {}
        self.used: dict[str, str] = {}
        with suppress(OSError, ValueError):
            known = json.loads(path.read_text())
            if isinstance(known, dict):
                self.known = {str(k): str(v) for k, v in known.items()}

    def digest(self, path: Path) -> str:
        found = path.stat()
        key = f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}"
        if key not in self.known:
            digest = xxhash.xxh3_128()
            with path.open("rb") as file:
                while block := file.read(BLOCK):
                    digest.update(block)
            self.known[key] = digest.hexdigest()
        self.used[key] = self.known[key]
        return self.known[key]

    def save(self) -> None:
        """Whatever goes wrong here costs a second reading, next time."""
        with suppress(OSError):
            temporary = self.path.with_suffix(".tmp")
            with open(
                os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w"
            ) as file:
                json.dump(self.known, file)
            temporary.replace(self.path)
