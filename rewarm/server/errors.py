"""The errors that clients are told. Each dialect writes them in a form of its own."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from rewarm import errors

CLIENT_GONE = 499
"""The status of a request whose client went away, in the log and the metrics."""
SHOWN = 80
"""Characters of a client's own value that an error repeats."""


@dataclass
class ApiError(Exception):
    """An error that a client is told. Its message says what was wrong and what to do."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param)


def as_api_error(error: Exception) -> ApiError:
    """Give the part of an exception that a client may know."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return _invalid_body(error)
    if isinstance(error, errors.QueueFull):
        wait = {"Retry-After": str(max(1, int(error.retry_after)))}
        return ApiError(429, str(error), code="rate_limit_exceeded", headers=wait)
    if isinstance(error, errors.NotReady):
        return ApiError(503, str(error), code="not_ready", headers={"Retry-After": "5"})
    if isinstance(error, errors.CacheClosed):
        return ApiError(503, "the server is stopping", code="not_ready")
    if isinstance(error, errors.ContextExceeded):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, (errors.InvalidPrompt, errors.InvalidOption)):
        return ApiError(400, str(error), getattr(error, "param", None))
    if isinstance(error, ClientDisconnect):
        return ApiError(CLIENT_GONE, "the client went away while it was sending")
    return ApiError(500, "the server failed on this request; its log has the reason")


def _invalid_body(error: ValidationError) -> ApiError:
    """Give the deepest error. Where a union was wrong, its branch is the one that fitted best."""
    first = max(error.errors(include_url=False), key=lambda e: len(e["loc"]))
    where = ".".join(str(part) for part in first["loc"] if not _is_branch(part))
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not JSON in UTF-8: {first['ctx']['error']}")
    message = first["msg"].removeprefix("Value error, ")
    if not where:
        return bad_request(message)
    said = first["type"] in ("missing", "value_error")
    if not said and not isinstance(first["input"], (dict, list)):
        message += f", not {_shown(first['input'])}"
    return bad_request(f"{where}: {message[:1].lower()}{message[1:]}", where)


def _is_branch(part: int | str) -> bool:
    """Say whether a part of pydantic's location names the branch of a union, not a field."""
    plain = ("str", "int", "float", "bool", "none", "dict")
    return isinstance(part, str) and (part in plain or bool(re.search(r"[A-Z\[(-]", part)))


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."
