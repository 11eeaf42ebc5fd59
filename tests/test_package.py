"""The package has the names that it promises, and it is typed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

import rewarm

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", rewarm.__all__)
def test_each_public_name_can_be_imported(name: str) -> None:
    assert getattr(rewarm, name) is not None


@pytest.mark.parametrize("builder", [WheelBuilder, SdistBuilder])
def test_the_types_are_shipped(builder: type[WheelBuilder] | type[SdistBuilder]) -> None:
    """Type checkers read a package's annotations only where it has this file (PEP 561)."""
    shipped = {file.distribution_path for file in builder(str(ROOT)).recurse_included_files()}
    assert "rewarm/py.typed" in shipped


def test_the_tests_that_the_docs_name_are_there() -> None:
    written = "".join(path.read_text() for path in ROOT.glob("tests/**/*.py"))
    page = (ROOT / "docs" / "guarantees.md").read_text()
    files = re.findall(r"`((?:\w+/)*test_\w+\.py)`", page)
    functions = re.findall(r"`(test_\w+)`", page)
    assert len(files) > 50
    assert functions
    assert [file for file in files if not (ROOT / "tests" / file).exists()] == []
    assert [name for name in functions if f"def {name}(" not in written] == []
