"""Every option, with its default in one place for the command line, `Session` and the server."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rewarm.errors import InvalidOption

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
SMALLEST = 10**6
"""Bytes of the smallest cache."""

AUTO = "auto"
DISK_SIZE = "20GB"

LEAST_CHUNK = 16
"""Tokens of the shortest chunk."""

TAKEN_BY_RENDERING = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final",
        "continue_final_message",
        "conversation",
        "every_turn",
        "marked",
        "marks",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Arguments of `apply_chat_template`, above all the template itself, and of `ChatRenderer`."""

RESERVED_FOR_RENDERING = TAKEN_BY_RENDERING | {"conversations", "documents"}
"""Template options that no client and no server option can set."""


@dataclass(frozen=True)
class CacheOptions:
    memory: int | str = AUTO
    """The tree's limit in bytes, or as "2GB"; "auto" takes a share of what is free."""
    disk: str | None = None
    """A folder that outlives the process."""
    disk_size: int | str = DISK_SIZE
    """The limit of that folder."""
    reuse: Literal["fast", "exact"] = "fast"
    chunk: int | None = None
    """Prompt tokens computed at a time; None takes what suits the device."""
    kv_bits: int | None = None
    """Quantise the K/V of full attention to so many bits."""
    kv_group_size: int = 64

    def __post_init__(self) -> None:
        if self.reuse not in ("fast", "exact"):
            raise InvalidOption(f'reuse={self.reuse!r} is unknown: give "fast" or "exact"')
        if self.chunk is not None and self.chunk < LEAST_CHUNK:
            raise InvalidOption(
                f"chunk={self.chunk!r} is too short: give {LEAST_CHUNK} or more tokens"
            )
        check_kv(self.kv_bits, self.kv_group_size)
        parse_size(self.disk_size, "disk_size")
        if self.memory != "auto":
            parse_size(self.memory)


@dataclass(frozen=True)
class EngineOptions:
    max_batch: int = 32
    max_queue: int = 256
    context: int | None = None
    """Lowers the model's own limit."""
    room: int | None = None
    """Bytes that running requests may take together; a share of what is free where not given."""
    rehearse: bool = True
    """Whether MLX compiles what requests need before the engine is ready, or during the first."""

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_queue", "context", "room"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidOption(f"{name}={value!r}: give 1 or more")


@dataclass(frozen=True)
class ServerOptions:
    model_name: str = "rewarm"
    """The name in replies and in `/v1/models`; any name that a client asks for is served."""
    api_key: str | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    allow_public: bool = False
    """Bind to a public address without an API key all the same."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """For the chat template, where a request does not say otherwise."""
    keep_billing_header: bool = False
    """Keep a coding agent's billing header, which changes at every request, in the prompt."""
    warm_ahead: bool = True
    max_body: int = 32 << 20
    """Bytes of a request's body."""
    max_answer: int = 8192
    """Tokens of an answer where the request sets no limit."""
    keep_alive: float = 5.0
    """Seconds without an event after which a stream sends a sign of life."""
    grace: float = 5.0
    """Seconds that answers in flight have to finish when the server is told to stop."""

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise InvalidOption("the API key is empty: give one, or leave it out")
        taken = sorted(RESERVED_FOR_RENDERING.intersection(self.template_options))
        if taken:
            raise InvalidOption(
                f"the template option {taken[0]!r} is set by the server and cannot be given"
            )

    def check_bind(self) -> None:
        """Raises where anybody on the network could use the server."""
        if self.api_key is None and not self.allow_public and not _is_loopback(self.host):
            raise InvalidOption(
                f"host={self.host!r} can be reached from other machines: set an API key, or allow "
                "a public server without one explicitly"
            )


def parse_size(size: int | str, option: str = "memory") -> int:
    """Bytes from a number, or from a text such as "512MB", "1.5 GB" or "2GiB"."""
    hint = f'give {option} as a size from 1MB up, such as "2GB" or a number of bytes'
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise InvalidOption(f"{option}={size!r} is not a size: {hint}")
    if isinstance(size, int):
        n = size
    else:
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", size, re.IGNORECASE)
        if not found:
            raise InvalidOption(f"{option}={size!r} is not a size: {hint}")
        number, unit, binary = found.groups()
        scale = UNITS[unit.upper()]
        if binary:
            scale = 1024 ** list(UNITS).index(unit.upper())
        n = int(float(number) * scale)
    if n < SMALLEST:
        raise InvalidOption(f"{option}={size!r} is too small to hold a prompt: {hint}")
    return n


def check_kv(kv_bits: int | None, kv_group_size: int) -> None:
    if kv_bits is not None and kv_bits not in (2, 3, 4, 5, 6, 8):
        raise InvalidOption(f"kv_bits={kv_bits!r}: MLX quantises to 2, 3, 4, 5, 6 or 8 bits")
    if kv_bits is not None and kv_group_size not in (32, 64, 128):
        raise InvalidOption(f"kv_group_size={kv_group_size!r}: MLX has groups of 32, 64 or 128")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
