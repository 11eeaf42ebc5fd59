"""What the OpenAPI schema says of endpoints that read their bodies themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REF = "#/components/schemas/{model}"

_OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
        },
    },
}
_ERRORS = {
    400: "The request is wrong; the message says where.",
    401: "No API key, or a wrong one.",
    403: "Without an API key, a host name from elsewhere.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full; `Retry-After` says when to try again.",
    500: "The server failed on this request.",
    503: "The server is loading, failing or stopping.",
}
_REPLIES: dict[str, list[str]] = {
    "chat.completion": ["id", "object", "created", "model", "choices", "usage", "rewarm"],
    "text_completion": ["id", "object", "created", "model", "choices", "usage", "rewarm"],
    "message": ["id", "type", "role", "model", "content", "stop_reason", "usage", "rewarm"],
    "count": ["input_tokens"],
}

_BODIES: list[type[BaseModel]] = []


def body_of(schema: type[BaseModel]) -> dict[str, Any]:
    if schema not in _BODIES:
        _BODIES.append(schema)
    ref = {"$ref": REF.format(model=schema.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": ref}}}}


def replies(
    kind: str, *, stream: bool = False, anthropic: bool = False
) -> dict[int | str, dict[str, Any]]:
    content: dict[str, Any] = {
        "application/json": {"schema": {"type": "object", "required": _REPLIES[kind]}}
    }
    if stream:
        content["text/event-stream"] = {"schema": {"type": "object", "required": ["data"]}}
    return {
        200: {"description": "The answer.", "content": content},
        **errors(*_ERRORS, anthropic=anthropic),
    }


def errors(*statuses: int, anthropic: bool = False) -> dict[int | str, dict[str, Any]]:
    schema = _ANTHROPIC_ERROR if anthropic else _OPENAI_ERROR
    return {
        status: {
            "description": _ERRORS.get(status, "Not found."),
            "content": {"application/json": {"schema": schema}},
        }
        for status in statuses
    }


def describe(app: FastAPI) -> None:
    """Give the app a schema that has the bodies too."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, definitions = models_json_schema(
                [(body, "validation") for body in _BODIES], ref_template=REF
            )
            components = schema.setdefault("components", {})
            components.setdefault("schemas", {}).update(definitions.get("$defs", {}))
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
