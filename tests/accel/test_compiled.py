"""MLX compiles into a private folder on Linux, and loads nothing from elsewhere."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.accel.emulation import needs_a_compiler
from tests.machine import Machine

pytestmark = [pytest.mark.integration, needs_a_compiler]

MARKED = """
import mlx.core as mx
mx.set_default_device(mx.cpu)
found = mx.compile(lambda a, b: mx.exp(a) * b + a)(mx.ones((4,)), mx.ones((4,)))
assert abs(found[0].item() - 3.71828) < 1e-4
"""

POISON = r"""
#include <cstdio>
#include <cstdlib>
__attribute__((constructor)) static void strike() { fclose(fopen("%s", "w")); }
"""


def plant(machine: Machine) -> Path:
    """Put other code where MLX by itself looks for its own; return the file that it makes."""
    machine.run(MARKED)
    (library,) = machine.shared.glob("mlx/*/cpu/lib*.so")
    struck = machine.folder / "struck"
    source = machine.folder / "poison.cpp"
    source.write_text(POISON % struck)
    command = ["g++", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return struck


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("variable", ["TMPDIR", "TMP", "TEMP", "TEMPDIR"])
def test_nothing_is_loaded_from_a_folder_that_others_write_in(
    machine: Machine, variable: str
) -> None:
    struck = plant(machine)
    machine.run("import rewarm", MARKED, variable=variable)
    assert not struck.exists()
    # The test can fail: MLX by itself loads it, and fails because a function is missing.
    with pytest.raises(AssertionError, match="Failed to load compiled function"):
        machine.run(MARKED, variable=variable)
    assert struck.exists()


def test_nothing_is_loaded_from_there_where_mlx_was_imported_first(machine: Machine) -> None:
    struck = plant(machine)
    machine.run("import mlx.core", "import rewarm", MARKED)
    assert not struck.exists()


def test_what_one_process_compiles_the_next_one_loads(machine: Machine) -> None:
    machine.run("import rewarm", MARKED)
    assert machine.compiled == 1
    machine.restart()
    machine.run("import rewarm", MARKED)
    assert machine.compiled == 1


def test_the_folder_is_ours_alone(machine: Machine) -> None:
    machine.run("import rewarm", MARKED)
    (folder,) = machine.cache.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(folder.glob("mlx/*/cpu/lib*.so"))
    assert not list(machine.shared.iterdir())


def test_another_compiler_has_a_folder_of_its_own(machine: Machine) -> None:
    machine.run("import rewarm", MARKED)
    with (machine.bin / "g++").open("a") as compiler:
        compiler.write("# a newer version\n")
    machine.run("import rewarm", MARKED)
    assert machine.compiled == 2
    assert len(list(machine.cache.iterdir())) == 2


@pytest.mark.parametrize("variable", ["TMPDIR", None])
def test_temporary_files_of_python_stay_where_they_were(
    machine: Machine, variable: str | None
) -> None:
    found = machine.run(
        "import os, tempfile; names = 'TMPDIR', 'TMP', 'TEMP', 'TEMPDIR'",
        "def seen(): return {n: os.environ.get(n) for n in names}",
        "before = seen()",
        "import rewarm, mlx.core",
        "say(same=before == seen(), where=tempfile.gettempdir())",
        variable=variable,
    ).facts
    assert found["same"]
    assert found["where"] == (str(machine.shared) if variable else "/tmp")


def test_programs_that_are_started_keep_their_temporary_folder(machine: Machine) -> None:
    """They lose it where TMPDIR, TMP or TEMP is set, because MLX then looks nowhere else."""
    found = machine.run(
        "import subprocess, sys, rewarm, mlx.core",
        "ask = 'import tempfile; print(tempfile.gettempdir())'",
        "say(where=subprocess.check_output([sys.executable, '-c', ask], text=True).strip())",
        variable=None,
    ).facts
    assert found["where"] == "/tmp"


@pytest.mark.parametrize("obstacle", ["a link", "open to others", "no home", "noexec"])
def test_where_nothing_can_be_kept_a_process_has_a_folder_to_itself(
    machine: Machine, obstacle: str
) -> None:
    prepare = ""
    if obstacle == "a link":
        machine.cache.parent.mkdir(parents=True)
        elsewhere = machine.folder / "elsewhere"
        elsewhere.mkdir()
        elsewhere.chmod(0o777)
        machine.cache.symlink_to(elsewhere)
    elif obstacle == "open to others":
        machine.cache.mkdir(parents=True)
        machine.cache.chmod(0o777)
    elif obstacle == "no home":
        machine.home.rmdir()
        machine.home.touch()
    else:
        prepare = f"""
import os
real = os.statvfs
class Found:
    f_flag = os.ST_NOEXEC
os.statvfs = lambda path: Found if str(path).startswith({str(machine.home)!r}) else real(path)
"""
    struck = plant(machine)
    listed = "import os; say(made=sorted(os.listdir(os.environ['TMPDIR'])))"
    ran = machine.run(prepare, "import rewarm", MARKED, listed)
    assert "not kept" in ran.log
    assert [name for name in ran.facts["made"] if name.startswith("rewarm-mlx-")]
    assert os.listdir(machine.shared) == ["mlx"], "gone with its process"
    assert not struck.exists()


def test_where_there_is_no_safe_place_at_all_mlx_compiles_nothing(machine: Machine) -> None:
    struck = plant(machine)
    before = machine.compiled
    machine.shared.chmod(0o777)  # anybody can replace anything in it
    machine.home.rmdir()
    machine.home.touch()
    ran = machine.run("import rewarm", MARKED)
    assert "MLX compiles nothing" in ran.log
    assert machine.compiled == before
    assert not struck.exists()


def test_a_fork_that_ends_leaves_its_parent_the_folder(machine: Machine) -> None:
    machine.home.rmdir()
    machine.home.touch()
    machine.run(
        "import os, sys, rewarm",
        "child = os.fork()",
        "if not child: sys.exit()",
        "os.waitpid(child, 0)",
        MARKED,
    )
    assert machine.compiled == 1
