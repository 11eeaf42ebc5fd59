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
                found = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from error
        except (TimeoutError, urllib.error.URLError, ConnectionError) as error:
            why = getattr(error, "reason", error)
            raise NotReady(
                f"no server answers at {self.url} ({why}): start one with `rewarm serve`, or name "
                "another with --url"
            ) from error
        except ValueError as error:
            raise self._not_rewarm() from error
        if not isinstance(found, dict):
            raise self._not_rewarm()
        return found

    def _not_rewarm(self, why: str = "") -> InvalidOption:
        return InvalidOption(f"what answers at {self.url} is no Rewarm server{why}: see --url")

    def _refusal(self, error: urllib.error.HTTPError) -> Exception:
        try:
            message = json.loads(error.read())["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = ""
        if error.code == 503:
            return NotReady(message or "the server is not ready")
        if not message:
            return self._not_rewarm(f" (status {error.code})")
        hint = " (--api-key, REWARM_API_KEY)" if error.code == 401 else ""
        return InvalidOption(message + hint)
