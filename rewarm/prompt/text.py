"""Lengths up to which texts and token sequences agree."""

from __future__ import annotations

import numpy as np

from rewarm.values import Tokens

BLOCK = 4096


def common_text(a: str, b: str) -> int:
    """The characters that two texts begin with alike."""
    most = min(len(a), len(b))
    start = 0
    while start < most and a[start : start + BLOCK] == b[start : start + BLOCK]:
        start += BLOCK
    if start >= most:
        return most
    low, high = start, min(start + BLOCK, most)
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_end(a: str, b: str) -> int:
    """The characters that two texts end with alike."""
    most = min(len(a), len(b))
    done = 0
    while done < most:
        size = min(BLOCK, most - done)
        x, y = (text[len(text) - done - size : len(text) - done] for text in (a, b))
        if x != y:
            return done + common_text(x[::-1], y[::-1])
        done += size
    return most


def common_tokens(a: Tokens, b: Tokens) -> int:
    most = min(len(a), len(b))
    same = a[:most] == b[:most]
    return most if same.all() else int(np.argmin(same))
