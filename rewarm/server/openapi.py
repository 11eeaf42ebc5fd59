"""Describe endpoints: the function that answers each, and its part of the OpenAPI schema."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import rewarm

from .backend import Backend

REF = "#/components/schemas/{model}"

STATUSES = {
    200: "The answer.",
    304: "As it was.",
    400: "The request is wrong; the message says where.",
    401: "No API key, or a wrong one.",
    403: "Without an API key, a host name from elsewhere.",
    404: "Not found.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full; `Retry-After` says when to try again.",
    500: "The server failed on this request.",
    503: "The server is loading, failing or stopping.",
}


@dataclass(frozen=True)
class Endpoint:
    path: str
    name: str
    """Its name in the log and the metrics."""
    answer: Callable[[Backend, Request], Awaitable[Response]]
    methods: Sequence[str] = ("GET",)
    tag: str = "Server"
    summary: str | None = None
    """The docstring of `answer` is the default."""
    body: type[BaseModel] | None = None
    replies: Mapping[str, Sequence[str]] = field(default_factory=lambda: {"application/json": ()})
    """The fields of its replies, by content type."""
    error: Mapping[str, Any] | None = None
    """An error as an example, where the endpoint has a form of its own."""
    statuses: Sequence[int] = (401,)
    """The statuses that it may have, besides 200."""
    parameters: Sequence[Mapping[str, Any]] = ()

    def route(self, backend: Backend) -> Route:
        route = Route(self.path, partial(self.answer, backend))
        route.methods = set(self.methods)  # Starlette would add HEAD to every GET
        return route

    def described(self, error: Mapping[str, Any]) -> dict[str, Any]:
        """Describe the endpoint as the OpenAPI schema has it; `error` is an example of its API's
        errors."""
        replies = {
            kind: {"schema": {"type": "object", "required": list(required)}}
            for kind, required in self.replies.items()
        }
        responses: dict[str, Any] = {"200": {"description": STATUSES[200], "content": replies}}
        for status in self.statuses:
            responses[str(status)] = {"description": STATUSES[status]}
            if status >= 400:
                shape = {"schema": _shape(self.error or error)}
                responses[str(status)]["content"] = {"application/json": shape}
        found = {
            "tags": [self.tag],
            "summary": self.summary or self.answer.__doc__,
            "operationId": "_".join([self.methods[0].lower(), *re.findall(r"\w+", self.path)]),
            "parameters": self.parameters,
            "responses": responses,
        }
        if self.body is not None:
            ref = {"schema": {"$ref": REF.format(model=self.body.__name__)}}
            found["requestBody"] = {"required": True, "content": {"application/json": ref}}
        return found


POST = partial(Endpoint, methods=("POST",), statuses=(400, 401, 403, 413, 415, 429, 500, 503))
"""Makes an endpoint that reads prompts."""


def _shape(example: Any) -> dict[str, Any]:
    """Make the schema of all values that have the fields of this one."""
    if isinstance(example, str):
        return {"type": "string"}
    if not isinstance(example, Mapping):
        return {}
    shapes = {name: _shape(value) for name, value in example.items()}
    return {"type": "object", "required": list(example), "properties": shapes}


def schema_of(
    endpoints: Sequence[Endpoint], error_of: Callable[[str], Mapping[str, Any]]
) -> dict[str, Any]:
    """Make the OpenAPI schema. `error_of` gives an example of the errors of a path."""
    paths: dict[str, dict[str, Any]] = {}
    bodies = dict.fromkeys(endpoint.body for endpoint in endpoints if endpoint.body is not None)
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        described = endpoint.described(error_of(endpoint.path))
        paths.setdefault(path, {})[endpoint.methods[0].lower()] = described
    _, definitions = models_json_schema([(b, "validation") for b in bodies], ref_template=REF)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rewarm", "version": rewarm.__version__},
        "paths": paths,
        "components": {"schemas": definitions.get("$defs", {})},
    }
