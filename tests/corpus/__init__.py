"""The conversations, templates, tokenizers and traces that tests run on: generated, or recorded.

A test that asks this module for its inputs is marked `corpus`. `make test` runs it on inputs that
the modules here generate: small, seeded, written for this project. `make integration` runs the same
function on inputs that others recorded or published (REWARM_CORPUS=recorded); see docs/testing.md.

Both have the tokenizers `chatml` and `harmony`, named for the format of their own templates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from tests.sets import RECORDED

from . import agents, recorded, sessions, tokenizers

TAKES_PARTS = ("content_parts.jinja", "trl/idefics3.jinja", "trl/llava_next.jinja")
"""Templates that read contents as lists of parts only."""

NO_TOOLS = (
    *("no_system.jinja", "plain_text.jinja", "system_in_first_question.jinja"),
    "content_parts.jinja",
)
"""Generated templates that refuse calls and results, or leave the calls out."""


def conversations(count: int) -> list[list[dict[str, Any]]]:
    """Return whole conversations of agents with tool calls, in OpenAI's form."""
    return recorded.conversations()[:count] if RECORDED else agents.conversations(count)


def template_names() -> list[str]:
    if RECORDED:
        return recorded.template_names()
    return sorted(path.name for path in tokenizers.TEMPLATES.glob("*.jinja"))


def template(name: str) -> str:
    return recorded.template(name) if RECORDED else (tokenizers.TEMPLATES / name).read_text()


def own_template(tokenizer: str) -> str:
    """Return the template that a tokenizer comes with."""
    if RECORDED:
        return recorded.own_template(tokenizer)
    return (tokenizers.TEMPLATES / f"{tokenizer}.jinja").read_text()


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return `chatml` or `harmony`: always one object, with its own template set again."""
    found = recorded.tokenizer(name) if RECORDED else tokenizers.trained(name)
    found.chat_template = own_template(name)
    return found


def session_files(folder: Path) -> list[list[Path]]:
    """Return files of traces of coding agents, in groups of six. Generated ones go to `folder`."""
    if RECORDED:
        return [recorded.sessions()]
    return [sessions.write(folder, 6, seed) for seed in range(3)]
