"""A class name means one thing, and a docstring begins with a sentence or a subject."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

HOME = Path(__file__).parents[1]
FILES = sorted(p for folder in ("rewarm", "tests", "tools") for p in (HOME / folder).rglob("*.py"))
PACKAGE = [path for path in FILES if path.is_relative_to(HOME / "rewarm")]

BARE = re.compile(r"(What|Whether|Where|Of|Those|That|How|Who|Whoever|Whose|When)\b")
"""The words with which a docstring must not begin, because it then names no subject."""


def docstrings(tree: ast.AST) -> Iterator[str]:
    """Find every string that stands alone: docstrings, also those below a field or a value."""
    for node in ast.walk(tree):
        body = getattr(node, "body", [])
        for child in body if isinstance(body, list) else []:
            match child:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield text


def test_a_class_name_is_used_once() -> None:
    homes = defaultdict(list)
    for path in PACKAGE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(path.relative_to(HOME)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_a_docstring_begins_with_a_sentence() -> None:
    bare = [
        f"{path.relative_to(HOME)}: {text.strip().splitlines()[0]}"
        for path in FILES
        for text in docstrings(ast.parse(path.read_text()))
        if BARE.match(text.strip())
    ]
    assert bare == []
