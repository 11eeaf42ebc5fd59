"""The servers that a scenario runs against: Rewarm, and a peer beside it."""

from __future__ import annotations

import http.client
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewarm.errors import InvalidOption, NotReady

from .client import Answered, ask, delete, get, read_metric

LOADING = 600.0
"""Seconds within which a server must be ready."""

STOPPING = 30.0
"""Seconds within which a server must stop when it is asked to."""

BEGINNING = 3.0
"""Seconds after an answer within which warm-ahead begins, even on a busy machine."""

SPIN = {"OPENBLAS_THREAD_TIMEOUT": "24"}
"""OpenBLAS' threads look for work for 2**24 cycles instead of 2**28 before they sleep. So the next
server that is asked has the cores a tenth of a second sooner."""

MLX_LM = "mlx-lm"

NOTE, OUTPUT = "bytes", "output"

DEFAULT_MODEL = "default_model"
"""The name that mlx-lm's server has for the model that it was started with. Rewarm takes any."""

# It imports rewarm for its BLAS: otherwise the comparison would be one of BLAS libraries. After
# each insertion into its cache it writes a note with the bytes that the cache holds.
MLX_LM_SERVER = """
import os, sys
import rewarm
from mlx_lm.models.cache import LRUPromptCache
insert = LRUPromptCache.insert_cache
def noted(self, *given, **named):
    insert(self, *given, **named)
    path = os.environ["REWARM_BENCH_BYTES"]
    with open(path + ".new", "w") as note:
        note.write(str(self.nbytes))
    os.replace(path + ".new", path)  # never half a note
LRUPromptCache.insert_cache = noted
from mlx_lm.server import main
sys.argv[0] = "mlx_lm.server"
main()
"""


@dataclass
class Side:
    """A server that the bench has started."""

    name: str
    url: str
    ours: bool
    process: subprocess.Popen[bytes]
    folder: Path
    """The folder of its output, and of mlx-lm's note of the bytes that its cache holds."""
    model: str = DEFAULT_MODEL
    """The name by which requests ask for its model."""
    ahead: int = 0
    """The tokens that warm-ahead had computed at the last look."""

    def wait_until_ready(self, location: str) -> None:
        """Wait until it is ready and has answered a first request, which no scenario measures.

        `location` is the model that it was started with."""
        _wait_until_ready(self)
        if not self.ours and self.name != MLX_LM:
            self.model = _model_name(self.url, location)
        self.wait_for_warm_ahead(self.ask([{"role": "user", "content": "Hello."}], 2))

    def ask(
        self, messages: list[dict[str, Any]], max_tokens: int, more: dict[str, Any] | None = None
    ) -> Answered:
        try:
            return ask(self.url, messages, max_tokens, {"model": self.model, **(more or {})})
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:300]
            raise NotReady(f"{self.name} answered {error.code}: {said}") from error
        except (OSError, http.client.HTTPException) as error:
            raise NotReady(f"{self.name} does not answer: {error}") from error

    def wait_for_warm_ahead(self, reply: Answered) -> None:
        """Wait until warm-ahead after this reply is done, as it is while a person reads.

        Warm-ahead begins a moment after an answer that ended by itself, and never after others."""
        ended = reply.finish in ("stop", "tool_calls")
        if not self.ours or not ended or "--no-warm-ahead" in self.name:
            return
        until = time.monotonic() + BEGINNING
        while True:
            ahead = self.warm_tokens()
            waiting = read_metric(self.url, "rewarm_warm_ahead_waiting")
            if not waiting and (ahead > self.ahead or time.monotonic() > until):
                self.ahead = ahead
                return
            time.sleep(0.01)

    def held_bytes(self) -> float:
        """Read the bytes that its cache holds; NaN where it does not say."""
        if self.ours:
            kinds = get(f"{self.url}/v1/cache")["bytes"]["memory"]
            return sum(int(n) for kind, n in kinds.items() if kind != "index")
        try:
            return int((self.folder / NOTE).read_text())
        except (OSError, ValueError):
            return math.nan

    def warm_tokens(self) -> int:
        """Read the tokens that were computed ahead of requests."""
        if not self.ours:
            return 0
        return int(read_metric(self.url, "rewarm_warm_ahead_tokens_total"))

    def clear(self) -> None:
        """Clear our cache, but keep its memory. A peer's cache cannot be cleared, so prompts must
        differ from round to round."""
        if self.ours:
            delete(f"{self.url}/v1/cache?give_back=false")


def command(peer: str, model: str, port: int) -> list[str]:
    """Give the words of a peer's command: `peer` is "mlx-lm", or a line with {model} and {port}."""
    if peer == MLX_LM:
        words = ["-c", MLX_LM_SERVER, "--model", model, "--port", str(port), "--log-level", "ERROR"]
        return [sys.executable, *words]
    usage = 'give "mlx-lm", or a command with {model} and {port} in it'
    for place in re.findall(r"\{\w*\}", peer):
        if place not in ("{model}", "{port}"):
            raise InvalidOption(f"--peer {peer!r}: {place} stands for nothing; {usage}")
    if "{port}" not in peer:
        raise InvalidOption(f"--peer {peer!r}: it is not told its port; {usage}")
    try:
        words = shlex.split(peer)
    except ValueError as error:
        raise InvalidOption(f"--peer {peer!r}: {error}") from error
    return [w.replace("{model}", model).replace("{port}", str(port)) for w in words]


def rewarm(model: str, options: Sequence[str] = ()) -> AbstractContextManager[Side]:
    """Start our own server with these options. Call `wait_until_ready` before a request."""
    port = _free_port()
    words = ["-m", "rewarm", "serve", model, "--port", str(port), *options]
    return _started([sys.executable, *words], " ".join(["rewarm", *options]), port, ours=True)


def other(peer: str, model: str) -> AbstractContextManager[Side]:
    """Start a peer. A command is too long for a table, so its name is "peer"."""
    port = _free_port()
    name = peer if peer == MLX_LM else "peer"
    return _started(command(peer, model, port), name, port, ours=False)


@contextmanager
def _started(words: list[str], name: str, port: int, *, ours: bool) -> Iterator[Side]:
    with tempfile.TemporaryDirectory(prefix="rewarm-bench-") as made:
        folder = Path(made)
        with (folder / OUTPUT).open("wb") as output:
            try:
                process = subprocess.Popen(
                    words,
                    stdout=output,
                    stderr=output,
                    env={**SPIN, **os.environ, "REWARM_BENCH_BYTES": str(folder / NOTE)},
                    start_new_session=True,  # Ctrl-C ends the bench, which then stops the server
                )
            except OSError as error:
                raise InvalidOption(f"{shlex.join(words)} cannot be started: {error}") from error
        try:
            yield Side(name, f"http://127.0.0.1:{port}", ours, process, folder)
        finally:
            _stop(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop it with all processes that it has started: a command may be a shell."""
    try:
        _signal(process, signal.SIGTERM)
        process.wait(STOPPING)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):  # after a second Ctrl-C, at once
        pass
    finally:
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _wait_until_ready(side: Side) -> None:
    until = time.monotonic() + LOADING
    while time.monotonic() < until:
        if side.process.poll() is not None:
            how = f"ended with {side.process.returncode} before it was ready"
            raise NotReady(f"{side.name} {how}{_last_output(side)}")
        if _answers(side.url):
            return
        time.sleep(0.1)
    how = f"answered neither /health nor /v1/models on {side.url} within {LOADING:.0f} s"
    raise NotReady(f"{side.name} {how}{_last_output(side)}")


def _last_output(side: Side) -> str:
    last = (side.folder / OUTPUT).read_text(errors="replace").strip().splitlines()[-5:]
    return ". It said last:" + "".join(f"\n  {line}" for line in last) if last else ""


def _model_name(url: str, model: str) -> str:
    """Find the name of the model in this server's list of models, where that leaves no doubt."""
    try:
        found = [str(each["id"]) for each in get(f"{url}/v1/models")["data"]]
    except (OSError, ValueError, LookupError, TypeError):
        return DEFAULT_MODEL
    return model if model in found else found[0] if len(found) == 1 else DEFAULT_MODEL


def _answers(url: str) -> bool:
    """Ask `/health`, and the list of models where the server has no `/health`."""
    for path in ("/health", "/v1/models"):
        try:
            with urllib.request.urlopen(url + path, timeout=10):
                return True
        except urllib.error.HTTPError as error:
            if error.code != 404:
                return False
        except (OSError, http.client.HTTPException):
            return False
    return False
