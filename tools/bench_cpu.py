"""Prefill and decoding on a CPU: mlx-lm as it comes, and with each thing that Rewarm makes faster.

.venv/bin/python tools/bench_cpu.py [--layers 12] [--width 384] [--tokens 1024] [--rounds 5]

Each way is a process of its own, since a BLAS is chosen once, and they take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

STEP = 512
"""Tokens a call of the model, as Rewarm prefills on a CPU."""
DECODED = 32
TURNS = 6
"""Times that each decodes so many tokens, for each prefill: where three threads share two cores, a
turn's time depends on which two of them are together."""


@dataclass(frozen=True)
class Way:
    name: str
    environment: dict[str, str]
    installed: tuple[str, ...] = ()
    """Modules of `rewarm.accel`."""


WAYS = (
    Way("mlx-lm, MLX's own BLAS", {"REWARM_BLAS": "off"}),
    Way("mlx-lm, OpenBLAS", {}),
    Way("… the delta rule in chunks", {}, ("delta",)),
    Way("… other operations", {}, ("delta", "cpu")),
    Way("… memory at hand: Rewarm", {}, ("delta", "cpu", "heap")),
)


def config(layers: int, width: int) -> dict[str, Any]:
    heads = width // 64
    text = {
        "model_type": "qwen3_5_text",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "intermediate_size": width * 8 // 3,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 8192,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
    }
    return {"model_type": "qwen3_5", "text_config": text}


def work(way: Way, layers: int, width: int, tokens: int) -> None:
    """In a process of its own: a line in says what to do, a line out how long it took."""
    import rewarm  # noqa: F401  (loads the BLAS, before mlx)

    # isort: split
    import importlib

    import mlx.core as mx
    from mlx_lm.models import qwen3_5
    from mlx_lm.models.cache import make_prompt_cache

    mx.random.seed(0)
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config(layers, width))).eval()
    mx.eval(model.parameters())
    for name in way.installed:
        if not importlib.import_module(f"rewarm.accel.{name}").install():
            sys.exit(f"rewarm.accel.{name} does nothing here: another device, or switched off")
    prompt = mx.random.randint(0, 8192, (1, tokens))
    caches: list[Any] = []

    def prefill(length: int = tokens) -> float:
        caches[:] = make_prompt_cache(model)
        began = time.perf_counter()
        for start in range(0, length, STEP):
            model(prompt[:, start : start + STEP], cache=caches)
            mx.eval([cache.state for cache in caches])
        return time.perf_counter() - began

    def decode() -> float:
        steps = []
        for _ in range(DECODED):
            began = time.perf_counter()
            mx.eval(model(prompt[:, :1], cache=caches))
            steps.append(time.perf_counter() - began)
        return statistics.median(steps)

    prefill(min(tokens, STEP))  # what is compiled is compiled
    print(decode(), flush=True)
    for line in sys.stdin:
        print(prefill() if line.strip() == "prefill" else decode(), flush=True)


def start(number: int, options: argparse.Namespace) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("REWARM_BLAS", "REWARM_ACCEL")}
    given = [f"--{name}={getattr(options, name)}" for name in ("layers", "width", "tokens")]
    process = subprocess.Popen(
        [sys.executable, __file__, *given, f"--worker={number}"],
        env={**kept, **WAYS[number].environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    answer(process)  # it is ready
    return process


def answer(process: subprocess.Popen[str]) -> float:
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        sys.exit(f"a worker ended with {process.wait()}")
    return float(line)


def ask(process: subprocess.Popen[str], what: str) -> float:
    """Seconds."""
    assert process.stdin
    print(what, file=process.stdin, flush=True)
    return answer(process)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=384, help="a multiple of 128")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.width < 128 or options.width % 128:
        parser.error(f"--width {options.width}: give a multiple of 128")
    if min(options.layers, options.tokens, options.rounds) < 1:
        parser.error("--layers, --tokens and --rounds: give 1 or more")
    if options.worker is not None:
        return work(WAYS[options.worker], options.layers, options.width, options.tokens)
    print(f"starting {len(WAYS)} processes", file=sys.stderr, flush=True)
    workers = [start(number, options) for number in range(len(WAYS))]
    prefills, steps = [], []
    for i in range(options.rounds):
        prefills.append([ask(worker, "prefill") for worker in workers])
        for _ in range(TURNS):
            steps.append([ask(worker, "decode") * 1e3 for worker in workers])
        seconds = "  ".join(f"{took:.2f}" for took in prefills[-1])
        print(f"round {i + 1}, s: {seconds}", file=sys.stderr, flush=True)
    for worker in workers:
        worker.kill()
    heading = f"medians of {len(prefills)} and {len(steps)}"
    print(f"{heading:<30}{'tokens/s':>9}{'times':>22}{'ms a token':>25}")
    for number, way in enumerate(WAYS):
        took = [each[number] for each in prefills]
        ratios = [each[0] / each[number] for each in prefills]
        rate = options.tokens / statistics.median(took)
        print(
            f"{way.name:<30}{rate:9.0f}{spread(ratios):>22}{spread([s[number] for s in steps]):>25}"
        )


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    main()
