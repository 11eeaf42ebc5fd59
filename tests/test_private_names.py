"""A test touches private names of Rewarm in its own room's folder only."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "rewarm"

FREE = {"_replace", "_asdict", "_fields", "_make"}
"""The public methods of named tuples, whose names begin with an underscore."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in FREE


def assigned(tree: ast.AST) -> Iterator[str]:
    """Find every private name that a module defines: attributes, functions, classes and values."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.AsyncFunctionDef(name=name):
                yield name


def touched(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Find every private name that a test reads of anything but its own `self`, with the line."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name):
                yield name, node.lineno
            case ast.ImportFrom(module=str(module)) if module.startswith("rewarm"):
                yield from ((alias.name, node.lineno) for alias in node.names)
            case ast.Call(
                func=ast.Attribute(attr="setattr") | ast.Name(id="setattr" | "getattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ):
                yield name, node.lineno


def rooms() -> dict[str, set[str]]:
    """Map each private name to the rooms that define it."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name in filter(is_private, assigned(ast.parse(path.read_text()))):
            found[name].add(room)
    return found


ROOMS = rooms()
HELPERS = {name for path in TESTS.glob("*.py") for name in assigned(ast.parse(path.read_text()))}
"""Names that the helpers at the top of tests/ define, even where Rewarm has the same ones."""
FILES = sorted(str(path.relative_to(TESTS)) for path in TESTS.rglob("*.py"))


@pytest.mark.parametrize("file", FILES)
def test_private_names_are_touched_in_their_rooms_folder_only(file: str) -> None:
    tree = ast.parse((TESTS / file).read_text())
    mine = {*assigned(tree), *HELPERS}
    room = Path(file).parts[0].removeprefix("test_").removesuffix(".py")
    strangers = {
        f"{name} of {' or '.join(sorted(ROOMS[name]))}, line {line}"
        for name, line in touched(tree)
        if is_private(name) and name in ROOMS and room not in ROOMS[name] and name not in mine
    }
    assert not strangers
