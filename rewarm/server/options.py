"""What the server is told at its start."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rewarm.errors import InvalidOption

from .fields import RESERVED_FOR_RENDERING


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


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
