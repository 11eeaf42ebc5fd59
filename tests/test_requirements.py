"""`make` installs packages that are fixed by hashes, for every Python that we support."""

from __future__ import annotations

import re
import tomllib
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


def test_every_place_names_the_same_pythons() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = "Programming Language :: Python :: "
    versions = [c.removeprefix(named) for c in project["project"]["classifiers"] if named in c]
    first, last = versions[0], versions[-1]
    minors = [int(version.removeprefix("3.")) for version in versions]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert project["project"]["requires-python"] == f">={first},<3.{minors[-1] + 1}"
    assert project["tool"]["ruff"]["target-version"] == f"py3{minors[0]}"
    assert project["tool"]["mypy"]["python_version"] == first
    makefile = (ROOT / "Makefile").read_text()
    assert f"(3, {minors[0]}) <= v < (3, {minors[-1] + 1})" in makefile
    for place in (makefile, (ROOT / "README.md").read_text(), (ROOT / "tools/lock").read_text()):
        assert f"Python {first} to {last}" in place
    assert f"--python-version {first} " in (ROOT / "tools/lock").read_text()
