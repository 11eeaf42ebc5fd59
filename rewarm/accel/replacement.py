"""Put functions of ours in the place of mlx-lm's and MLX's."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

log = logging.getLogger("rewarm")

Function = Callable[..., Any]
MODELS = "mlx_lm.models."

nn: Any = importlib.import_module("mlx.nn")  # it imports by a star, which mypy does not follow

_stock_of: dict[Function, Function] = {}
_warned: set[str] = set()


class Replacement(NamedTuple):
    """A function of a module of mlx-lm, and ours for it."""

    module: str
    name: str
    parameters: tuple[str, ...]
    """The function is replaced only where it has these."""
    ours: Function


def put(new: Replacement, stock: dict[str, Function], otherwise: str) -> bool:
    """Replace a function of mlx-lm, and return true where ours is in its place.

    mlx-lm's own goes to `stock`, under its name. `otherwise` says in the log what happens where it
    cannot be replaced. A module that is not imported is left alone: to import all of mlx-lm's
    models would take long. Modules that imported the function by its name get ours, too.
    """
    module = sys.modules.get(MODELS + new.module)
    if module is None:
        return False
    *path, name = new.name.split(".")
    try:
        owner = functools.reduce(getattr, path, module)
        found: Function = getattr(owner, name)
        if found is not new.ours:
            check_parameters(found, new.parameters)
            if stock.setdefault(name, found) is not found:
                return False  # another program has put its own over ours
            note(new.ours, found)
    except (AttributeError, TypeError, ValueError) as error:
        warn_once(otherwise, f"not the mlx-lm that is known: {error}")
        return False
    setattr(owner, name, new.ours)
    for other, each in list(sys.modules.items()):
        if other.startswith(MODELS) and getattr(each, name, None) is stock[name]:
            setattr(each, name, new.ours)
    return True


def swap(owner: Any, name: str, ours: Function) -> Function:
    """Replace a function of MLX, and return MLX's own."""
    found: Function = getattr(owner, name)
    note(ours, found)
    setattr(owner, name, ours)
    return found


def note(ours: Function, stock: Function) -> None:
    """Remember the function that ours stands in place of."""
    if stock is not ours:
        _stock_of.setdefault(ours, stock)


def original(function: Function) -> Function:
    """Return the function that this one stands in place of, or itself."""
    while function in _stock_of:
        function = _stock_of[function]
    return function


def check_parameters(found: Function, expected: tuple[str, ...]) -> None:
    """Raise `TypeError` for a function that takes other parameters."""
    takes = tuple(inspect.signature(found).parameters)
    if takes != expected:
        raise TypeError(f"{found.__name__} takes {', '.join(takes)}")


def warn_once(otherwise: str, why: str) -> None:
    """Log what happens instead of ours, and why. It is logged once in a process."""
    if otherwise not in _warned:
        log.warning("%s: %s", otherwise, why)
    _warned.add(otherwise)
