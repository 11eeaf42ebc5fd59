"""Options that are lists with commas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from rewarm.errors import InvalidOption

Name = TypeVar("Name", bound=str)


def numbers(option: str, text: str, least: int = 1) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least:
        raise InvalidOption(f"{option} {text!r}: give numbers from {least}, commas between them")
    return found


def names(option: str, text: str, known: Iterable[Name]) -> list[Name]:
    """Give the names in the text, in the order of `known`."""
    wanted = [part.strip() for part in text.split(",")]
    found = [name for name in known if name in wanted]
    if unknown := [word for word in wanted if word not in found]:
        raise InvalidOption(f"{option} {unknown[0]!r} is unknown: give some of {', '.join(known)}")
    return found
