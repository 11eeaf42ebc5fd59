"""Run a model on one thread: load it, turn the loop, recover from failures, stop."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

import mlx.core as mx
from mlx_lm.generate import wired_limit

from rewarm.errors import NotReady, RewarmError
from rewarm.options import EngineOptions

from .core import STREAM, Core, EngineParts

log = logging.getLogger("rewarm.engine")

State = Literal["loading", "ready", "failing", "stopped"]

FAILURES = 3
"""The failed turns in a row after which waiting requests are turned away too."""

PATIENCE = 2.0
"""The seconds after which the log says that the model is still being tried out."""

QUIET = (1.0, 10.0)
"""The seconds without work after which the durable part of the cache is written to lower tiers, and
the seconds after which all of it is."""

LAST_STEPS = 10.0
"""The most seconds that a thread has for its last steps once its work is over."""


class Engine:
    """A `Core` and the one thread that it runs on, which may be started before anything is loaded.

    `load` runs on that thread, so that everything lazy in a model is evaluated there.
    """

    def __init__(
        self, load: Callable[[], EngineParts], options: EngineOptions | None = None
    ) -> None:
        self.options = options or EngineOptions()
        self.detail = "the model is being loaded"
        self._load = load
        self._state: State = "loading"
        self._core: Core | None = None
        self._failures = 0
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rewarm-engine", daemon=True)

    # From any thread.

    def start(self) -> None:
        """Load and run. A second call changes nothing."""
        if self._thread.ident is None:
            self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> State:
        """Wait until the model is loaded, or cannot be."""
        self._settled.wait(timeout)
        return self.state

    @property
    def state(self) -> State:
        died = self._thread.ident and not self._thread.is_alive()
        return "failing" if died and self._state in ("ready", "loading") else self._state

    @property
    def failed_to_load(self) -> bool:
        return self._settled.is_set() and self._core is None

    @property
    def core(self) -> Core:
        """The part that takes requests, once the model is loaded."""
        if self._core is None:
            raise NotReady(f"the server is not ready: {self.detail}")
        return self._core

    def stop(self, grace: float = 0.0) -> None:
        """Take no more requests, and wait for the thread to end. Requests that still run after
        `grace` seconds are ended by force."""
        if not self._thread.ident:
            self._state, self.detail = "stopped", "the server was stopped"
            return
        self._settled.wait()
        if self._core is not None:
            self._core.stop(grace)
        self._thread.join()
        _await_end(self._thread)

    # On the engine's thread.

    def _run(self) -> None:
        try:
            core = self._loaded_core()
        except BaseException as error:
            known = isinstance(error, RewarmError)  # its message says what is wrong
            log.error("the model could not be loaded", exc_info=None if known else error)
            self._state, self.detail = "failing", f"the model could not be loaded: {error}"
            self._settled.set()
            _end_streams()
            return
        self._core = core
        self._state, self.detail = "ready", ""
        self._settled.set()
        with wired_limit(core.model, [STREAM]):
            while self._wait_for_work(core):
                try:
                    core.turn()
                    if self._failures:
                        self._failures, self._state, self.detail = 0, "ready", ""
                except BaseException as error:
                    log.critical("the engine failed and starts again", exc_info=error)
                    self._failures += 1
                    self._state = "failing"
                    self.detail = f"the engine failed: {type(error).__name__}"
                    core.recover(error, keep=self._failures < FAILURES)
        core.close()
        core.cache.flush()
        _end_streams()
        self._state, self.detail = "stopped", "the server was stopped"

    def _loaded_core(self) -> Core:
        with mx.stream(STREAM):
            parts = self._load()
        self.detail = "the model is being tried out"
        about = "%s; on the first start on a machine this compiles, once"
        slow = threading.Timer(PATIENCE, log.info, [about, self.detail])
        slow.daemon = True
        slow.start()
        try:
            return Core(parts, self.options, owned=True)
        finally:
            slow.cancel()

    def _wait_for_work(self, core: Core) -> bool:
        """Block while there is nothing to do; false once it is time to go."""
        waits = deque(QUIET)
        while True:
            if core.wait(waits.popleft() if waits else None):
                return core.has_requests or not core.stopping
            # A crash would lose what was never written. The durable part is written first, since
            # the next turn needs it; the rest of a chat that goes on changes again soon.
            if not core.cache.flush(wait=False, durable=bool(waits)) and not waits:
                waits.append(QUIET[-1])


def _end_streams() -> None:
    """Wait for the work that this thread gave to MLX, such as the rest of a failed load: a process
    that ends meanwhile aborts, or never ends."""
    with suppress(RuntimeError):  # this work belongs to no request
        mx.synchronize(STREAM)
    mx.clear_streams()


def _await_end(thread: threading.Thread) -> None:
    """Wait until the system has ended a thread that was joined.

    Up to Python 3.12, `join` returns before that. The thread then frees what MLX keeps for each
    thread (the random key, which every new model uses), and takes Python's lock to do so. If Python
    is ending by then, glibc aborts the process: "terminate called without an active exception"."""
    deadline = time.monotonic() + LAST_STEPS
    while os.path.exists(f"/proc/self/task/{thread.native_id}") and time.monotonic() < deadline:
        time.sleep(0.001)
