"""Ours in the place of mlx-lm's functions."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

log = logging.getLogger("rewarm")

Function = Callable[..., Any]
MODELS = "mlx_lm.models."

_stock_of: dict[Function, Function] = {}


class Place(NamedTuple):
    """A function of mlx-lm, and ours."""

    module: str
    name: str
    parameters: tuple[str, ...]
    ours: Function


def put(place: Place, stock: dict[str, Function], otherwise: str) -> bool:
    """Says whether ours is there; mlx-lm's goes to `stock`, under its name.

    What is not imported is left alone: to import all of mlx-lm's models would take long. Modules
    that have a function of another one by name get ours, too.
    """
    module = sys.modules.get(MODELS + place.module)
    if module is None:
        return False
    *path, name = place.name.split(".")
    try:
        owner = functools.reduce(getattr, path, module)
        found: Function = getattr(owner, name)
        if found is not place.ours:
            check_parameters(found, place.parameters)
            if stock.setdefault(name, found) is not found:
                return False  # somebody else's, over ours
            note(place.ours, found)
    except (AttributeError, TypeError, ValueError) as error:
        say_once(otherwise, str(error))
        return False
    setattr(owner, name, place.ours)
    for other, each in list(sys.modules.items()):
        if other.startswith(MODELS) and getattr(each, name, None) is stock[name]:
            setattr(each, name, place.ours)
    return True


def note(ours: Function, stock: Function) -> None:
    """Remember the function that ours stands in place of."""
    if stock is not ours:
        _stock_of.setdefault(ours, stock)


def original(function: Function) -> Function:
    """The function that this one stands in place of, or itself."""
    while function in _stock_of:
        function = _stock_of[function]
    return function


def check_parameters(found: Function, expected: tuple[str, ...]) -> None:
    takes = tuple(inspect.signature(found).parameters)
    if takes != expected:
        raise TypeError(f"{found.__name__} takes {', '.join(takes)}")


@functools.cache
def say_once(what: str, why: str) -> None:
    log.warning("%s: not the mlx-lm that is known: %s", what, why)
