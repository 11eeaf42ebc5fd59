"""What the rooms need from each other, and what can be imported without a model."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("mlx", "mlx.core", "mlx_lm", "transformers")


@pytest.mark.parametrize(
    "name",
    [
        "rewarm",
        "rewarm.values",
        "rewarm.options",
        "rewarm.errors",
        "rewarm.prompt.messages",
        "rewarm.server.openai.parse",
        "rewarm.server.anthropic.parse",
    ],
)
def test_what_a_gateway_reads_needs_no_model_library(name: str) -> None:
    code = f"import sys, {name}; print(*(m for m in {HEAVY} if m in sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert said.stdout.split() == []
