"""Commands whose options are the fields of rewarm/options.py."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable
from functools import partial
from inspect import Parameter
from typing import Annotated, Any, get_args, get_type_hints

import typer

from rewarm.errors import InvalidOption

TYPED = (bool, int, int | None, str, str | None)
"""Types that Typer reads. A field of another type is read as text."""


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command for Typer of a function that takes dataclasses of options.

    A parameter `cache: CacheOptions` becomes an option for each field that has a help text. A
    parameter `engine: Annotated[EngineOptions, "context"]` becomes an option for the named fields
    only; the other ones keep their defaults.
    """
    parameters: list[Parameter] = []
    makers: dict[str, Callable[[dict[str, Any]], Any]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind, *names = get_args(parameter.annotation) or (parameter.annotation,)
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            parameters.append(parameter)
            continue
        fields = [f for f in dataclasses.fields(kind) if "help" in f.metadata]
        fields = [f for f in fields if not names or f.name in names]
        hints = get_type_hints(kind)
        parameters += [_parameter(f, hints[f.name], kind.__name__) for f in fields]
        makers[parameter.name] = partial(_made, kind, fields)

    def run(**given: Any) -> None:
        made = {name: make(given) for name, make in makers.items()}
        command(**made, **given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _parameter(field: dataclasses.Field[Any], hint: Any, kind: str) -> Parameter:
    about = field.metadata
    # A flag that is on by default gets its opposite from Typer, `--no-…`.
    option = typer.Option(
        *([_flag(field)] if field.default is False else []),
        help=about["help"],
        envvar=about["env"],
        metavar="JSON" if _is_json(field) else None,
        rich_help_panel=kind.removesuffix("Options"),
    )
    annotation: Any = Annotated[hint if hint in TYPED else str, option]
    default = "{}" if _is_json(field) else field.default
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _is_json(field: dataclasses.Field[Any]) -> bool:
    """Say whether a field is a mapping. Only a mapping has a `default_factory` and no default."""
    return field.default is dataclasses.MISSING


def _made(kind: Any, fields: list[dataclasses.Field[Any]], given: dict[str, Any]) -> Any:
    """Take the fields of a dataclass out of the given options, and make the dataclass."""
    values = {field.name: given.pop(field.name) for field in fields}
    for field in filter(_is_json, fields):
        values[field.name] = _json_object(_flag(field), values[field.name])
    return kind(**values)


def _flag(field: dataclasses.Field[Any]) -> str:
    return f"--{field.name.replace('_', '-')}"


def _json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidOption(f"{flag} {text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidOption(f"{flag} {text!r} is not a JSON object")
    return value
