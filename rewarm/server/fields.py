"""What the request schemas of all APIs share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from rewarm.options import RESERVED_FOR_RENDERING
from rewarm.values import Sampling

from .errors import bad_request

PLAIN = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed"),
)
"""Fields that are named in `Sampling` as in a request."""
MOST_TOKENS = 1 << 31

Temperature = Annotated[float, Field(ge=0, le=100)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenCount = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
Salt = Annotated[str, Field(min_length=1, max_length=512)]


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
    for name, value in (extra or {}).items():
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
    """What templates are told about thinking."""
    options: dict[str, Any] = {}
    if effort == "none":
        options["enable_thinking"] = False
    elif effort is not None:
        options["reasoning_effort"] = effort
    if enabled is not None:
        options["enable_thinking"] = enabled
    return options


class Sampled(Body):
    """How tokens are chosen. Without a temperature, greedily."""

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
        given: dict[str, Any] = {
            name: value for name in PLAIN if (value := getattr(self, name)) is not None
        }
        return Sampling(
            **given,
            top_k=max(0, self.top_k or 0),
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
        )
