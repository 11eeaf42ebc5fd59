"""A program whose model cannot be loaded gives the reason in one sentence, and ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5

import rewarm
from rewarm.errors import CannotLoad
from tests import tiny
from tests.cli.test_cli import rewarm_cli
from tests.sets import SOAK

Break = Callable[[Path], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a model that loads."""
    tiny.save(tmp_path / "model")
    return tmp_path / "model"


def without(pattern: str) -> Break:
    def remove(folder: Path) -> None:
        for path in folder.glob(pattern):
            path.unlink()

    return remove


def writing(name: str, content: str) -> Break:
    return lambda folder: (folder / name).write_text(content) and None


def saying(**sizes: Any) -> Break:
    """Change a size in config.json, and leave the weights as they were."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["text_config"] |= sizes
        (folder / "config.json").write_text(json.dumps(config))

    return change


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def a_terabyte(folder: Path) -> None:
    """Make a file of zeros that takes no space on disk."""
    header = {"w": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]}}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + (1 << 40))


def heads_that_do_not_divide(folder: Path) -> None:
    """Change the weights to match, so that the error shows only when the model runs."""
    saying(num_key_value_heads=3)(folder)
    config = json.loads((folder / "config.json").read_text())
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


BROKEN: list[tuple[Break, str]] = [
    (without("*"), "has no config.json: give a folder"),
    (without("config.json"), "has no config.json: give a folder"),
    (writing("config.json", '{"model_type": '), r"config.json cannot be read .*get it again"),
    (writing("config.json", "[]"), "config.json is not a JSON object"),
    (writing("config.json", "{}"), "config.json names no model_type"),
    (
        writing("config.json", '{"model_type": "frob"}'),
        "frob not supported.*mlx-lm .* does not know",
    ),
    (without("*.safetensors"), r"has no weights \(model\*.safetensors\)"),
    (cut, r"model.safetensors cannot be read \(it has [\d,]+ of [\d,]+ bytes\)"),
    (writing("model.safetensors", ""), "model.safetensors cannot be read"),
    (writing("model.safetensors", "\xff" * 999), "model.safetensors cannot be read"),
    (a_terabyte, "take 1,099.5 GB, and this machine has"),
    (without("*token*"), "has no tokenizer, such as tokenizer.json"),
    (without("tokenizer.json"), "knows no words"),
    (writing("tokenizer.json", '{"a":'), "tokenizer.json"),
    (writing("tokenizer.json", "{}"), "cannot be loaded"),
    (saying(num_hidden_layers=10**6), "num_hidden_layers = 1,000,000, and there are 55 weights"),
    (saying(num_hidden_layers=40), "Missing 477 parameters"),
    (saying(num_hidden_layers=0), "num_hidden_layers = 0: no model"),
    (saying(hidden_size=10**9), "Expected shape"),
    (saying(intermediate_size=10**12), "outside the supported range"),
    (saying(vocab_size=0), "vocab_size = 0: no model"),
    (saying(vocab_size=-5), "vocab_size = -5: no model"),
    (saying(max_position_embeddings=-1), "max_position_embeddings = -1: no model"),
    (saying(num_attention_heads=3), "Expected shape"),
    (saying(num_attention_heads=0), "ZeroDivisionError"),
    (saying(head_dim=-32), "Negative dimensions"),
    (saying(hidden_size="many"), "TypeError"),
]


@pytest.mark.parametrize(("damage", "says"), BROKEN)
def test_a_broken_model_is_named_with_what_is_wrong(damage: Break, says: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(CannotLoad, match=says) as raised:
        rewarm.load(folder)
    assert str(folder) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 600


def test_the_same_model_loads_when_nothing_is_broken(folder: Path) -> None:
    model, tokenizer = rewarm.load(folder)
    assert len(model.layers) == 4
    assert tokenizer.encode("Hello world")


ENDS_A_PROGRAM: list[tuple[Break, str]] = [
    (without("*token*"), "has no tokenizer"),
    (heads_that_do_not_divide, "it fails when it is run"),
    (saying(num_hidden_layers=10**6), "num_hidden_layers = 1,000,000"),
    (saying(hidden_size=10**9), "Expected shape"),
    (cut, "model.safetensors cannot be read"),
]


@pytest.mark.parametrize(
    ("command", "damage", "says"),
    [
        *[("serve", *each) for each in ENDS_A_PROGRAM[: 5 if SOAK else 3]],
        *[("chat", *each) for each in ENDS_A_PROGRAM[0 if SOAK else 4 :]],
    ],
)
def test_the_program_ends_with_a_sentence(
    command: str, damage: Break, says: str, folder: Path
) -> None:
    damage(folder)
    done = rewarm_cli(command, str(folder), *(["--port", "0"] if command == "serve" else []))
    assert done.returncode == 2
    assert says in done.stderr.splitlines()[-1]
    for never in ("Traceback", "is served", "terminate called"):
        assert never not in done.stderr + done.stdout


# How the process ends

# This load leaves the same behind as building a model: a random key of its thread.
FAILS = """
import os, sys
from rewarm.engine import Engine
import mlx.core as mx

def load():
    mx.random.uniform(shape=(4,))
    {work}
    raise ValueError("no")

engine = Engine(load)
engine.start()
assert engine.wait() == "failing"
thread = engine._thread.native_id
engine.stop()
print("lingers" if os.path.exists(f"/proc/self/task/{{thread}}") else "gone", flush=True)
sys.exit(2)
"""
WORK = "a = mx.ones((1000, 1000)); [a := a @ a for _ in range(8)]; mx.async_eval(a)"


@pytest.mark.parametrize("work", ["", WORK])
def test_a_process_ends_in_order_after_a_load_that_failed(work: str) -> None:
    """A thread that goes on may abort the process, and pending work may keep it from ending."""
    done = subprocess.run(
        [sys.executable, "-c", FAILS.format(work=work)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout == "gone\n"
    assert "terminate called" not in done.stderr
    assert done.returncode == 2
