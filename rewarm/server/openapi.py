"""The OpenAPI schema, from what is said of each endpoint where it is listed."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import rewarm

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
ANSWERING = (400, 401, 403, 413, 415, 429, 500, 503)
"""Statuses that an endpoint may have which answers prompts, besides 200."""


@dataclass(frozen=True)
class Endpoint:
    path: str
    answer: Callable[[Request], Awaitable[Response]]
    tag: str = "Server"
    method: str = "GET"
    head: bool = False
    """HEAD is answered too."""
    summary: str | None = None
    """Its docstring where not given; left out of the schema where it is empty."""
    body: type[BaseModel] | None = None
    has: Sequence[str] | None = ()
    """The fields of its reply; None where it is no JSON object."""
    error: Mapping[str, Any] = field(default_factory=dict)
    """An error of its API, as an example of the shape."""
    stream: bool = False
    statuses: Sequence[int] = (401,)
    """The statuses that it may have, besides 200."""
    parameters: Sequence[Mapping[str, Any]] = field(default_factory=tuple)

    def route(self) -> Route:
        route = Route(self.path, self.answer, methods=[self.method])
        route.methods = {self.method, *(["HEAD"] if self.head else [])}  # not for every GET
        return route

    def described(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "tags": [self.tag],
            "summary": self.summary or self.answer.__doc__,
            "operationId": "_".join([self.method.lower(), *re.findall(r"\w+", self.path)]),
            "responses": {"200": {"description": STATUSES[200]}},
        }
        if self.has is not None:
            whole = {"schema": {"type": "object", "required": list(self.has)}}
            found["responses"]["200"]["content"] = {"application/json": whole}
        if self.stream:
            event = {"schema": {"type": "object", "required": ["data"]}}
            found["responses"]["200"]["content"]["text/event-stream"] = event
        error = _shape(self.error)
        for status in self.statuses:
            found["responses"][str(status)] = {"description": STATUSES[status]}
            if status >= 400 and self.error:
                found["responses"][str(status)]["content"] = {"application/json": {"schema": error}}
        if self.body is not None:
            ref = {"schema": {"$ref": REF.format(model=self.body.__name__)}}
            found["requestBody"] = {"required": True, "content": {"application/json": ref}}
        if self.parameters:
            found["parameters"] = list(self.parameters)
        return found


def _shape(example: Any) -> dict[str, Any]:
    """The schema of all values that have the fields of this one."""
    if isinstance(example, str):
        return {"type": "string"}
    if not isinstance(example, Mapping):
        return {}
    shapes = {name: _shape(value) for name, value in example.items()}
    return {"type": "object", "required": list(example), "properties": shapes}


def schema_of(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    bodies: list[type[BaseModel]] = []
    for endpoint in endpoints:
        if endpoint.summary == "":
            continue
        path = endpoint.path.replace(":path}", "}")
        paths.setdefault(path, {})[endpoint.method.lower()] = endpoint.described()
        if endpoint.body is not None and endpoint.body not in bodies:
            bodies.append(endpoint.body)
    _, definitions = models_json_schema([(b, "validation") for b in bodies], ref_template=REF)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rewarm", "version": rewarm.__version__},
        "paths": paths,
        "components": {"schemas": definitions.get("$defs", {})},
    }
