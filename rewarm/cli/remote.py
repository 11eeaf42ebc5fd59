"""A running server, as seen from the command line."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

from rewarm.errors import InvalidOption, NotReady

PATIENCE = 30.0
"""Seconds that a busy server has to answer."""


@dataclass(frozen=True)
class Remote:
    url: str
    api_key: str | None = None
    salt: str | None = None

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise InvalidOption(f"--url {self.url!r}: give one such as http://127.0.0.1:8080")

    def get(self, path: str) -> dict[str, Any]:
        return self._ask(urllib.request.Request(self._address(path), headers=self._headers()))

    def post(self, path: str, body: Any) -> dict[str, Any]:
        data = json.dumps(body).encode()
        headers = {**self._headers(), "Content-Type": "application/json"}
        return self._ask(urllib.request.Request(self._address(path), data, headers))

    def _address(self, path: str) -> str:
        return self.url.rstrip("/") + path

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        if self.salt:
            headers["X-Cache-Salt"] = urllib.parse.quote(self.salt, safe="")
        return headers

    def _ask(self, request: urllib.request.Request) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                body = answer.read()
        except urllib.error.HTTPError as error:
            raise self._refused(error) from error
        except (TimeoutError, urllib.error.URLError, ConnectionError) as error:
            why = getattr(error, "reason", error)
            raise NotReady(
                f"no server answers at {self.url} ({why}): start one with `rewarm serve`, or name "
                "another with --url"
            ) from error
        try:
            found = json.loads(body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise InvalidOption(f"what answers at {self.url} is no Rewarm server: see --url")
        return found

    def _refused(self, error: urllib.error.HTTPError) -> Exception:
        try:
            message = json.loads(error.read())["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = ""
        if error.code == 401:
            return InvalidOption(f"{message or 'an API key is needed'} (--api-key, REWARM_API_KEY)")
        if error.code in (404, 405) and not message:
            return InvalidOption(f"what answers at {self.url} is no Rewarm server: see --url")
        if error.code == 503:
            return NotReady(message or "the server is not ready")
        return InvalidOption(message or f"the server answered {error.code}")
