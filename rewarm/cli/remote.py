"""A running server, as seen from the command line."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from rewarm.errors import InvalidOption, NotReady
from rewarm.options import ServerOptions

Url = Annotated[str, typer.Option(envvar="REWARM_URL", help="Where the server is.")]
ApiKey = Annotated[
    str | None, typer.Option(envvar="REWARM_API_KEY", help="Where the server asks for one.")
]
HERE = f"http://{ServerOptions.host}:{ServerOptions.port}"

PATIENCE = 30.0
"""Seconds that a busy server has to answer."""


@dataclass(frozen=True)
class Remote:
    url: str
    api_key: str | None = None
    salt: str | None = None

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise InvalidOption(f"--url {self.url!r}: give one such as {HERE}")

    def ask(self, path: str, body: Any = None) -> dict[str, Any]:
        """Get a path of the server, or post a body to it. The answer is a JSON object."""
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        if self.salt:
            headers["X-Cache-Salt"] = urllib.parse.quote(self.salt, safe="")
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.url.rstrip("/") + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                status, text = 200, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        except OSError as error:
            why = getattr(error, "reason", error)
            raise NotReady(
                f"no server answers at {self.url} ({why}): start one with `rewarm serve`, or name "
                "another with --url"
            ) from error
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        match status, found:
            case 200, dict():
                return found
            case 503, {"error": {"message": str(message)}}:
                raise NotReady(message)
            case 503, _:
                raise NotReady("the server is not ready")
            case 401, {"error": {"message": str(message)}}:
                raise InvalidOption(f"{message} (--api-key, REWARM_API_KEY)")
            case _, {"error": {"message": str(message)}}:
                raise InvalidOption(message)
        why = "" if status == 200 else f" (status {status})"
        raise InvalidOption(f"what answers at {self.url} is no Rewarm server{why}: see --url")
