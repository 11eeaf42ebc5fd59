"""Takes a hit apart: look-up, restore, the new tokens, storing them, the first step; and what a
pass costs by its tokens. With random weights.

.venv/bin/python tools/bench_hit.py [--model qwen3.5-0.6b] [--length 100000] [--kernels DIR]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rewarm  # noqa: F401  (loads the BLAS, before mlx)

# isort: split
import mlx.core as mx
import numpy as np

from rewarm import accel
from rewarm.bench.archs import build, vocabulary
from rewarm.bench.models import dtype
from rewarm.bench.prefix import TAIL, Waiting
from rewarm.cache import PrefixCache
from rewarm.cache.payload import detached
from rewarm.engine import Request, runner
from rewarm.engine.runner import Runner, Sequence

PASSES = (1, 2, 16, 64, 256, 2048)
SHOWN = 20
"""Kernels that are named."""


def timed(do: Callable[[], Any]) -> tuple[float, Any]:
    mx.synchronize()
    began = time.perf_counter()
    result = do()
    mx.synchronize()
    return (time.perf_counter() - began) * 1e3, result


class Hit:
    """Prompts of one length, each asked cold and then with other ends."""

    def __init__(self, name: str, length: int) -> None:
        self.length, self.vocabulary = length, vocabulary(name)
        model = build(name, dtype())
        mx.eval(model.parameters())
        self.cache = PrefixCache(model)
        self.runner = Runner(model, self.cache, self.vocabulary)
        self.draw = np.random.default_rng(0)
        self.stored = 0.0
        commit = self.cache.commit

        def noted(*given: Any, **named: Any) -> None:
            self.stored += timed(lambda: commit(*given, **named))[0]

        self.cache.commit = noted

    def tokens(self, count: int) -> Any:
        return self.draw.integers(0, self.vocabulary, count, dtype=np.int32)

    def ask(self, prompt: Any) -> dict[str, float]:
        """Milliseconds, part by part: each is waited for, which a request does not do."""
        run, self.stored = self.runner, 0.0
        sequence = Sequence(1, prompt, Request(prompt, Waiting(), max_tokens=2), max_tokens=2)
        parts = {"look up, restore": timed(lambda: run.start(sequence))[0]}
        passes = 0.0
        while True:
            took, over = timed(lambda: run.prefill(sequence))
            passes += took
            if over:
                break
        parts |= {"the new tokens": passes - self.stored, "storing them": self.stored}
        parts["the first step"] = timed(lambda: run.open(sequence))[0]
        self.restored = sequence.restored_bytes
        run.leave([sequence], keep=False)
        return parts

    def restored_caches(self, prompt: Any) -> list[Any]:
        lease = self.cache.acquire(prompt, headroom=1)
        caches = lease.caches
        lease.release()
        mx.eval([c.state for c in caches])
        return caches


def say(what: str, parts: dict[str, float]) -> None:
    shown = ", ".join(f"{name} {ms:.1f}" for name, ms in parts.items())
    print(f"{what}: {sum(parts.values()):.1f} ms = {shown}", flush=True)


def middle(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}


def hits(hit: Hit, label: str, rounds: int, kernels: Path | None = None) -> Any:
    prompt = hit.tokens(hit.length)
    say(f"{label}, cold", hit.ask(prompt))
    ends = [np.concatenate([prompt, hit.tokens(TAIL)]) for _ in range(rounds + 2)]
    say(f"{label}, first hit", hit.ask(ends[0]))
    say(f"{label}, median of {rounds}", middle([hit.ask(end) for end in ends[1 : rounds + 1]]))
    other = np.concatenate([prompt, hit.tokens(TAIL + 5)])
    say(f"{label}, five tokens more", hit.ask(other))
    if kernels is not None:
        say(f"{label}, traced", traced(lambda: hit.ask(ends[-1]), kernels))
    return prompt


def one_copy(hit: Hit) -> None:
    """Of as many bytes as a restore makes."""
    array = mx.ones(max(hit.restored // 8, 1), mx.int64)
    mx.eval(array)
    took = []
    for _ in range(5):
        mx.clear_cache()
        took.append(timed(lambda: mx.eval(detached([array], 0)))[0])
    again = [timed(lambda: mx.eval(detached([array], 0)))[0] for _ in range(5)]
    print(
        f"one copy of {hit.restored / 1e6:.0f} MB: {min(took):.1f} ms into fresh memory, "
        f"{min(again):.1f} into memory at hand"
    )


def passes(hit: Hit, prompt: Any) -> None:
    """What the model takes for so many tokens after a hit; as in a prefill, without logits."""
    model = hit.runner.model
    for count in PASSES:
        took = []
        for _ in range(4):
            caches = hit.restored_caches(np.concatenate([prompt, hit.tokens(count)]))
            chunk = mx.array(hit.tokens(count))[None]

            def run(chunk: Any = chunk, caches: list[Any] = caches) -> None:
                model(chunk, cache=caches)
                mx.eval([c.state for c in caches])

            took.append(timed(run)[0])
            del caches
        print(f"a pass of {count} tokens: {' '.join(f'{ms:.1f}' for ms in took)} ms", flush=True)


def traced(do: Callable[[], Any], folder: Path) -> Any:
    """Every kernel, by PyTorch's profiler: it sees what other libraries launch, too."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        result = do()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    ran = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not ran:
        print("no kernel was seen")
        return result
    span = max(e["ts"] + e["dur"] for e in ran) - min(e["ts"] for e in ran)
    busy = sum(e["dur"] for e in ran)
    print(f"{len(ran)} kernels ran for {busy / 1e3:.1f} of {span / 1e3:.1f} ms:")
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in ran:
        by_name[event["name"][:100]].append(event["dur"] / 1e3)
    for name, each in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:SHOWN]:
        print(f"  {sum(each):8.2f} ms in {len(each):5}: {name}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="qwen3.5-0.6b", help="an architecture of `random:`")
    parser.add_argument("--length", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="then again, keeping freed buffers")
    parser.add_argument("--passes", action="store_true", help="passes by their tokens, too")
    parser.add_argument("--kernels", type=Path, help="trace into that folder (needs PyTorch)")
    options = parser.parse_args()
    if options.kernels:
        import torch

        torch.zeros(1, device="cuda")  # before MLX: it must see the GPU first
    accel.install()
    hit = Hit(options.model, options.length)
    prompt = hits(hit, options.model, options.rounds, options.kernels)
    one_copy(hit)
    if options.passes:
        passes(hit, prompt)
    if options.keep:
        runner.CLEAR_AFTER = 1 << 60
        hits(hit, "keeping buffers", options.rounds)
    print(f"peak {mx.get_peak_memory() / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
