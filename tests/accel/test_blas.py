"""The BLAS under MLX. Each case is a fresh interpreter, because a process chooses only once."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx
import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="MLX has a fast BLAS of its own off Linux: nothing is loaded"
)

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "rewarm" / "accel" / "blas.py"
SITE = Path(next(iter(mlx.__path__))).parent

PACKAGE = "from rewarm.accel import blas"

# The module without its package: quick, and nothing is decided before the test says so.
ALONE = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("blas_alone", {str(SOURCE)!r})
blas = importlib.util.module_from_spec(spec)
import sys
sys.modules[spec.name] = blas
spec.loader.exec_module(blas)
"""

DECIDE = """
loaded = blas.load()
say(name=loaded.name, path=loaded.path, note=loaded.note)
"""

# numpy's own BLAS is another library, with other names, so it is an independent reference.
MULTIPLY = """
import hashlib, numpy as np, mlx.core as mx
mx.set_default_device(mx.cpu)
a, b = np.random.default_rng(7).standard_normal((2, 512, 512), dtype=np.float32)
product = np.array(mx.array(a) @ mx.array(b))
say(right=bool(np.allclose(product, a @ b, atol=1e-3)))
say(bits=hashlib.sha256(product.tobytes()).hexdigest())
"""

NO_PACKAGE = """
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "scipy_openblas32":
            raise ModuleNotFoundError(name)
import sys
sys.meta_path.insert(0, Absent())
"""

NO_SYSTEM = """
import ctypes
class NoSystem(ctypes.CDLL):
    def __init__(self, name, *args, **kwargs):
        if name and name.startswith("libopenblas"):
            raise OSError(f"{name}: cannot open shared object file")
        super().__init__(name, *args, **kwargs)
ctypes.CDLL = NoSystem
"""


def fresh(*code: str, **env: str) -> dict[str, Any]:
    """Run the code in a new interpreter; return the facts that it printed, and its log as `log`."""
    prelude = "import json\ndef say(**facts): print(json.dumps(facts), flush=True)\n"
    inherited = {k: v for k, v in os.environ.items() if k not in ("REWARM_BLAS", "LD_PRELOAD")}
    # One thread: the sums are split in the same places, so the same product has the same bits.
    fixed = {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", prelude + "\n".join(code)],
        env=inherited | fixed | env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = {"log": done.stderr.splitlines()}
    for line in done.stdout.splitlines():
        facts |= json.loads(line)
    return facts


@pytest.fixture(scope="module")
def own() -> dict[str, Any]:
    return fresh(ALONE, DECIDE, MULTIPLY, REWARM_BLAS="off")


@pytest.fixture(scope="module")
def default() -> dict[str, Any]:
    return fresh(PACKAGE, DECIDE, MULTIPLY)


@pytest.fixture
def blas() -> ModuleType:
    spec = importlib.util.spec_from_file_location("blas_under_test", SOURCE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def one_of(pattern: str) -> str:
    found = sorted(SITE.glob(pattern))
    if not found:
        pytest.skip(f"no {pattern} beside this MLX")
    return str(found[0])


def test_default_is_the_packaged_openblas(default: dict[str, Any]) -> None:
    assert default["name"].startswith("OpenBLAS 0.")
    assert default["name"].endswith("(scipy-openblas32)")
    assert default["path"].endswith("scipy_openblas32/lib/libscipy_openblas.so")
    assert default["note"] is None
    assert default["log"] == []
    assert default["right"]


def test_mlx_gives_the_bits_of_openblas_and_not_its_own(
    default: dict[str, Any], own: dict[str, Any]
) -> None:
    direct = fresh(
        ALONE,
        """
import ctypes, hashlib, numpy as np
library = ctypes.CDLL(blas.load().path)
address = lambda f: ctypes.cast(f, ctypes.c_void_p).value
say(same=address(ctypes.CDLL(None).cblas_sgemm) == address(library.scipy_cblas_sgemm))
a, b = np.random.default_rng(7).standard_normal((2, 512, 512), dtype=np.float32)
c, n, one = np.zeros_like(a), 512, ctypes.c_float(1)
at = lambda x: x.ctypes.data_as(ctypes.c_void_p)
row_major, plain = 101, 111
library.scipy_cblas_sgemm(row_major, plain, plain, n, n, n, one, at(a), n, at(b), n,
                          ctypes.c_float(0), at(c), n)
say(bits=hashlib.sha256(c.tobytes()).hexdigest())
""",
    )
    assert direct["same"]
    assert default["bits"] == direct["bits"]
    if os.uname().machine == "x86_64":  # on aarch64 both may add in the same order, with FMA
        assert default["bits"] != own["bits"]


def test_mlx_calls_what_is_published_for_each_of_its_types() -> None:
    # The calls are counted at the callee: only a call from libmlx gives these counts.
    calls = fresh(
        ALONE,
        """
import ctypes
calls = {}
def counter(name):
    def count(order, a, b, m, n, k): calls[name] = [m, n, k]
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int] * 6)(count)
counters = {name: counter(name) for name in blas.GEMMS}
blas._publish({n: ctypes.cast(f, ctypes.c_void_p).value for n, f in counters.items()})
import mlx.core as mx
mx.set_default_device(mx.cpu)
for kind in (mx.float32, mx.float64, mx.complex64):
    mx.eval(mx.ones((3, 5), kind) @ mx.ones((5, 4), kind))
say(**calls)
""",
    )
    assert calls == {
        "log": [],
        "cblas_sgemm": [3, 4, 5],
        "cblas_dgemm": [3, 4, 5],
        "cblas_cgemm": [3, 4, 5],
    }


def test_off_leaves_mlx_its_own(own: dict[str, Any]) -> None:
    assert own["name"] == "MLX's own (reference)"
    assert own["path"] is None
    assert own["note"] is None
    assert own["log"] == []
    assert own["right"]


@pytest.mark.parametrize(
    ("path", "why"),
    [("/nonexistent", "cannot open shared object file"), ("libm.so.6", "it has no cblas_sgemm")],
)
def test_a_library_that_will_not_do_is_named_and_the_default_used(
    path: str, why: str, default: dict[str, Any]
) -> None:
    got = fresh(ALONE, DECIDE, MULTIPLY, REWARM_BLAS=path)
    assert got["note"].startswith(f"REWARM_BLAS {path} not used: ")
    assert why in got["note"]
    assert got["log"] == [f"BLAS: {got['note']}"]
    assert got["name"] == default["name"]
    assert got["bits"] == default["bits"]


def test_a_path_is_taken(own: dict[str, Any]) -> None:
    path = one_of("mlx_cpu.libs/libblas-*")
    got = fresh(ALONE, DECIDE, MULTIPLY, REWARM_BLAS=path)
    assert got["name"] == f"{Path(path).name} (REWARM_BLAS)"
    assert got["path"] == path
    assert got["note"] is None
    assert got["bits"] == own["bits"]


def test_mlx_imported_first_is_left_alone_and_says_what_to_do(own: dict[str, Any]) -> None:
    got = fresh("import mlx.core", PACKAGE, DECIDE, MULTIPLY)
    assert got["name"] == "MLX's own (reference)"
    assert got["note"].startswith("import rewarm before mlx")
    assert got["log"] == [f"BLAS: {got['note']}"]
    assert got["right"]
    assert got["bits"] == own["bits"]


def test_without_any_openblas_one_line_says_how_to_get_it(own: dict[str, Any]) -> None:
    got = fresh(NO_PACKAGE, NO_SYSTEM, ALONE, DECIDE, MULTIPLY)
    assert got["name"] == "MLX's own (reference)"
    assert "pip install scipy-openblas32" in got["note"]
    assert got["log"] == [f"BLAS: {got['note']}"]
    assert got["right"]
    assert got["bits"] == own["bits"]


def test_a_system_openblas_is_taken_where_the_package_is_missing(
    blas: ModuleType, tmp_path: Path
) -> None:
    stand_in = tmp_path / blas.SYSTEM_NAMES[0]
    shutil.copy(one_of("mlx_cpu.libs/libblas-*"), stand_in)
    got = fresh(NO_PACKAGE, ALONE, DECIDE, MULTIPLY, LD_LIBRARY_PATH=str(tmp_path))
    assert got["name"].endswith("(system)")
    assert got["path"] == str(stand_in)
    assert got["note"] is None
    assert got["right"]


def test_the_package_goes_before_a_system_openblas(
    blas: ModuleType, default: dict[str, Any], tmp_path: Path
) -> None:
    shutil.copy(one_of("mlx_cpu.libs/libblas-*"), tmp_path / blas.SYSTEM_NAMES[0])
    got = fresh(ALONE, DECIDE, LD_LIBRARY_PATH=str(tmp_path))
    assert got["name"] == default["name"]


def test_no_process_is_started_and_no_file_written(default: dict[str, Any], tmp_path: Path) -> None:
    watch = """
import sys
seen = []
def hook(event, args):
    if event in ("subprocess.Popen", "os.system", "os.fork", "os.posix_spawn", "os.exec"):
        seen.append(event)
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        seen.append(args[0])
sys.addaudithook(hook)
"""
    there = {"PATH": "", "TMPDIR": str(tmp_path / "none"), "PYTHONDONTWRITEBYTECODE": "1"}
    got = fresh(watch, ALONE, DECIDE, "say(seen=seen)", **there)
    assert got["name"] == default["name"]
    assert got["note"] is None
    assert got["seen"] == []


def test_nothing_heavy_is_imported() -> None:
    got = fresh(ALONE, "blas.load()", "say(modules=list(sys.modules))")
    assert {"mlx", "mlx.core", "numpy", "scipy_openblas32"}.isdisjoint(got["modules"])


def test_a_blas_that_somebody_preloaded_is_named_and_kept(own: dict[str, Any]) -> None:
    path = one_of("mlx_cpu.libs/libblas-*")
    got = fresh(ALONE, DECIDE, MULTIPLY, LD_PRELOAD=path)
    assert got["name"] == f"{Path(path).name} (already loaded)"
    assert got["path"] == path
    assert got["note"] is None
    assert got["bits"] == own["bits"]
    off = fresh(ALONE, DECIDE, LD_PRELOAD=path, REWARM_BLAS="off")
    assert (off["name"], off["note"]) == (got["name"], None)
    late = fresh(ALONE, DECIDE, LD_PRELOAD=path, REWARM_BLAS="/some/other.so")
    assert late["note"] == (
        f"REWARM_BLAS=/some/other.so has no effect: {path} was loaded before rewarm"
    )


# numpy's wheel has an OpenBLAS with 64-bit integers. Here it gets the names of a 32-bit one.
WIDE = """
import ctypes, os, pathlib
library = ctypes.CDLL({path!r})
names = ("cblas_sgemm", "cblas_isamax")
symbols = {{name: blas._address(library, f"scipy_{{name}}64_") for name in names}}
wide = {folder!r} + "/wide.so"
pathlib.Path(wide).write_bytes(blas._shim(symbols))
"""


def test_a_blas_with_64_bit_integers_is_not_taken(default: dict[str, Any], tmp_path: Path) -> None:
    path = one_of("numpy.libs/libscipy_openblas64_*")
    wide = WIDE.format(path=path, folder=str(tmp_path)) + "os.environ['REWARM_BLAS'] = wide"
    got = fresh(ALONE, wide, DECIDE, MULTIPLY)
    assert "not used: it takes 64-bit integers" in got["note"]
    assert got["name"] == default["name"]
    assert got["bits"] == default["bits"]


def test_a_preloaded_blas_with_64_bit_integers_is_warned_of(tmp_path: Path) -> None:
    path = one_of("numpy.libs/libscipy_openblas64_*")
    wide = WIDE.format(path=path, folder=str(tmp_path)) + "ctypes.CDLL(wide, ctypes.RTLD_GLOBAL)"
    got = fresh(ALONE, wide, DECIDE)
    assert got["note"].startswith(f"{path} takes 64-bit integers")
    assert got["log"] == [f"BLAS: {got['note']}"]


def test_a_python_built_without_memfd_create_will_do(default: dict[str, Any]) -> None:
    without = "import os\nif hasattr(os, 'memfd_create'): del os.memfd_create"
    assert fresh(without, ALONE, DECIDE)["name"] == default["name"]


def test_a_kernel_that_gives_no_memory_file_is_told_of() -> None:
    refuse = """
import ctypes, errno
class Refusing(ctypes.CDLL):
    def memfd_create(self, name, flags):
        ctypes.set_errno(errno.EACCES)
        return -1
ctypes.CDLL = Refusing
"""
    got = fresh(NO_SYSTEM, refuse, ALONE, DECIDE, MULTIPLY)
    assert got["name"] == "MLX's own (reference)"
    assert got["note"].endswith("not used: no memory file: Permission denied")
    assert got["right"]


def test_shim_gives_each_name_its_address(blas: ModuleType) -> None:
    symbols = {f"rewarm_test_symbol_{i}": 0x1000 * i + 7 for i in range(1, 40)}
    blas._publish(symbols)
    everything = ctypes.CDLL(None)
    assert {name: blas._address(everything, name) for name in symbols} == symbols
    assert blas._address(everything, "rewarm_test_symbol_40") is None


def test_a_second_shim_does_not_stand_for_the_first(blas: ModuleType) -> None:
    for name in ("rewarm_test_first", "rewarm_test_second"):
        blas._publish({name: 4096})
        assert blas._address(ctypes.CDLL(None), name) == 4096


def test_a_loader_that_misplaces_the_shim_is_found_out_before_mlx_sees_it() -> None:
    # musl does this: it takes an absolute address for an offset.
    got = fresh(
        NO_SYSTEM,
        ALONE,
        """
shim = blas._shim
blas._shim = lambda symbols: shim({name: address + 64 for name, address in symbols.items()})
""",
        DECIDE,
        "say(exposed=blas._address(ctypes.CDLL(None), 'cblas_sgemm'))",
    )
    assert got["name"] == "MLX's own (reference)"
    assert "does not know absolute symbols" in got["note"]
    assert "pip install" not in got["note"]
    assert got["exposed"] is None


def test_nothing_that_goes_wrong_is_raised(blas: ModuleType, caplog: Any, monkeypatch: Any) -> None:
    def broken() -> None:
        raise RuntimeError("the roof")

    monkeypatch.setattr(blas, "_decide", broken)
    got = blas.load()
    assert got.name == "MLX's own (reference)"
    assert "the roof" in got.note
    assert blas.current() is got
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_threads_that_race_get_one_decision() -> None:
    got = fresh(
        ALONE,
        """
import logging, threading, time
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
decide = blas._decide
def slowly():
    time.sleep(0.1)
    return decide()
blas._decide = slowly
got = []
threads = [threading.Thread(target=lambda: got.append(blas.load())) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
say(answers=len(got), different=len({id(one) for one in got}), name=blas.current().name)
""",
    )
    assert got["answers"] == 8
    assert got["different"] == 1
    assert got["log"] == [f"INFO BLAS: {got['name']}"]


def test_a_forked_child_multiplies_on_the_same_blas(default: dict[str, Any]) -> None:
    child = f"if os.fork() == 0:\n    exec({MULTIPLY!r})\n    os._exit(0)\n"
    got = fresh(ALONE, DECIDE, "import os", child, "assert os.wait()[1] == 0")
    assert got["bits"] == default["bits"]


def test_on_a_mac_nothing_is_loaded() -> None:
    got = fresh(
        ALONE,
        "sys.platform = 'darwin'",
        DECIDE,
        "import ctypes; say(exposed=blas._address(ctypes.CDLL(None), 'cblas_sgemm'))",
    )
    assert got["name"] == "Accelerate"
    assert got["note"] is None
    assert got["exposed"] is None
