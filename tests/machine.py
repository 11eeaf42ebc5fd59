"""Processes that have a home and a compiler of their own, on a machine with other users."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class Ran:
    def __init__(self, facts: dict[str, Any], log: str) -> None:
        self.facts, self.log = facts, log


class Machine:
    """A home, a folder for temporary files that others can write in, and a compiler that counts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home, self.shared, self.bin = (folder / name for name in ("home", "shared", "bin"))
        for each in (self.home, self.shared, self.bin):
            each.mkdir()
        self.shared.chmod(0o1777)
        self.log = folder / "compiled"
        self.log.touch()
        compiler = self.bin / "g++"
        compiler.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] || echo "$*" >> {self.log}\n'
            f'exec {shutil.which("g++")} "$@"\n'
        )
        compiler.chmod(0o755)

    @property
    def cache(self) -> Path:
        return self.home / ".cache" / "rewarm" / "mlx"

    @property
    def compiled(self) -> int:
        return len(self.log.read_text().splitlines())

    def restart(self) -> None:
        """Delete the temporary files, as a restart of a machine does."""
        shutil.rmtree(self.shared)
        self.shared.mkdir()
        self.shared.chmod(0o1777)

    def env(self, variable: str | None = "TMPDIR") -> dict[str, str]:
        apart = ("TMPDIR", "TMP", "TEMP", "TEMPDIR", "XDG_CACHE_HOME")
        inherited = {k: v for k, v in os.environ.items() if k not in apart}
        return inherited | {
            "HOME": str(self.home),
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            **({variable: str(self.shared)} if variable else {}),
        }

    def run(self, *code: str, variable: str | None = "TMPDIR") -> Ran:
        prelude = "import json\ndef say(**facts): print(json.dumps(facts), flush=True)\n"
        done = subprocess.run(
            [sys.executable, "-c", prelude + "\n".join(code)],
            env=self.env(variable),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        facts: dict[str, Any] = {}
        for line in done.stdout.splitlines():
            facts |= json.loads(line)
        return Ran(facts, done.stderr)
