"""The scenario `prefill`: whole models as mlx-lm runs them, and with each part that is faster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import mlx.core as mx
import typer

from rewarm.errors import NotReady

from .archs import text_config
from .bench import Bench
from .figures import Spread, ratios
from .profiles import profile
from .result import Sheet
from .scenario import Archs, at_least, numbers, scenario

LONG = 20.0
"""Seconds. A way whose prefill takes longer is measured once."""

DECODED = 32
"""Tokens that are decoded after each prompt."""


@dataclass
class Way:
    """One way to run a model, and the seconds that it took, round by round."""

    name: str
    parts: tuple[str, ...] = ()
    """Modules of `rewarm.accel` that are in use: see `worker.py`."""
    environment: dict[str, str] = field(default_factory=dict)
    prefills: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)


GPU = ("cuda_attention", "cuda_convolution")


def _ways() -> list[Way]:
    """Give the ways from mlx-lm alone to everything that Rewarm does on this device."""
    if mx.default_device() == mx.cpu:
        return [
            Way("mlx-lm, MLX's own BLAS", environment={"REWARM_BLAS": "off"}),
            Way("mlx-lm, OpenBLAS"),
            Way("… the delta rule in chunks", ("delta",)),
            Way("… other operations", ("delta", "cpu")),
            Way("… memory at hand: Rewarm", ("delta", "cpu", "heap")),
        ]
    return [
        Way("mlx-lm"),
        Way("… the delta rule in chunks", ("chunks", *GPU)),
        Way("… the delta rule in a kernel: Rewarm", ("delta", *GPU)),
    ]


@scenario("rounds")
def prefill(
    bench: Bench,
    archs: Archs = "hybrid-12x384",
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, with commas.")] = "1024",
    product: Annotated[int, at_least(1, "Size of the matrix product to compare with.")] = 1024,
) -> None:
    """Prefill and decoding of whole models, by mlx-lm and with each part that Rewarm replaces."""
    # Each way is a process of its own, since a process has one BLAS.
    sizes = numbers("--lengths", lengths)
    sheet = bench.result.sheet(
        f"medians of {bench.rounds}",
        *("model", "tokens:,", "way", "tokens/s:,.0f", "mlx-lm / it", "ms a token after it:.1f"),
        *("GFLOP/s:,.0f", "of a product's:.0%"),
    )
    for arch in archs.split(","):
        with ExitStack() as stack:
            workers = [
                stack.enter_context(_worker(arch, way))
                for way in bench.each(f"starting {arch}", _ways())
            ]
            rate = 2.0 * product**3 / workers[-1].ask("product", product)
            for length in sizes:
                for worker in workers:
                    worker.way.prefills, worker.way.steps = [], []
                with bench.concluding(partial(_rows, sheet, arch, length, workers, rate)):
                    turns = bench.in_turns(f"{arch}, {length:,}", workers, bench.rounds + 1)
                    for i, worker in turns:
                        _measure(worker, length, first=not i)


@dataclass
class Worker:
    """A running `worker.py`."""

    way: Way
    process: subprocess.Popen[str]

    def ask(self, what: str, count: int) -> float:
        assert self.process.stdin is not None
        print(what, count, file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> float:
        """Read the seconds that the last request took."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise NotReady(f"{self.way.name!r} ended with {self.process.wait()}")
        return float(line)


@contextmanager
def _worker(arch: str, way: Way) -> Iterator[Worker]:
    kept = {k: v for k, v in os.environ.items() if k not in ("REWARM_BLAS", "REWARM_ACCEL")}
    with subprocess.Popen(
        [sys.executable, "-m", "rewarm.bench.worker", arch, *way.parts],
        env={**kept, **way.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            worker = Worker(way, process)
            worker.answer()  # wait until it is ready
            yield worker
        finally:
            process.kill()


def _measure(worker: Worker, length: int, *, first: bool) -> None:
    """Measure a way once. The first round does not count, since MLX plans for the length in it,
    unless it takes long."""
    way = worker.way
    if max(way.prefills, default=0.0) > LONG:
        return
    took, step = worker.ask("prefill", length), worker.ask("decode", DECODED)
    if not first or took > LONG:
        way.prefills.append(took)
        way.steps.append(step)


def _rows(sheet: Sheet, arch: str, length: int, workers: Sequence[Worker], rate: float) -> None:
    flops = profile(arch).prefill_flops(0, length) + length * _recurrent_flops(arch)
    stock = workers[0].way.prefills
    for way in (worker.way for worker in workers if worker.way.prefills and stock):
        seconds = Spread.of(way.prefills).median
        faster, step = ratios(way.prefills, stock), 1e3 * Spread.of(way.steps).median
        done = flops / seconds
        sheet.add(
            *(arch, length, way.name, length / seconds, faster, step, done / 1e9, done / rate)
        )


def _recurrent_flops(arch: str) -> float:
    """Count the FLOPs of a hybrid's recurrent layers for a token, beside their weights: a
    multiplication, and three multiplications with an addition, for each number of a state."""
    text = text_config(arch)
    if "linear_num_value_heads" not in text:
        return 0.0
    state: int = text["linear_key_head_dim"] * text["linear_value_head_dim"]
    attention = text["num_hidden_layers"] // text["full_attention_interval"]
    heads: int = (text["num_hidden_layers"] - attention) * text["linear_num_value_heads"]
    return 7.0 * heads * state
