"""The texts of single tokens, for logprobs."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

from mlx_lm.tokenizer_utils import _byte_decoder


class TokenText(NamedTuple):
    text: str
    bytes: list[int] | None
    """None where the tokenizer does not give them."""


class TokenTexts:
    """The texts of tokens, which are remembered."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.of = lru_cache(maxsize=1 << 16)(self._look_up)

    def _look_up(self, token: int) -> TokenText:
        text = str(self._tokenizer.decode([token]))
        if "\ufffd" not in text:
            return TokenText(text, list(text.encode("utf-8", "replace")))
        piece = self._tokenizer.convert_ids_to_tokens(token)
        return TokenText(text, _raw(piece) if isinstance(piece, str) else None)


def _raw(piece: str) -> list[int] | None:
    """Give the bytes of a token that is a part of a character."""
    if found := re.fullmatch("<0x([0-9A-F]{2})>", piece):
        return [int(found[1], 16)]
    decoder = _byte_decoder()
    if all(c in decoder for c in piece):
        return [decoder[c] for c in piece]
    return None
