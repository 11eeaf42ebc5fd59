"""Count how far texts and token sequences agree."""

from __future__ import annotations

import numpy as np

from rewarm.values import Tokens

BLOCK = 4096


def common_text(a: str, b: str) -> int:
    """Count the characters that two texts have in common at their beginning."""
    most = min(len(a), len(b))
    same, step = 0, BLOCK
    while step:
        end = same + step
        if end <= most and a[same:end] == b[same:end]:
            same = end
        else:
            step //= 2
    return same


def common_end(a: str, b: str) -> int:
    """Count the characters that two texts have in common at their end."""
    most = min(len(a), len(b))
    return common_text(a[len(a) - most :][::-1], b[len(b) - most :][::-1])


def common_tokens(a: Tokens, b: Tokens) -> int:
    """Count the tokens that two sequences have in common at their beginning."""
    most = min(len(a), len(b))
    same = a[:most] == b[:most]
    return most if same.all() else int(np.argmin(same))
