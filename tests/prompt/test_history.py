"""A chat's boundaries do not depend on the chats that were rendered before it.

The grid of `exact` consists of boundaries, and another grid gives other bits.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from rewarm.errors import InvalidPrompt
from rewarm.prompt.render.encoder import Encoder
from rewarm.prompt.render.renderer import ChatRenderer, Prompt
from rewarm.values import Message
from tests import corpus
from tests.chats import (
    TOKENIZERS,
    TOOLS,
    assistant,
    call,
    result,
    system,
    tokenizer_of,
    user,
)
from tests.sets import SOAK

pytestmark = pytest.mark.corpus

QUESTION = user("When is the tide?")

ODD: tuple[list[Message], ...] = (
    [system(), assistant("Welcome."), QUESTION],
    [system(), assistant("Welcome.")],
    [system()],
    [system(), result("12:00")],
    [system(), user("A question?")],
    [system(), system("Be kind."), QUESTION],
    [system(), QUESTION, assistant("Yes.")],
    [system(), QUESTION, assistant("Yes."), result("12:00")],
    [system(), QUESTION, result("12:00")],
    [system(), QUESTION, system("Be kind.")],
    [system(), QUESTION, call(), result("12:00")],
    [system(), QUESTION, call(text="Let me see.") | {"reasoning_content": "Hm."}, result("1")],
)
"""Chats that begin as an ordinary one does, and go on in another way."""

ORDINARY: tuple[list[Message], ...] = (
    [system(), QUESTION],
    [system(), user("Is it high at Oban now?")],
    [system(), QUESTION, assistant("At noon."), user("And tomorrow?")],
    [system(), QUESTION, call("Ayr"), result("12:00")],
)

Options = dict[str, Any]


def rendered(renderer: ChatRenderer, chat: list[Message], **options: Any) -> Prompt | None:
    try:
        return renderer.render(chat, **options)
    except InvalidPrompt:
        return None


def places(renderer: ChatRenderer, chat: list[Message], **options: Any) -> Any:
    prompt = rendered(renderer, chat, **options)
    return prompt and (prompt.boundaries, prompt.generation)


def options_of(tokenizer: Any) -> Options:
    # A tokenizer of another model may lack what the template takes from it.
    return {k: "" for k in ("bos_token", "eos_token") if not getattr(tokenizer, k)}


REFUSE_ALL = ("llama.cpp/fireworks-ai-llama-3-firefunction-v2.jinja",)
"""Templates that need variables which only their own servers give."""

CASES = tuple(
    {"tools": tools, "every_turn": every_turn}
    for tools in (None, TOOLS)
    for every_turn in (True, False)
)


def pairs() -> list[tuple[str, str, int]]:
    """List every template with its tokenizers and a first case. A sample has one tokenizer each."""
    return [
        (template, tokenizer, i // len(TOKENIZERS) % len(CASES))
        for i, template in enumerate(corpus.template_names())
        for k, tokenizer in enumerate(TOKENIZERS)
        if (SOAK or i % len(TOKENIZERS) == k) and template not in REFUSE_ALL
    ]


@pytest.mark.parametrize(("template", "name", "begin"), pairs())
def test_an_ordinary_chat_has_the_places_of_a_fresh_renderer_after_odd_ones(
    template: str, name: str, begin: int
) -> None:
    tokenizer = tokenizer_of(name, template)
    checked = 0
    chats = ODD if SOAK else ODD[begin % 2 :: 2]
    for case in (*CASES[begin:], *CASES[:begin]):
        options = options_of(tokenizer) | case
        # Some templates refuse the system's message.
        first = int(rendered(ChatRenderer(tokenizer), ORDINARY[0], **options) is None)
        fresh = [places(ChatRenderer(tokenizer), chat[first:], **options) for chat in ORDINARY]
        if fresh[0] is None:
            continue
        for odd in chats:
            renderer = ChatRenderer(tokenizer)
            rendered(renderer, odd[first:], **options)
            for chat, expected in zip(ORDINARY, fresh, strict=True):
                assert places(renderer, chat[first:], **options) == expected, (odd, chat, case)
        checked += 1
        if not SOAK:
            break
    assert checked > 0


def any_chat(seed: random.Random) -> list[Message]:
    """Draw one of many chats that share their beginnings."""
    chat = [system(seed.choice(("Answer briefly.", "You keep the harbour.")))]
    for _ in range(seed.randrange(6)):
        thought = {"reasoning_content": "Hm."} if seed.random() < 0.3 else {}
        chat += seed.choice(
            (
                [user(seed.choice(("When is the tide?", "And now?", "1")))],
                [assistant(seed.choice(("At noon.", "Yes."))) | thought],
                [call() | thought, result(seed.choice(("12:00", "A result")))],
                [system("Be kind.")] if seed.random() < 0.3 else [user("Hm.")],
            )
        )
    return chat


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_the_places_of_any_chat_do_not_depend_on_the_chats_before_it(
    name: str, case: Options
) -> None:
    tokenizer = tokenizer_of(name)
    seed = random.Random(f"{name} {case}")
    renderer = ChatRenderer(tokenizer)
    checked = 0
    for _ in range(400 if SOAK else 40):
        chat = any_chat(seed)
        options = case | {"continue_final": chat[-1]["role"] == "assistant" and seed.random() < 0.5}
        expected = places(ChatRenderer(tokenizer), chat, **options)
        assert places(renderer, chat, **options) == expected, chat
        checked += expected is not None
    assert checked > 10


def test_what_is_known_of_a_text_does_not_depend_on_the_texts_before_it() -> None:
    """In the second text one added token contains another; in the first, none does."""
    tokenizer = Tokenizer(WordLevel({"?": 0, "a": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<x>"), AddedToken("b<x>", lstrip=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")
    plain, crossed = "<x> a <x> a", "<x> a <x> a b<x> a"
    encoder = Encoder(fast)
    assert len(encoder.encode(plain).anchors) == 2
    after, fresh = encoder.encode(crossed), Encoder(fast).encode(crossed)
    assert after.tokens.tolist() == fresh.tokens.tolist() == tokenizer.encode(crossed).ids
    assert after.anchors == fresh.anchors
