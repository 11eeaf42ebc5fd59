"""Commands whose options are the fields of rewarm/options.py."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable
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
    kinds: dict[str, tuple[Any, list[str]]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind, *names = get_args(parameter.annotation) or (parameter.annotation,)
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            parameters.append(parameter)
            continue
        offered = [f for f in dataclasses.fields(kind) if "help" in f.metadata]
        offered = [f for f in offered if not names or f.name in names]
        hints = get_type_hints(kind)
        panel = kind.__name__.removesuffix("Options")
        parameters += [_parameter(f, hints[f.name], panel) for f in offered]
        kinds[parameter.name] = kind, [f.name for f in offered]

    def run(**given: Any) -> None:
        made = {
            name: kind(**{field: given.pop(field) for field in fields})
            for name, (kind, fields) in kinds.items()
        }
        command(**made, **given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _parameter(field: dataclasses.Field[Any], hint: Any, panel: str) -> Parameter:
    # Only a mapping has a `default_factory` and no default.
    is_mapping = field.default is dataclasses.MISSING
    # A flag that is on by default gets its opposite from Typer, `--no-…`.
    flag = [f"--{field.name.replace('_', '-')}"] if field.default is False else []
    option = typer.Option(
        *flag,
        help=field.metadata["help"],
        envvar=field.metadata["env"],
        metavar="JSON" if is_mapping else None,
        callback=_json_object if is_mapping else None,
        rich_help_panel=panel,
    )
    annotation: Any = Annotated[hint if hint in TYPED else str, option]
    default = "{}" if is_mapping else field.default
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _json_object(option: typer.CallbackParam, text: str) -> dict[str, Any]:
    flag = option.opts[0]
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidOption(f"{flag} {text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidOption(f"{flag} {text!r} is not a JSON object")
    return value
