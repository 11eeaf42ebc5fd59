"""Rewarm's server and mlx-lm's on one model, in turns: decode rate at 1 and 8, cold TTFT.

    .venv/bin/python tools/bench_server.py --rounds 5

Both run with the BLAS that Rewarm loads. The model is a random Qwen3 of 35M parameters that writes
letters only, so that every token is text at once.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

import rewarm  # noqa: F401  (loads the BLAS)

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from transformers import AutoTokenizer, PreTrainedConfig

from rewarm import pocket

ANSWER = 128
PEER = "import rewarm, sys; from mlx_lm.server import main; sys.argv[0] = 'server'; main()"
COMMANDS = {
    "rewarm": ["-m", "rewarm", "serve", "{model}", "--port", "{port}", "--no-warm-ahead"],
    "mlx-lm": ["-c", PEER, "--model", "{model}", "--port", "{port}", "--log-level", "ERROR"],
}
LETTERS = [chr(c) for c in range(ord("a"), ord("z") + 1)]


class Measured(NamedTuple):
    one: float
    """Tokens a second in one stream."""
    eight: float
    """Tokens a second in eight streams together."""
    ttft: float
    """Seconds to the first token of a new prompt of 2,000 tokens."""


def make_model(folder: Path) -> int:
    tokenizer = AutoTokenizer.from_pretrained(pocket.FOLDER, config=PreTrainedConfig())
    tokenizer.save_pretrained(folder)
    config = {
        "model_type": "qwen3",
        "hidden_size": 576,
        "num_hidden_layers": 10,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "vocab_size": len(tokenizer),
        "rope_theta": 10000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.eos_token_id,
    }
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    letters = mx.array(tokenizer.convert_tokens_to_ids(LETTERS))
    kept = mx.zeros((config["vocab_size"], 1))
    kept[letters] = 1
    model.lm_head.weight = model.lm_head.weight * kept
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return sum(w.size for w in weights.values())


@contextmanager
def running(name: str, model: Path) -> Iterator[httpx.Client]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [w.format(model=model, port=port) for w in COMMANDS[name]]
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
            for _ in range(600):
                time.sleep(0.1)
                try:
                    if client.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    continue
            yield client
    finally:
        process.terminate()
        process.wait()


class Streamed(NamedTuple):
    began: float
    times: list[float]
    """When each token came."""


def stream(client: httpx.Client, prompt: str, tokens: int) -> Streamed:
    body = {
        "model": "default_model",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0.0,
        "stream": True,
    }
    began = time.perf_counter()
    times = []
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            deltas = [c.get("delta", {}) for c in event.get("choices", [])]
            if any(d.get("content") or d.get("reasoning") for d in deltas):
                times.append(time.perf_counter())
    return Streamed(began, times)


def text(length: int) -> str:
    return "".join(random.choices("abcdefghij klmnop", k=length))


def measure(client: httpx.Client) -> Measured:
    one = stream(client, text(40), ANSWER)
    with ThreadPoolExecutor(8) as pool:
        eight = list(pool.map(lambda _: stream(client, text(40), ANSWER), range(8)))
    # While all of them were decoding.
    start, stop = max(s.times[0] for s in eight), min(s.times[-1] for s in eight)
    tokens = sum(start < t <= stop for s in eight for t in s.times)
    cold = stream(client, text(2000), 1)
    return Measured(
        (len(one.times) - 1) / (one.times[-1] - one.times[0]),
        tokens / (stop - start),
        cold.times[0] - cold.began,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        size = make_model(Path(folder))
        print(f"qwen3, {size / 1e6:.0f}M parameters, {rounds} rounds in turns")
        with running("rewarm", Path(folder)) as ours, running("mlx-lm", Path(folder)) as peer:
            measure(ours)
            measure(peer)
            results = []
            for i in range(rounds):
                order = (ours, peer) if i % 2 else (peer, ours)
                measured = {client: measure(client) for client in order}
                results.append((measured[ours], measured[peer]))
    for field, label in enumerate(("tokens/s, one", "tokens/s, eight", "TTFT of 2,000, s")):
        pairs = [(a[field], b[field]) for a, b in results]
        ratios = [b / a if field == 2 else a / b for a, b in pairs]
        mine, theirs = (statistics.median(p[i] for p in pairs) for i in (0, 1))
        print(
            f"{label:18} rewarm {mine:8.2f}   mlx-lm {theirs:8.2f}   "
            f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
