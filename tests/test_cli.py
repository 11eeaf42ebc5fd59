"""The command line, as a program of its own."""

from __future__ import annotations

import subprocess
import sys

import rewarm


def rewarm_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rewarm", *arguments], capture_output=True, text=True, check=False
    )


def test_version_says_what_it_runs_on() -> None:
    done = rewarm_cli("--version")
    assert done.returncode == 0
    assert f"rewarm {rewarm.__version__}" in done.stdout
    for what in ("mlx ", "mlx-lm ", "python ", "device ", "blas "):
        assert f"\n{what}" in done.stdout


def test_the_demo_shows_what_was_cached() -> None:
    done = rewarm_cli("demo", "--turns", "3")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("turn ")]
    assert [row[1] for row in rows] == ["1", "2", "3"]
    assert [int(row[3]) > 0 for row in rows] == [False, True, True]
    assert "repeated" in done.stdout


def test_a_wrong_option_is_named() -> None:
    done = rewarm_cli("demo", "--turns", "0")
    assert done.returncode == 2
    assert "--turns" in done.stderr
    done = rewarm_cli("demo", "--reuse", "sometimes")
    assert done.returncode != 0
    assert "sometimes" in done.stderr
    assert "Traceback" not in done.stderr
