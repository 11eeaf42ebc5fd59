"""The BLAS and the folder are chosen when MLX is first imported, and not before."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.accel.test_blas import MULTIPLY, fresh
from tests.test_rooms import GATEWAY

LOOK = """
def looked():
    import os, sys
    maps = open("/proc/self/maps").read() if os.path.exists("/proc/self/maps") else ""
    return dict(
        blas="libscipy_openblas.so" in maps,
        chosen="rewarm.accel.blas" in sys.modules,
        folder="rewarm.accel.compiled" in sys.modules,
        mlx="mlx.core" in sys.modules,
    )
"""

NOTHING = {"blas": False, "chosen": False, "folder": False, "mlx": False}

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="MLX has a fast BLAS of its own off Linux: nothing is loaded"
)


@pytest.fixture(scope="module")
def chosen() -> dict[str, Any]:
    return fresh("from rewarm.accel import blas; blas.load()", MULTIPLY)


def test_a_gateway_loads_no_blas_and_prepares_no_folder() -> None:
    imports = f"import rewarm, {', '.join(GATEWAY)}"
    assert fresh(LOOK, imports, "say(**looked())") == {"log": [], **NOTHING}


@linux
def test_mlx_gets_the_blas_when_it_is_imported(chosen: dict[str, Any]) -> None:
    found = fresh(LOOK, "import rewarm", "say(before=looked())", MULTIPLY, "say(after=looked())")
    assert found["before"] == NOTHING
    assert found["after"] == {"blas": True, "chosen": True, "folder": True, "mlx": True}
    assert found["bits"] == chosen["bits"]


@linux
@pytest.mark.parametrize("first", ["import mlx", "import importlib.util as i; i.find_spec('mlx')"])
def test_mlx_that_was_looked_at_and_not_loaded_gets_it_too(
    first: str, chosen: dict[str, Any]
) -> None:
    assert fresh(first, "import rewarm", MULTIPLY)["bits"] == chosen["bits"]


@linux
def test_mlx_that_was_imported_first_is_prepared_at_once() -> None:
    found = fresh(LOOK, "import mlx.core, rewarm", "say(**looked())")
    assert found["folder"]
    assert not found["blas"]
    assert len(found["log"]) == 1
    assert "import rewarm before mlx" in found["log"][0]


@linux
def test_threads_that_import_it_at_once_wait_for_one_choice(chosen: dict[str, Any]) -> None:
    found = fresh(
        """
import logging, threading, time
logging.basicConfig(level=logging.INFO, format="%(message)s")
import rewarm
from rewarm.accel import blas, compiled
prepare = compiled.prepare
seen = []
def slowly():
    time.sleep(0.2)
    prepare()
    seen.append("prepared")
compiled.prepare = slowly
start = threading.Barrier(12)
def load(name):
    start.wait()
    __import__(name)
    seen.append("imported")
names = ["mlx.core", "mlx.nn", "rewarm.cache"] * 4
threads = [threading.Thread(target=load, args=(name,)) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join()
say(seen=seen, name=blas.current().name)
""",
        MULTIPLY,
    )
    assert found["seen"] == ["prepared", *["imported"] * 12]
    assert [line for line in found["log"] if "BLAS" in line] == [f"BLAS: {found['name']}"]
    assert found["bits"] == chosen["bits"]


@linux
def test_a_blas_that_another_thread_chooses_meanwhile_is_waited_for() -> None:
    """Each thread would need the lock that the other one holds, if the finder chose the BLAS."""
    found = fresh(
        """
import os, threading, time
import rewarm
from rewarm.accel import blas
decide = blas._decide
chooses = threading.Event()
def slowly():
    chooses.set()
    time.sleep(0.5)  # the other thread comes to import MLX
    return decide()  # imports a module by itself
blas._decide = slowly
chooser = threading.Thread(target=blas.current, daemon=True)
chooser.start()
chooses.wait()
importer = threading.Thread(target=__import__, args=("mlx.core",), daemon=True)
importer.start()
chooser.join(30), importer.join(30)
say(ended=not chooser.is_alive() and not importer.is_alive())
os._exit(0)  # a thread that holds Python's import lock would keep it from ending
"""
    )
    assert found["ended"]


def test_mlx_keeps_its_own_loader() -> None:
    found = fresh(
        """
import rewarm, mlx.core
loaders = mlx.core.__loader__, mlx.core.__spec__.loader
say(kinds=[type(loader).__name__ for loader in loaders])
"""
    )
    assert found["kinds"] == ["ExtensionFileLoader"] * 2
