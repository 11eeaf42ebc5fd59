"""Rooms import in one order, and some modules need no model library."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1] / "rewarm"
HEAVY = ("mlx", "mlx.core", "mlx_lm", "transformers")

ORDER = [
    {"values", "errors", "options"},
    {"private"},
    {"accel"},
    {"loading", "pocket"},
    {"cache"},
    {"engine", "prompt"},
    {"generate"},
    {"session", "server"},
    {"cluster", "adapters", "bench"},
    {"cli"},
]
"""Each room imports from itself and from rooms of earlier lines. Rooms of one line do not import
each other, except that `loading` imports `pocket`."""

GATEWAY = (
    "rewarm.values",
    "rewarm.options",
    "rewarm.errors",
    "rewarm.prompt.chat",
    "rewarm.prompt.messages",
    "rewarm.generate.options",
    "rewarm.server.auth",
    *(f"rewarm.server.{path.parent.name}.parse" for path in sorted(HOME.glob("server/*/parse.py"))),
)
"""The modules for a program that only forwards requests, with every dialect's parser."""

ALLOWED = {
    ("options.py", "errors"),
    # Only `loading` knows the built-in model and its folder.
    ("loading.py", "pocket"),
}
PLAIN = {"values", "errors", "options"}
"""The rooms that every other one may import, so the page of the architecture leaves them out."""
PAGE = HOME.parent / "docs" / "architecture.md"
DOORS = ("__init__.py", "__main__.py")
"""The entry modules of the package: they import a room when something of it is used."""


def room_of(path: Path) -> str:
    first = path.relative_to(HOME).parts[0]
    return first.removesuffix(".py")


def imported_rooms(path: Path) -> Iterator[str]:
    """Find the rooms that a file imports from, also for types."""
    package = ["rewarm", *path.relative_to(HOME).parts[:-1]]
    exported = {"PrefixCache": "cache", "Session": "session", "load": "loading"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first == "rewarm" and rest and rest[0] != "__version__":
                yield exported.get(rest[0], rest[0])


def arrows() -> set[tuple[str, str]]:
    """Pair every file with each other room that it imports from."""
    return {
        (str(path.relative_to(HOME)), room)
        for path in HOME.rglob("*.py")
        for room in imported_rooms(path)
        if room != room_of(path) and str(path.relative_to(HOME)) not in DOORS
    }


def test_a_room_imports_only_from_those_before_it() -> None:
    place = {room: i for i, rooms in enumerate(ORDER) for room in rooms}
    wrong = {
        (file, room)
        for file, room in arrows() - ALLOWED
        if room not in place or place.get(room_of(HOME / file), 0) <= place[room]
    }
    assert not wrong


@cache
def needs() -> dict[str, set[str]]:
    """Map each room to the rooms that it imports from."""
    doors = {room_of(HOME / door) for door in DOORS}
    found: dict[str, set[str]] = {room_of(p): set() for p in HOME.rglob("*.py")}
    for file, room in arrows():
        found[room_of(HOME / file)].add(room)
    return {room: found[room] - PLAIN for room in found.keys() - PLAIN - doors}


def test_the_table_of_the_architecture_has_every_import() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert {room: set(re.findall(r"`(\w+)`", names)) for room, names in rows} == needs()


def test_the_picture_of_the_architecture_leads_from_each_room_to_those_that_import_it() -> None:
    drawn = defaultdict(set)
    for before, after in re.findall(r"^    (\w+) --> (\w+)$", PAGE.read_text(), re.MULTILINE):
        assert before in needs()[after]
        drawn[after].add(before)

    def ways_back(room: str) -> set[str]:
        return drawn[room].union(*(ways_back(before) for before in drawn[room]))

    for room, imported in needs().items():
        assert imported <= ways_back(room), f"no way is drawn to {room} from all that it imports"


def test_prompt_needs_plain_data_only() -> None:
    needed = {room for file, room in arrows() if file.startswith("prompt/")}
    assert needed <= {"values", "errors", "options"}


@pytest.mark.parametrize("name", ["rewarm", *GATEWAY])
def test_what_a_gateway_reads_needs_no_model_library(name: str) -> None:
    code = f"import sys, {name}; print(*(m for m in {HEAVY} if m in sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert said.stdout.split() == []
