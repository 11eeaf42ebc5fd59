"""Generate traces of coding agents at work: times, lengths and hashes of blocks, no words.

The distributions are those of recorded sessions. A session begins with its tools and rules
(13,000 to 15,000 tokens) and often with files (up to 100,000 more), and makes 6 to 90 requests. A
request adds some hundred tokens, now and then some thousand. The next one comes some ten seconds
after a call of a tool, and minutes after an answer that a person reads. Now and then a session is
compacted to a summary, or goes back to an earlier point.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

BLOCK = 64

Session = dict[str, Any]


def _around(draw: random.Random, median: float, spread: float) -> float:
    """Draw from a log-normal distribution: a third are off by a factor of more than e^spread."""
    return median * math.exp(draw.gauss(0, spread))


def session(number: int, seed: int = 0) -> Session:
    draw = random.Random(f"session {seed} {number}")
    tools, rules = draw.randint(10_000, 12_500), draw.randint(2_100, 2_800)
    system = (tools + rules) // BLOCK
    ids = iter(range(10**6))
    blocks = [next(ids) for _ in range(system)]
    length = tools + rules + int(draw.choice((5_000, 50_000, 80_000, 95_000, 100_000)))
    now, requests = 0.0, []
    for _ in range(min(90, int(_around(draw, 24, 0.7)) + 5)):
        blocks += [next(ids) for _ in range(length // BLOCK - len(blocks))]
        out = int(_around(draw, 230, 0.8)) + 50
        ends = draw.random() < 0.07
        requests.append(
            {
                "t": round(now, 2),
                "in": length,
                "out": out,
                "hash_ids": list(blocks),
                "stop": "end_turn" if ends else "tool_use",
            }
        )
        now += _around(draw, 360, 1.4) if ends else 6 + _around(draw, 9, 1.1)
        length += out + int(_around(draw, 450, 1.2))
        turned = draw.random()
        if length > 145_000 or turned < 0.01:  # only the rules and a summary are left
            blocks, length = blocks[:system], tools + rules + draw.randint(2_000, 45_000)
        elif turned < 0.016:  # an earlier question is asked again in other words
            length = int(length * draw.uniform(0.5, 1.0))
            blocks = blocks[: length // BLOCK]
            length += 300
    return {
        "id": f"generated {seed} {number}",
        "block_size": BLOCK,
        "tool_tokens": tools,
        "system_tokens": rules,
        "requests": requests,
    }


def write(folder: Path, count: int, seed: int = 0) -> list[Path]:
    """Write so many sessions as files that `rewarm bench trace` reads."""
    files = [folder / f"session_{seed}_{number:03}.json" for number in range(count)]
    for number, file in enumerate(files):
        file.write_text(json.dumps(session(number, seed)))
    return files
