"""The order of the rooms, and what can be imported without a model library."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
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
"""Each room imports from itself and from those before it. Those of one line do not know each
other, but for `loading`, which alone knows `pocket`."""

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
"""The modules that a program imports which only passes requests on: every dialect's parser too."""

ALLOWED = {
    ("options.py", "errors"),
    # It alone knows the built-in model, and where that lies.
    ("loading.py", "pocket"),
}
DOORS = ("__init__.py", "__main__.py")
"""The package's own doors: they import a room when something of it is asked for."""


def room_of(path: Path) -> str:
    first = path.relative_to(HOME).parts[0]
    return first.removesuffix(".py")


def imported_rooms(path: Path) -> Iterator[str]:
    """The rooms that a file imports from, for types too."""
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
    """Every file with every other room that it imports from."""
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


def test_prompt_needs_plain_data_only() -> None:
    needed = {room for file, room in arrows() if file.startswith("prompt/")}
    assert needed <= {"values", "errors", "options"}


@pytest.mark.parametrize("name", ["rewarm", *GATEWAY])
def test_what_a_gateway_reads_needs_no_model_library(name: str) -> None:
    code = f"import sys, {name}; print(*(m for m in {HEAVY} if m in sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert said.stdout.split() == []
