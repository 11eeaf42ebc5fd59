"""The command line runs as a program of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

import rewarm
from rewarm import pocket
from rewarm.cache import PrefixCache
from rewarm.cli import cache as cli_cache
from rewarm.cli.app import main
from tests import zoo
from tests.runs import prompt, run


def rewarm_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rewarm", *arguments], capture_output=True, text=True, check=False
    )


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command in this process: most commands take less time than to start a process."""

    def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["rewarm", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return subprocess.CompletedProcess(arguments, code or 0, said.out, said.err)

    return run_here


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
    assert [row[-1] for row in rows] == ["Falk", "Noted.", "14:20"]
    assert "repeated" in done.stdout


def test_a_wrong_option_is_named() -> None:
    done = rewarm_cli("demo", "--turns", "0")
    assert done.returncode == 2
    assert "--turns" in done.stderr
    done = rewarm_cli("demo", "--reuse", "sometimes")
    assert done.returncode != 0
    assert "sometimes" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--host", "0.0.0.0"), "API key"),
        (("--api-key", ""), "API key is empty"),
        (("--memory", "12"), "memory='12'"),
        (("--reuse", "sometimes"), "sometimes"),
        (("--disk-size", "lots"), "disk_size='lots'"),
        (("--kv-bits", "7"), "kv_bits=7"),
        (("--chat-template-args", "nonsense"), "nonsense"),
        (("--chat-template-args", "[]"), "not a JSON object"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(
    here: Command, arguments: tuple[str, ...], says: str
) -> None:
    check_that_one_line_says(here("serve", *arguments), says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--kv-bits", "8", "--kv-group-size", "128", "--port", "0"), "kv_group_size=128"),
        (("no such model", "--port", "0"), "neither a folder nor"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_line(arguments: tuple[str, ...], says: str) -> None:
    check_that_one_line_says(rewarm_cli("serve", *arguments), says)


def check_that_one_line_says(done: subprocess.CompletedProcess[str], says: str) -> None:
    assert done.returncode == 2
    assert says in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = rewarm_cli("serve", "--port", port)
    assert done.returncode == 2
    assert f"127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


# `python -m rewarm` that prints at its end how many objects the collector leaves alone.
COUNTED = """
import atexit, gc, runpy
atexit.register(lambda: print(f"{gc.get_freeze_count()} objects frozen"))
runpy.run_module("rewarm", run_name="__main__", alter_sys=True)
"""


def test_serve_gives_a_page_and_a_line_to_paste(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", COUNTED, "serve", "--port", "0"], stderr=out, stdout=out
        )
        try:
            while "line to paste" not in log.read_text():
                assert process.poll() is None, log.read_text()
            shown = log.read_text()
            url = re.search(r"http://127.0.0.1:\d+/", shown)
            line = re.search(r"curl http.*", shown)
            assert url is not None
            assert line is not None
            page = httpx.get(url[0])
            assert page.status_code == 200
            assert "<title>Rewarm</title>" in page.text
            pasted = subprocess.run(
                line[0] + " --silent", shell=True, capture_output=True, text=True, check=False
            )
            if pasted.returncode != 127:  # no curl on this machine
                assert '"prefilled_tokens"' in pasted.stdout
                message = json.loads(pasted.stdout)["choices"][0]["message"]
                assert message["content"] == "4417"
                assert "door code: 4417" in message["reasoning_content"]
        finally:
            os.kill(process.pid, signal.SIGINT)
        assert process.wait(30) == 0
    assert len([line for line in log.read_text().splitlines() if "200 chat" in line]) <= 1
    frozen = re.search(r"(\d+) objects frozen", log.read_text())
    assert frozen is not None
    assert int(frozen[1]) > 100_000, "a collection looks at all that was loaded, again and again"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (str(pocket.FOLDER), "pocket"),
        ("/home/me/hub/models--org--Some-9B-4bit/snapshots/0a1b2c", "org/Some-9B-4bit"),
        ("/models/mine", "mine"),
        ("mlx_lm.models.llama", "llama"),
    ],
)
def test_a_model_is_listed_by_the_name_people_know(source: str, name: str) -> None:
    assert cli_cache._model(source) == name


def test_what_a_disk_tier_holds_can_be_seen_checked_and_deleted(
    tmp_path: Path, here: Command
) -> None:
    model, asked = zoo.tiny("llama"), prompt(100)
    cache = PrefixCache(model, memory="64MB", disk=str(tmp_path), chunk=32)
    for salt in (None, "tenant"):
        run(model, cache, asked, salt=salt)
    refused = rewarm_cli("cache", "stats", "--disk", str(tmp_path))
    assert refused.returncode == 2
    assert str(os.getpid()) in refused.stderr
    cache.close()

    assert "2 namespaces" in here("cache", "stats", "--disk", str(tmp_path)).stdout
    assert "llama" in here("cache", "ls", "--disk", str(tmp_path)).stdout
    assert "all sound" in here("cache", "verify", "--disk", str(tmp_path)).stdout
    some = next(tmp_path.rglob("*.safetensors"))
    some.write_bytes(b"x" * some.stat().st_size)
    damaged = here("cache", "verify", "--disk", str(tmp_path))
    assert damaged.returncode == 1
    assert "1 damaged" in damaged.stdout
    assert here("cache", "clear", "--disk", str(tmp_path), "--namespace", "x").returncode == 2
    cleared = here("cache", "clear", "--disk", str(tmp_path), "--salt", "tenant")
    assert "deleted" in cleared.stdout
    assert here("cache", "clear", "--disk", str(tmp_path)).returncode == 0
    assert not list(tmp_path.rglob("*.safetensors"))
    assert here("cache", "ls", "--disk", str(tmp_path / "none")).returncode == 2
