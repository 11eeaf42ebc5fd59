"""The parts that the requests of all APIs share. Nothing here imports a model library."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from rewarm.generate.options import GenerationOptions
from rewarm.options import RESERVED_FOR_RENDERING
from rewarm.prompt.chat import Chat, Text
from rewarm.values import Sampling

from .errors import bad_request

MOST_TOKENS = 1 << 31
NO_BIAS: Mapping[int, float] = MappingProxyType({})

Temperature = Annotated[float, Field(ge=0, le=100)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenCount = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
Salt = Annotated[str, Field(min_length=1, max_length=512)]


class Asked(NamedTuple):
    """A request in the words of the house."""

    prompt: Chat | Text
    options: GenerationOptions
    body: Any
    """The request in the API's own words, for the reply."""


class Body(BaseModel):
    """Wrong types are errors; unknown fields are kept, so that `refuse` can look at them."""

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=()
    )


class Refused(NamedTuple):
    """A field that would change the answer and is not supported."""

    advice: str
    harmless: tuple[Any, ...] = ()
    """Values that ask for nothing, besides null."""


def refuse(extra: Mapping[str, Any] | None, refused: Mapping[str, Refused]) -> None:
    if not extra:
        return
    for name, value in extra.items():
        rule = refused.get(name)
        if rule is None and name.startswith("guided_"):
            rule = Refused("answers cannot be constrained; leave it out")
        if rule is not None and value is not None and value not in rule.harmless:
            raise bad_request(f"{name} is not supported: {rule.advice}", name)


def one_of(*allowed: str, advice: str) -> Any:
    """A string field with few values and an error that says what to do."""

    def check(value: str) -> str:
        if value not in allowed:
            raise ValueError(f"{value[:40]!r} is not supported: {advice}")
        return value

    return Annotated[
        str,
        AfterValidator(check),
        WithJsonSchema({"type": "string", "enum": list(allowed)}),
    ]


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
    """The options of a template about thinking."""
    options: dict[str, Any] = {}
    if effort == "none":
        options["enable_thinking"] = False
    elif effort is not None:
        options["reasoning_effort"] = effort
    if enabled is not None:
        options["enable_thinking"] = enabled
    return options


class Sampled(Body):
    """The way in which tokens are chosen: greedily where there is no temperature."""

    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST_TOKENS)] | None = None
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Field(pattern="^[0-9]{1,9}$")],
                Annotated[float, Field(ge=-100, le=100)],
            ],
            Field(max_length=4096),
        ]
        | None
    ) = None
    seed: Seed | None = None
    cache_salt: Salt | None = None
    """Prompts with different salts share nothing."""

    def sampling(self) -> Sampling:
        given = self.repetition_penalty
        biases = self.logit_bias
        return Sampling(
            temperature=self.temperature or 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if given is None else given,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias={int(token): bias for token, bias in biases.items()} if biases else NO_BIAS,
            seed=self.seed,
        )
