"""The servers that a scenario runs against: Rewarm, and a peer beside it."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rewarm.errors import InvalidOption, NotReady

from .client import ask, delete, get, read_metric

LOADING = 600.0
"""Seconds until a server must be ready."""

# With the BLAS that Rewarm runs on, or the comparison would be one of BLAS libraries. Every time
# its cache takes something in, it leaves a note of how many bytes that holds.
MLX_LM = """
import os, sys
import rewarm
from mlx_lm.models.cache import LRUPromptCache
insert = LRUPromptCache.insert_cache
def noted(self, *given, **named):
    insert(self, *given, **named)
    with open(os.environ["REWARM_BENCH_BYTES"], "w") as note:
        note.write(str(self.nbytes))
LRUPromptCache.insert_cache = noted
from mlx_lm.server import main
sys.argv[0] = "mlx_lm.server"
main()
"""


@dataclass(frozen=True)
class Side:
    """A server that runs."""

    name: str
    url: str
    note: Path
    ours: bool

    def settle(self) -> None:
        """Until nothing is computed ahead any more: a person would still be reading."""
        while self.ours and read_metric(self.url, "rewarm_warm_ahead_waiting"):
            time.sleep(0.02)

    def held(self) -> int | None:
        """Bytes that its cache holds; None where it does not say."""
        if self.ours:
            kinds = get(f"{self.url}/v1/cache")["bytes"]["memory"]
            return sum(int(n) for kind, n in kinds.items() if kind != "index")
        try:
            return int(self.note.read_text())
        except (OSError, ValueError):
            return None

    def warm_tokens(self) -> int:
        """Computed ahead of requests."""
        if not self.ours:
            return 0
        return int(read_metric(self.url, "rewarm_warm_ahead_tokens_total"))

    def clear(self) -> None:
        """Forget everything; a peer has no way to, so its prompts must differ from round to
        round."""
        if self.ours:
            delete(f"{self.url}/v1/cache")


def command(name: str, model: str, port: int, extra: Sequence[str] = ()) -> list[str]:
    """`name`: "rewarm", "mlx-lm", or a command line with {model} and {port}."""
    if name.startswith("rewarm"):
        words = ["-m", "rewarm", "serve", model, "--port", str(port), *extra]
        return [sys.executable, *words]
    if name == "mlx-lm":
        words = ["-c", MLX_LM, "--model", model, "--port", str(port), "--log-level", "ERROR"]
        return [sys.executable, *words]
    if "{port}" not in name:
        raise InvalidOption(
            f'--peer {name!r}: give "mlx-lm", or a command with {{model}} and {{port}} in it'
        )
    return [word.format(model=model, port=port) for word in shlex.split(name)]


@contextmanager
def running(name: str, model: str, extra: Sequence[str] = ()) -> Iterator[Side]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="rewarm-bench-") as folder:
        note, said = Path(folder) / "bytes", Path(folder) / "said"
        environment = {**os.environ, "REWARM_BENCH_BYTES": str(note)}
        with said.open("wb") as output:
            process = subprocess.Popen(
                command(name, model, port, extra),
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C is the bench's, which then stops it in order
            )
        side = Side(name, f"http://127.0.0.1:{port}", note, name.startswith("rewarm"))
        try:
            _wait_until_ready(side, process, said)
            ask(side.url, [{"role": "user", "content": "Hello."}], 2)
            side.settle()
            yield side
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(side: Side, process: subprocess.Popen[bytes], said: Path) -> None:
    until = time.monotonic() + LOADING
    while time.monotonic() < until:
        if process.poll() is not None:
            last = said.read_text(errors="replace").strip().splitlines()[-5:]
            raise NotReady(f"{side.name} ended with {process.returncode}: {' | '.join(last)}")
        if _answers(side.url):
            return
        time.sleep(0.1)
    raise NotReady(f"{side.name} was not ready within {LOADING:.0f} s")


def _answers(url: str) -> bool:
    """By its health; by its list of models where it has no word for that."""
    for path in ("/health", "/v1/models"):
        try:
            with urllib.request.urlopen(url + path, timeout=10):
                return True
        except urllib.error.HTTPError as error:
            if error.code != 404:
                return False
        except OSError:
            return False
    return False
