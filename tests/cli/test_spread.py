"""Commands take their options from the dataclasses of rewarm/options.py."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from rewarm.cli.spread import spread
from rewarm.errors import InvalidOption
from rewarm.options import CacheOptions, EngineOptions, ModelOptions, ServerOptions

KINDS = (ServerOptions, EngineOptions, CacheOptions, ModelOptions)


def given(*arguments: str) -> list[Any]:
    """Return the values that a command gets for these arguments."""
    got: list[Any] = []
    app = typer.Typer()

    @app.command()
    @spread
    def command(
        name: str = "pocket",
        *,
        server: ServerOptions,
        engine: Annotated[EngineOptions, "context"],
        cache: CacheOptions,
        source: ModelOptions,
    ) -> None:
        """Do nothing."""
        got.extend((name, server, engine, cache, source))

    done = CliRunner().invoke(app, arguments)
    if isinstance(done.exception, InvalidOption):
        raise done.exception
    assert done.exit_code == 0, done.output
    return got or [done.output]


def test_without_options_each_has_its_own_default() -> None:
    assert given() == ["pocket", *(kind() for kind in KINDS)]


def test_what_is_given_arrives_with_its_type() -> None:
    _, server, engine, cache, source = given(
        *("--port", "1", "--no-warm-ahead", "--chat-template-args", '{"a": 1}'),
        *("--context", "5", "--memory", "4GB", "--kv-bits", "8", "--trust-remote-code"),
    )
    assert server == ServerOptions(port=1, warm_ahead=False, chat_template_args={"a": 1})
    assert engine == EngineOptions(context=5)
    assert cache == CacheOptions(memory="4GB", kv_bits=8)
    assert source == ModelOptions(trust_remote_code=True)


def test_the_environment_gives_what_a_field_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARM_API_KEY", "secret")
    assert given()[1].api_key == "secret"


def test_each_field_with_a_help_text_is_an_option() -> None:
    (shown,) = given("--help")
    for kind in KINDS:
        for field in fields(kind):
            name = "--" + field.name.replace("_", "-")
            offered = "help" in field.metadata and (kind, field.name) not in OTHERS
            assert (f" {name} " in shown) == offered, name


OTHERS = {(EngineOptions, "max_batch"), (EngineOptions, "max_queue")}
"""Engine options with a help text that this command leaves out."""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--max-batch", "1"), "No such option"),
        (("--chat-template-args", "{"), "--chat-template-args '{' is not JSON"),
        (("--chat-template-args", "3"), "is not a JSON object"),
        (("--chat-template-args", '{"tools": 1}'), "cannot be given"),
        (("--port", "65536"), "port=65536"),
        (("--chunk", "1"), "chunk=1"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_it(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises((InvalidOption, AssertionError), match=says):
        given(*arguments)
