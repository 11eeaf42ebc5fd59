"""Pocket's questions, tokenizer and template."""

from __future__ import annotations

from random import Random
from typing import Any

import mlx_lm
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from transformers import AutoTokenizer, PreTrainedConfig
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from rewarm.pocket import FOLDER
from tools.pocket import words
from tools.pocket.conversations import conversation
from tools.pocket.draw import Draw
from tools.pocket.skills import SKILLS, added, subtracted


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(str(FOLDER), config=PreTrainedConfig())


def test_it_is_small_and_loads_with_mlx_lm() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 16_000_000
    model, tokenizer = mlx_lm.load(str(FOLDER))
    assert sum(array.size for _, array in tree_flatten(model.parameters())) <= 8_000_000
    assert len(tokenizer) <= 4096
    assert [layer.is_linear for layer in model.layers] == [True, True, True, False] * 2
    question = {"role": "user", "content": "What is 2 + 3?"}
    prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True)
    said = mlx_lm.generate(model, tokenizer, prompt, max_tokens=128)
    assert said.split("</think>")[1].strip() == "5"


@given(text=st.text(max_size=60))
def test_any_text_round_trips(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_tokenizer_that_splits_like_qwen_gives_the_same_tokens(tokenizer: Any) -> None:
    """transformers uses Qwen's splitting for a model whose config has the type `qwen3_5`."""
    qwen = Qwen3_5Tokenizer.from_pretrained(str(FOLDER))
    ways = [str(t.backend_tokenizer.pre_tokenizer) for t in (tokenizer, qwen)]
    assert ways[0] != ways[1]
    for seed in range(20):
        draw = Draw(Random(seed), held_out=seed % 2 == 0)
        world = conversation(draw, "tools", 400)
        text = tokenizer.apply_chat_template(
            world.messages(), tools=world.schemas(), tokenize=False
        )
        assert tokenizer(text)["input_ids"] == qwen(text)["input_ids"]


def test_thinking_is_stripped_before_the_last_question_and_kept_in_a_tool_loop(
    tokenizer: Any,
) -> None:
    world = conversation(Draw(Random(1), held_out=True), "tools", 300)
    world.turns.clear()
    first, second = world.say("lookup"), world.ask("tools")

    def rendered(steps: int, **options: Any) -> str:
        text: str = tokenizer.apply_chat_template(
            world.messages() + second.messages(steps),
            tools=world.schemas(),
            tokenize=False,
            add_generation_prompt=True,
            **options,
        )
        return text

    assert first.steps[0].thinking not in rendered(0)
    assert first.answer in rendered(0)
    assert second.steps[0].thinking in rendered(1)
    assert rendered(1).endswith("<think>\n")
    assert rendered(1, enable_thinking=False).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("held_out", [False, True])
def test_names_and_values_are_held_out_by_their_spelling(held_out: bool) -> None:
    draw = Draw(Random(3), held_out=held_out)
    found = [make() for _ in range(100) for make in (draw.made_up, draw.number, draw.code)]
    assert {words.held_out(each) for each in found} == {held_out}


@pytest.mark.parametrize("skill", SKILLS)
def test_a_look_up_has_its_line_and_every_question_an_answer(skill: str) -> None:
    for seed in range(30):
        world = conversation(Draw(Random(seed), held_out=False), skill, 300)
        turn = world.ask(skill)
        assert turn.question
        assert turn.answer
        if turn.skill == "lookup":
            assert turn.answer in world.table.values()
            assert turn.steps[0].thinking.split('I find the line "')[1][:-2] in world.system


def test_what_thinking_quotes_of_a_tool_stands_in_the_prompt(tokenizer: Any) -> None:
    """The quote begins with the words of the question, so that Pocket can read on from there."""
    for seed in range(60):
        world = conversation(Draw(Random(seed), held_out=seed % 2 == 0), "tools", 400)
        text = tokenizer.apply_chat_template(
            world.messages(), tools=world.schemas(), tokenize=False
        )
        thinking = world.ask("tools").steps[0].thinking
        about = thinking.split('This is about "')[1].split('". I find the tool ')[0]
        quoted = thinking.split(". I find the tool ")[1]
        quoted = quoted[: quoted.index("}}") + 2]
        assert quoted in text
        assert quoted.startswith((f"{about}: ", f"{about} ", f'{{"{about}": '))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("get_weather", "weather get"),
        ("getWeather", "weather get"),
        ("get-weather.now", "weather now get"),
        ("getURL", "url get"),
        ("search", "search"),
        ("__", ""),
    ],
)
def test_a_tools_line_begins_with_the_words_of_its_name(
    tokenizer: Any, name: str, words: str
) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}],
        tools=[{"type": "function", "function": {"name": name}}],
        tokenize=False,
    )
    assert f'\n{words}: {{"{name}": {{}}}}\n' in text


@given(a=st.integers(0, 999), b=st.integers(0, 999))
def test_sums_are_right_and_their_steps_end_there(a: int, b: int) -> None:
    for (thinking, answer), right in ((added(a, b), a + b), (subtracted(a, b), a - b)):
        assert int(answer) == right
        assert thinking.endswith(f"That is {right}.")
