"""The parts that the requests of all APIs share. Nothing here imports a model library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, WithJsonSchema

from rewarm.generate.options import GenerationOptions
from rewarm.options import RESERVED_FOR_RENDERING, ServerOptions
from rewarm.prompt.chat import Chat, Text
from rewarm.values import Sampling

from .errors import bad_request

MOST_TOKENS = 1 << 31

Temperature = Annotated[float, Field(ge=0, le=100)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenCount = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
Salt = Annotated[str, Field(min_length=1, max_length=512)]


class Body(BaseModel, strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=()):
    """An object of a request. A value of a wrong type is an error; unknown fields are kept, so that
    `refuse` can look at them."""


class ParsedRequest(NamedTuple):
    """A request, translated from its API's words."""

    prompt: Chat | Text
    options: GenerationOptions
    body: Any
    """The request in its API's own words, which the reply needs."""


class RequestBody(Body):
    """The body of a request that has a prompt."""

    @classmethod
    def parse(cls, body: bytes, server: ServerOptions) -> ParsedRequest:
        """Read a body. Raises ApiError, or pydantic's ValidationError."""
        read = cls.model_validate_json(body)
        return ParsedRequest(read.asked(server), read.options(), read)

    def asked(self, server: ServerOptions) -> Chat | Text:
        """Make the canonical chat, or the texts to continue."""
        raise NotImplementedError

    def options(self) -> GenerationOptions:
        return GenerationOptions()


class Unsupported(NamedTuple):
    """A field that would change the answer and is not supported."""

    advice: str
    harmless: tuple[Any, ...] = ()
    """Values that change nothing, besides null."""


GUIDED = Unsupported("answers cannot be constrained; leave it out")


def refuse(extra: Mapping[str, Any] | None, unsupported: Mapping[str, Unsupported]) -> None:
    """Raise an ApiError for the first extra field that is not supported."""
    for name, value in extra.items() if extra else ():
        rule = unsupported.get(name, GUIDED if name.startswith("guided_") else None)
        if rule is not None and value is not None and value not in rule.harmless:
            raise bad_request(f"{name} is not supported: {rule.advice}", name)


def one_of(*allowed: str, advice: str) -> Any:
    """Make the type of a string field with few values. Its error says what to do."""

    def check(value: str) -> str:
        if value not in allowed:
            raise ValueError(f"{value[:40]!r} is not supported: {advice}")
        return value

    return Annotated[str, AfterValidator(check), Field(json_schema_extra={"enum": [*allowed]})]


def _template_options(given: Any) -> Any:
    if isinstance(given, dict):
        taken = sorted(RESERVED_FOR_RENDERING.intersection(given))
        if taken:
            raise ValueError(f"{taken[0]!r} is set by the server and cannot be given")
    return given


TemplateOptions = Annotated[
    dict[str, Any],
    BeforeValidator(_template_options),
    WithJsonSchema({"type": "object", "propertyNames": {"pattern": "^x_[a-z]+$"}}),
]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def thinking_options(effort: str | None, enabled: bool | None) -> dict[str, Any]:
    """Give the options of a template about thinking."""
    options: dict[str, Any] = {}
    if effort == "none":
        options["enable_thinking"] = False
    elif effort is not None:
        options["reasoning_effort"] = effort
    if enabled is not None:
        options["enable_thinking"] = enabled
    return options


def chosen_tools(tools: list[Any] | None, mode: str, name: str | None = None) -> list[Any] | None:
    """Give the tools that the model is shown, of those of a request in OpenAI's shape. `mode` is
    "none", "auto" or "required"; with a name, only that tool is shown."""
    if not tools and mode == "required":
        raise bad_request("tool_choice needs tools", "tool_choice")
    if not tools or mode == "none":
        return None
    if name is not None:
        tools = [tool for tool in tools if tool["function"]["name"] == name][:1]
        if not tools:
            message = f"tool_choice: there is no tool {name[:80]!r} in tools"
            raise bad_request(message, "tool_choice")
    return tools


SAMPLING = frozenset(field.name for field in fields(Sampling))


def sampling_of(body: Body) -> Sampling:
    """Make the sampling from the fields of a request that have the names of `Sampling`. It is
    greedy where no temperature is given."""
    named = ((name, getattr(body, name)) for name in SAMPLING & type(body).model_fields.keys())
    return Sampling(**{name: value for name, value in named if value is not None})
