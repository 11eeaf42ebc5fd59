"""Every option of Rewarm, with its default and its help text.

The command line, `Session` and the server read them from here. Nothing here imports MLX.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from rewarm.errors import InvalidOption

UNITS = ("", "K", "M", "G", "T")
"""Prefixes of a size, each a thousand times the one before it, or 1,024 times with an `i`."""
SMALLEST = 10**6
"""The smallest cache, in bytes."""

AUTO = "auto"

LEAST_CHUNK = 16
"""The shortest chunk, in tokens."""

TAKEN_BY_RENDERING = frozenset(
    (
        # What is rendered.
        *("self", "messages", "conversation", "tools", "chat_template", "add_generation_prompt"),
        *("continue_final", "continue_final_message", "every_turn", "marked", "marks"),
        # How it becomes tokens.
        *("tokenize", "tokenizer_kwargs", "sanitize_control_tokens"),
        *("padding", "truncation", "max_length"),
        # What is returned.
        *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
    )
)
"""Arguments of `apply_chat_template`, above all the template itself, and of `ChatRenderer`."""

RESERVED_FOR_RENDERING = TAKEN_BY_RENDERING | {"conversations", "documents"}
"""Options of the chat template that neither a client nor a server option can set."""


T = TypeVar("T")


def option(default: T, help: str, *, env: str | None = None) -> T:
    """Make a field that the command line offers under the same name.

    `env` names an environment variable that is read where the option is not given."""
    about = {"help": help, "env": env}
    if isinstance(default, dict):
        return cast(T, field(default_factory=default.copy, metadata=about))
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class CacheOptions:
    memory: int | str = option(AUTO, "For the cache: auto, or a size such as 4GB.")
    disk: str | None = option(None, "A folder that outlives the process.")
    disk_size: int | str = option("20GB", "Limit of that folder.")
    reuse: Literal["fast", "exact"] = option(
        "fast", "fast, or exact: a hit gives the very bits of a cold run."
    )
    chunk: int | None = option(None, "Prompt tokens computed at a time (512; 2048 on a GPU).")
    kv_bits: int | None = option(
        None, "Quantise the K/V of full attention to so many bits, from the first token on."
    )
    kv_group_size: int = option(64, "Group size of --kv-bits.")

    def __post_init__(self) -> None:
        if self.reuse not in ("fast", "exact"):
            raise InvalidOption(f'reuse={self.reuse!r} is unknown: give "fast" or "exact"')
        if self.chunk is not None and self.chunk < LEAST_CHUNK:
            raise InvalidOption(
                f"chunk={self.chunk!r} is too short: give {LEAST_CHUNK} or more tokens"
            )
        check_kv(self.kv_bits, self.kv_group_size)
        parse_size(self.disk_size, "disk_size")
        if self.memory != AUTO:
            parse_size(self.memory)


@dataclass(frozen=True)
class ModelOptions:
    adapter_path: str | None = option(None, "A folder with a LoRA adapter.")
    trust_remote_code: bool = option(False, "Let a model's tokenizer run its own code.")


@dataclass(frozen=True)
class EngineOptions:
    max_batch: int = option(32, "Answers generated at once.")
    max_queue: int = option(256, "Requests that may wait.")
    context: int | None = option(None, "Lower the model's context to so many tokens.")
    running_memory: int | None = None
    """Bytes that running requests may take together; by default a share of the free memory."""
    rehearse: bool = True
    """Compile what requests need before the engine is ready, and not during the first request."""

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_queue", "context", "running_memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidOption(f"{name}={value!r}: give 1 or more")


@dataclass(frozen=True)
class ServerOptions:
    model_name: str = "rewarm"
    """The name in replies and in `/v1/models`; any name that a client asks for is served."""
    api_key: str | None = option(
        None, "Asked of every client. Needed on a public host.", env="REWARM_API_KEY"
    )
    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8080, "0 picks a free one.")
    allow_public: bool = option(False, "Listen on a public host without a key.")
    chat_template_args: Mapping[str, Any] = option(
        {}, "For the chat template, such as '{\"enable_thinking\": false}'."
    )
    """Options of the chat template, unless the request sets others."""
    keep_billing_header: bool = option(
        False, "Leave a coding agent's billing header, new in every request, in the prompt."
    )
    warm_ahead: bool = option(True, "Prepare the next turn while nothing else is to do.")
    max_body: int = 32 << 20
    """The largest body of a request, in bytes."""
    max_answer: int = 8192
    """The longest answer in tokens, unless the request sets another limit."""
    keep_alive: float = 5.0
    """Seconds without an event after which a stream sends a sign of life."""
    grace: float = 5.0
    """Seconds that answers in flight have to finish when the server is told to stop."""

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise InvalidOption("the API key is empty: give one, or leave it out")
        if not 0 <= self.port < 1 << 16:
            raise InvalidOption(f"port={self.port}: give a number up to 65535, or 0 for a free one")
        taken = sorted(RESERVED_FOR_RENDERING.intersection(self.chat_template_args))
        if taken:
            raise InvalidOption(
                f"the template option {taken[0]!r} is set by the server and cannot be given"
            )

    def check_bind(self) -> None:
        """Raise `InvalidOption` if anybody on the network could use the server."""
        if self.api_key is None and not self.allow_public and not _is_loopback(self.host):
            raise InvalidOption(
                f"host={self.host!r} can be reached from other machines: set an API key, or allow "
                "a public server without one explicitly"
            )


def parse_size(size: int | str, name: str = "memory") -> int:
    """Give the bytes of a number, or of a text such as "512MB", "1.5 GB" or "2GiB"."""
    hint = f'give {name} as a size from 1MB up, such as "2GB" or a number of bytes'
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", str(size), re.IGNORECASE)
    if not isinstance(size, (int, str)) or found is None:
        raise InvalidOption(f"{name}={size!r} is not a size: {hint}")
    number, unit, binary = found.groups()
    scale = (1024 if binary else 1000) ** UNITS.index(unit.upper())
    nbytes = size if isinstance(size, int) else int(float(number) * scale)
    if nbytes < SMALLEST:
        raise InvalidOption(f"{name}={size!r} is too small to hold a prompt: {hint}")
    return nbytes


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
