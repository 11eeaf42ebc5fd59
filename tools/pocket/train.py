"""Train Pocket on one GPU.

    python -m tools.pocket.train --steps 16000 --out DIR

It writes `model.safetensors` (rounded to bfloat16, in mlx-lm's layout), `config.json`, `log.jsonl`,
and `logits.npz`, the logits that the exported model must reproduce."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from . import delta
from .conversations import conversation
from .data import MIX, Example, Reader, examples
from .draw import Draw

CONFIG: dict[str, Any] = {
    "vocab_size": 1536,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 16384,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
    },
}
# The share of the training that is done, and the lengths from then on with their odds.
CURRICULUM: tuple[tuple[float, dict[int, float]], ...] = (
    (0.0, {256: 1}),
    (0.08, {256: 2, 512: 3}),
    (0.2, {256: 1, 512: 2, 1024: 3}),
    (0.4, {256: 1, 512: 2, 1024: 4, 2048: 3}),
    (0.6, {256: 1, 512: 2, 1024: 4, 2048: 2, 4096: 2, 8704: 1}),
    (0.8, {256: 1, 512: 2, 1024: 3, 2048: 2, 4096: 2, 8704: 3}),
)
SKILLS = ("lookup", "memory", "arithmetic", "tools", "unknown", "talk")


def length_at(step: int, done: float, longest: int) -> int:
    """Return the length of this step's examples: the same for every worker and every run."""
    stage = [odds for begins, odds in CURRICULUM if begins <= done][-1]
    return min(longest, Random(step).choices(list(stage), list(stage.values()))[0])


class Batches(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, options: argparse.Namespace) -> None:
        self.seed, self.steps, self.tokens = options.seed, options.steps, options.tokens
        self.begin, self.longest = options.begin, options.longest
        self.mix = MIX | {"tools": options.tools}

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        sources: dict[int, Iterator[Example]] = {}
        for step in range(worker, self.steps, workers):
            done = self.begin + (1 - self.begin) * step / self.steps
            length = length_at(step, done, self.longest)
            if length not in sources:
                sources[length] = examples(
                    self.seed * 1_000_003 + worker * 101 + length,
                    length,
                    length // 2 if length > 256 else 64,
                    self.mix,
                )
            yield stack([next(sources[length]) for _ in range(max(1, self.tokens // length))])


def stack(found: list[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = -(-max(len(example.tokens) for example in found) // 64) * 64
    tokens = torch.zeros(len(found), longest, dtype=torch.long)
    weights = torch.zeros(len(found), longest)
    for row, example in enumerate(found):
        tokens[row, : len(example.tokens)] = torch.from_numpy(example.tokens)
        weights[row, : len(example.tokens)] = torch.from_numpy(example.weights)
    return tokens, weights


def losses(model: Any, tokens: torch.Tensor, weights: torch.Tensor) -> tuple[Any, Any, Any]:
    """Compute each weighted token's loss, its weight, and whether it is the likeliest token."""
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
    counts = weights[:, 1:] > 0
    logits = model.lm_head(hidden[counts]).float()
    targets = tokens[:, 1:][counts]
    return (
        F.cross_entropy(logits, targets, reduction="none"),
        weights[:, 1:][counts],
        logits.argmax(-1) == targets,
    )


def autocast(device: str) -> contextlib.AbstractContextManager[None]:
    if device == "cpu":
        return contextlib.nullcontext()
    return torch.autocast("cuda", dtype=torch.bfloat16)


@cache
def questions(skill: str, length: int, count: int) -> list[Example]:
    """Make held-out questions at the end of conversations of just under this many tokens."""
    reader, draw, found = Reader(), Draw(Random(length), held_out=True), []
    while len(found) < count:
        wanted = length
        while True:
            wanted = wanted * 9 // 10
            example = reader.read(conversation(draw, skill, wanted, far=True), skill, thinks=True)
            if len(example.tokens) <= length:
                found.append(example)
                break
            if wanted < length // 3:
                break
    return found


@torch.no_grad()
def accuracy(model: Any, device: str, length: int, count: int) -> dict[str, float]:
    """Compute the share of held-out questions whose tokens are all right in greedy decoding."""
    result = {}
    model.eval()
    for skill in SKILLS:
        found = questions(skill, length, count)
        right = 0
        size = max(1, min(count, 65536 // length))
        for at in range(0, count, size):
            tokens, weights = (part.to(device) for part in stack(found[at : at + size]))
            last = weights == 1.0
            with autocast(device):
                _, _, hit = losses(model, tokens, weights * last)
            rows = last[:, 1:].nonzero()[:, 0]
            wrong = torch.zeros(len(tokens), device=device).index_add_(0, rows, (~hit).float())
            right += int((wrong == 0).sum())
        result[skill] = right / count
    model.train()
    return result


def rounded(model: Any) -> dict[str, torch.Tensor]:
    """Round the model to bfloat16 and return its weights in mlx-lm's layout."""
    shipped = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # The norms of transformers store the distance from 1, those of mlx-lm the factor.
            offset = 1.0 if "norm" in name and "linear_attn.norm" not in name else 0.0
            value = (weight.float() + offset).to(torch.bfloat16)
            weight.copy_(value.float() - offset)
            if "conv1d" in name:
                value = value.movedim(2, 1)
            shipped["language_model." + name] = value.contiguous().cpu()
    shipped.pop("language_model.lm_head.weight", None)
    return shipped


def started(path: Path, device: str) -> dict[str, torch.Tensor]:
    """Load the weights to continue from: a saved training state, or a shipped model."""
    if path.suffix != ".safetensors":
        found: dict[str, torch.Tensor] = torch.load(path, map_location=device)
        return found
    found = {}
    for shipped, value in load_file(path).items():
        name = shipped.removeprefix("language_model.")
        offset = 1.0 if "norm" in name and "linear_attn.norm" not in name else 0.0
        found[name] = (value.movedim(1, 2) if "conv1d" in name else value).float() - offset
    found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found


def export(model: Any, out: Path, device: str) -> None:
    torch.set_float32_matmul_precision("highest")
    shipped = rounded(model)
    save_file(shipped, out / "model.safetensors", metadata={"format": "mlx"})
    text = {"model_type": "qwen3_5_text", **CONFIG}
    settings = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True}
    (out / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    reader = Reader()
    world = conversation(Draw(Random(0), held_out=True), "lookup", 600)
    tokens = stack([reader.read(world, "lookup", True)])[0].to(device)
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits[0]
    np.savez(
        out / "logits.npz", tokens=tokens[0].cpu().numpy(), logits=logits.float().cpu().numpy()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=16000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="end by then, cooled down")
    parser.add_argument("--tokens", type=int, default=49152, help="in a batch")
    parser.add_argument("--rate", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--every", type=int, default=1000, help="steps between evaluations")
    parser.add_argument("--questions", type=int, default=64, help="a skill in an evaluation")
    parser.add_argument("--start", type=Path, help="a state.pt or model.safetensors to go on from")
    parser.add_argument("--begin", type=float, default=0.0, help="share of the curriculum to skip")
    parser.add_argument("--longest", type=int, default=8704, help="of the lengths drawn")
    parser.add_argument("--tools", type=float, default=MIX["tools"], help="weight of that skill")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    delta.install()
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**CONFIG)).to(device).train()
    if options.start:
        model.load_state_dict(started(options.start, device))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        lr=options.rate,
        betas=(0.9, 0.95),
        fused=device == "cuda",
    )
    batches = DataLoader(
        Batches(options),
        batch_size=None,
        num_workers=options.workers,
        prefetch_factor=8 if options.workers else None,
        pin_memory=device == "cuda",
    )
    log = (options.out / "log.jsonl").open("a")
    began = waited = time.perf_counter()
    waiting = seen = 0.0
    for step, (tokens, weights) in enumerate(batches):
        waiting += time.perf_counter() - waited
        done = max(step / options.steps, (time.perf_counter() - began) / options.seconds)
        warm_up = min(1.0, (step + 1) / (0.03 * options.steps))
        cooled = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        for group in optimizer.param_groups:
            group["lr"] = options.rate * warm_up * cooled
        with autocast(device):
            loss, weight, _ = losses(
                model, tokens.to(device, non_blocking=True), weights.to(device, non_blocking=True)
            )
            mean = (loss * weight).sum() / weight.sum()
        optimizer.zero_grad(set_to_none=True)
        mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen += tokens.numel()
        last = step + 1 == options.steps or done >= 1.0
        if step % 100 == 0 or last:
            line: dict[str, Any] = {
                "step": step,
                "length": tokens.shape[1],
                "loss": round(mean.item(), 4),
                "seconds": round(time.perf_counter() - began, 1),
                "waiting": round(waiting, 1),
                "tokens": int(seen),
            }
            if (step % options.every == 0 and step) or last:
                line["accuracy"] = accuracy(model, device, 1024, options.questions)
            print(json.dumps(line), flush=True)
            log.write(json.dumps(line) + "\n")
            log.flush()
            if math.isnan(line["loss"]):
                raise SystemExit("the loss is not a number")
        if (step % options.every == 0 and step) or last:
            torch.save(model.state_dict(), options.out / "state.pt")
        if last:
            break
        waited = time.perf_counter()
    export(model, options.out, device)
    model.float()
    for length in (256, 512, 1024, 2048, 4096, 8192):
        count = options.questions // (4 if length > 2048 else 1)
        found = {"length": length, "accuracy": accuracy(model, device, length, count)}
        print(json.dumps(found), flush=True)
        log.write(json.dumps(found) + "\n")
        log.flush()


if __name__ == "__main__":
    main()
