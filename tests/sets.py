"""Name the reasons for which a test may be skipped: any other skip fails its test.

Each reason has a condition on this machine. So a test that is skipped because it needs a GPU fails
where there is one, and a test that needs a recorded file fails where the files must be.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

SOAK = os.environ.get("REWARM_SOAK") == "1"
"""True in `make soak`: each test runs its whole range instead of a sample."""

RECORDED = os.environ.get("REWARM_CORPUS") == "recorded"
"""True in `make integration`: the inputs are those that others recorded."""

FOLDER = Path(os.environ.get("REWARM_SHARED") or Path(__file__).parents[2] / "shared")

LINUX = sys.platform == "linux"
IS_ROOT = os.geteuid() == 0


def has(program: str) -> bool:
    return shutil.which(program) is not None


def on_cuda() -> bool:
    import mlx.core as mx

    return bool(mx.cuda.is_available())


def on_metal() -> bool:
    import mlx.core as mx

    return bool(mx.metal.is_available())


def unnamed() -> bool:
    return RECORDED and "REWARM_SHARED" not in os.environ


EXPECTED: dict[str, Callable[[], bool]] = {
    # Conditions of the machine.
    "needs a CUDA device": lambda: not on_cuda(),
    "kernels run here": on_cuda,
    "mlx-lm has a kernel for Metal": on_metal,
    "only slow on Linux x86": lambda: not (LINUX and platform.machine() == "x86_64"),
    "needs glibc on Linux": lambda: not (LINUX and platform.libc_ver()[0] == "glibc"),
    "MLX has a fast BLAS of its own off Linux: nothing is loaded": lambda: not LINUX,
    "no .* beside this MLX": on_cuda,
    "only on a Linux CPU": lambda: not LINUX or on_cuda(),
    "Accelerate has no such setting": lambda: sys.platform == "darwin",
    # Conditions of programs and permissions.
    r"kernels are compiled by g\+\+, on Linux: it is not there": lambda: not (LINUX and has("g++")),
    "mounting needs root": lambda: not (IS_ROOT and has("mount")),
    "only root can make files of another user": lambda: not IS_ROOT,
    "cannot mount here: .*": lambda: IS_ROOT,
    # tools/integration-setup installs it by apt, as root.
    "no chromium: .*": lambda: not (LINUX and IS_ROOT and has("apt-get")),
    "needs curl and bash": lambda: not (has("curl") and has("bash")),
    # Conditions of recorded files.
    "no recorded files: .*": unnamed,
    "got empty parameter set.*": unnamed,
    "the template (does not render|refuses) this chat": lambda: RECORDED,
}
"""Patterns of reasons, each with a function that says whether it holds on this machine."""


def is_expected(reason: str) -> bool:
    return any(re.fullmatch(each, reason) and holds() for each, holds in EXPECTED.items())


def shared(path: str) -> Path:
    """Find a recorded file. Where REWARM_SHARED names the folder, the file must be there."""
    if not RECORDED:
        pytest.fail(f"{path} lies beside the repository: only `make integration` may read it")
    found = FOLDER / path
    if not found.exists():
        if "REWARM_SHARED" in os.environ:
            pytest.fail(f"{found} is missing: REWARM_SHARED names the folder that has it")
        pytest.skip(f"no recorded files: {found} is missing, and REWARM_SHARED names no folder")
    return found


def _failed(report: Any) -> None:
    """Turn the report of a skip into that of a failure, unless the skip was expected."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    path, line, text = report.longrepr
    reason = text.removeprefix("Skipped: ")
    if not is_expected(reason):
        report.outcome = "failed"
        report.longrepr = f"{path}:{line}: skipped, and tests/sets.py does not expect: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any) -> Generator[None, Any, Any]:
    report = yield
    _failed(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: Any) -> Generator[None, Any, Any]:
    """Do the same for a module that is skipped as a whole."""
    report = yield
    _failed(report)
    return report
