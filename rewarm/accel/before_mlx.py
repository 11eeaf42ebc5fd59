"""Make the settings that MLX needs before it is loaded (docs/blas.md, docs/accel.md).

They are made when `mlx.core` is first imported, and not with `import rewarm`: a program that never
runs a model, such as a gateway, loads no BLAS and makes no folder.
"""

import os
import sys
import threading
from typing import Any

MLX = "mlx.core"
"""The module that loads MLX's library. `mlx` itself is only a folder."""

_lock = threading.Lock()
_is_done = False


def watch() -> None:
    """Call `apply` when MLX is loaded, or now where it is already."""
    if MLX in sys.modules:
        apply()
    else:
        sys.meta_path.insert(0, _Finder())


def apply() -> None:
    """Choose the BLAS under MLX and the folder that it compiles into, once in a process.

    Never raises. A second thread waits until the first one is done.
    """
    global _is_done
    with _lock:
        if _is_done:
            return
        _is_done = True
        from . import blas, compiled

        blas.load()
        compiled.prepare()
        # MLX's CUDA build plans for every shape, and raises once a process has met some hundred of
        # them, however useful its plans are. A server meets a new length with nearly every prompt.
        os.environ.setdefault("MLX_ENABLE_CACHE_THRASHING_CHECK", "0")


class _Finder:
    """Finds MLX where the other finders do, and gives it a loader that calls `apply` first.

    It stays on `sys.meta_path`. To remove it would shift the list under another thread that walks
    it. That thread would then skip a finder, and fail to import its module.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != MLX:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


class _Loader:
    """Stands in for MLX's loader until the library is about to be loaded.

    `apply` is called here and not in the finder, because Python holds its import lock while it asks
    finders. Another thread that chooses a BLAS at that moment needs the lock to import modules.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        spec.loader = self._loader
        apply()
        return self._loader.create_module(spec)
