"""What `make` installs is fixed to the byte."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

PINNED = re.compile(r"[a-z0-9-]+==[\w.]+( ; [^\\]+)?")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def test_every_requirement_has_one_version_and_its_hashes() -> None:
    text = (ROOT / "requirements.txt").read_text().replace("\\\n", "\n    ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    hashes: dict[str, int] = {}
    requirement = ""
    for line in lines:
        if line.startswith(" "):
            assert HASH.fullmatch(line.strip()), line
            hashes[requirement] += 1
        else:
            requirement = line.strip()
            assert PINNED.fullmatch(requirement), requirement
            hashes[requirement] = 0
    assert {name.partition("==")[0] for name in hashes} >= {"mlx", "mlx-cpu", "mlx-lm", "numpy"}
    assert not [name for name, count in hashes.items() if not count]


def test_make_installs_nothing_without_a_hash() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    installs = [line for line in makefile.splitlines() if "pip install" in line]
    assert len(installs) == 2
    for line in installs:
        assert "--require-hashes -r requirements.txt" in line or "--no-deps" in line
    assert sum("--require-hashes" in line for line in installs) == 1
