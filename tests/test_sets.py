"""An unexpected skip fails its test, and so does a missing recorded file that must be there."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.sets import EXPECTED

ROOT = Path(__file__).parents[1]


def ran(tmp_path: Path, body: str, **variables: str) -> str:
    """Run a module under the rules of tests/sets.py, and return what pytest printed."""
    (tmp_path / "test_it.py").write_text("import pytest\n" + body)
    command = [sys.executable, "-m", "pytest", "-p", "tests.sets", "-p", "no:cacheprovider", "-rA"]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("REWARM_", "PYTEST_"))}
    quick = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    env = {**inherited, **quick, **variables}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    return done.stdout.splitlines()[-1] + done.stdout


def test_a_skip_that_nobody_expects_fails_and_is_named(tmp_path: Path) -> None:
    said = ran(tmp_path, "def test_it():\n    pytest.skip('no luck today')\n")
    assert "1 failed" in said
    assert "does not expect: no luck today" in said


def test_a_module_that_is_skipped_as_a_whole_fails_too(tmp_path: Path) -> None:
    said = ran(tmp_path, "pytest.importorskip('nothing_of_this_name')\ndef test_it(): ...\n")
    assert "1 error" in said
    assert "nothing_of_this_name" in said


def test_a_skip_by_a_mark_is_held_to_the_same(tmp_path: Path) -> None:
    body = "@pytest.mark.skipif(True, reason={!r})\ndef test_it(): ...\n"
    assert "1 error" in ran(tmp_path, body.format("later"))
    expected = "needs curl and bash"
    assert "1 skipped" in ran(tmp_path, body.format(expected), PATH="")


def test_what_is_expected_elsewhere_fails_here(tmp_path: Path) -> None:
    """A test must not say that curl is missing on a machine that has it."""
    (tmp_path / "bin").mkdir()
    for name in ("curl", "bash"):
        tool = tmp_path / "bin" / name
        tool.write_text("#!/bin/sh\n")
        tool.chmod(0o755)
    body = "def test_it():\n    pytest.skip('needs curl and bash')\n"
    assert "1 failed" in ran(tmp_path, body, PATH=str(tmp_path / "bin"))


RECORDED = "from tests.sets import shared\ndef test_it():\n    shared('no/such/file')\n"


def test_a_missing_recorded_file_fails_where_the_folder_is_named(tmp_path: Path) -> None:
    told = {"REWARM_SHARED": str(tmp_path), "REWARM_CORPUS": "recorded"}
    said = ran(tmp_path, RECORDED, **told)
    assert "1 failed" in said
    assert "no/such/file is missing" in said


def test_recorded_files_are_optional_where_no_folder_is_named(tmp_path: Path) -> None:
    assert "1 skipped" in ran(tmp_path, RECORDED, REWARM_CORPUS="recorded")


def test_make_test_reads_no_recorded_file(tmp_path: Path) -> None:
    """A test that asks for one fails in `make test`, even where the file exists."""
    assert "1 failed" in ran(tmp_path, RECORDED)
    (tmp_path / "there").write_text("")
    body = RECORDED.replace("no/such/file", "there")
    assert "1 failed" in ran(tmp_path, body, REWARM_SHARED=str(tmp_path))


def reasons() -> Iterator[tuple[Path, str]]:
    """Find the reasons for skips that are written in the tests. What a reason formats is a `*`."""
    for path in Path(__file__).parent.rglob("*.py"):
        if path.name in ("sets.py", Path(__file__).name):
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            given = call.args[:1] if call.func.attr == "skip" else []
            if call.func.attr == "skipif":
                given = [keyword.value for keyword in call.keywords if keyword.arg == "reason"]
            for reason in given:
                parts = reason.values if isinstance(reason, ast.JoinedStr) else [reason]
                texts = [p.value if isinstance(p, ast.Constant) else "*" for p in parts]
                yield path, "".join(map(str, texts))


def test_each_reason_for_a_skip_is_expected_on_some_machine() -> None:
    """Else the test fails on the machines that have the reason, which may not be this one."""
    found = set(reasons())
    assert len(found) > 5
    unknown = {
        (path.name, reason)
        for path, reason in found
        if reason != "*" and not any(re.fullmatch(pattern, reason) for pattern in EXPECTED)
    }
    assert not unknown
