"""Errors as each API's clients expect them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from rewarm.errors import (
    CacheClosed,
    ContextExceeded,
    InvalidOption,
    InvalidPrompt,
    NotReady,
    QueueFull,
)

ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
SHOWN = 80
"""Characters of a client's own value that an error repeats."""


@dataclass
class ApiError(Exception):
    """What is told to a client. The message says what was wrong and what to do."""

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
    """Any exception as what a client may know of it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return _invalid_body(error)
    if isinstance(error, QueueFull):
        wait = {"Retry-After": str(max(1, int(error.retry_after)))}
        return ApiError(429, str(error), code="rate_limit_exceeded", headers=wait)
    if isinstance(error, NotReady):
        return ApiError(503, str(error), code="not_ready", headers={"Retry-After": "5"})
    if isinstance(error, CacheClosed):
        return ApiError(503, "the server is stopping", code="not_ready")
    if isinstance(error, ContextExceeded):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, (InvalidPrompt, InvalidOption)):
        return ApiError(400, str(error))
    return ApiError(500, "the server failed on this request; its log has the reason")


def openai_body(error: ApiError) -> dict[str, Any]:
    if error.status == 429:
        kind = "rate_limit_error"
    else:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.param,
            "code": error.code,
        }
    }


def anthropic_body(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(error.status, "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message},
        "request_id": request_id,
    }


def error_response(error: ApiError, path: str, request_id: str) -> JSONResponse:
    """The path says whose shape the client reads."""
    if path.startswith("/v1/messages"):
        body = anthropic_body(error, request_id)
    else:
        body = openai_body(error)
    return JSONResponse(body, error.status, error.headers)


def http_error(status: int, method: str, path: str, allowed: str | None) -> ApiError:
    """What the router could not place."""
    if status == 404:
        return ApiError(404, f"there is no {method} {path[:SHOWN]} here", code="not_found")
    if status == 405:
        more = f": use {allowed}" if allowed else ""
        headers = {"Allow": allowed} if allowed else {}
        return ApiError(405, f"{path[:SHOWN]} does not take {method}{more}", headers=headers)
    return ApiError(status, HTTPStatus(status).phrase.lower())


def _invalid_body(error: ValidationError) -> ApiError:
    """The deepest complaint: of a union's branches it is the one that fitted best."""
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
    """pydantic names the branch of a union in a location: a type, not a field."""
    return isinstance(part, str) and (
        part in ("str", "int", "float", "bool", "none", "dict")
        or bool(re.search(r"[A-Z\[(-]", part))
    )


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."
