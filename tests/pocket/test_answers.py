"""Pocket answers through the server as it does alone and uncached, and it is right.

Its right answers depend on the exact prompt, so the state of another prompt would show."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import openai
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

import rewarm
from rewarm.cache.payload import PackedState, Rows
from rewarm.prompt.parse.answer import Answer
from rewarm.values import Message
from tests.server.servers import Running, running
from tests.sets import SOAK
from tools.pocket.evaluate import LONGEST_ANSWER, Question, questions
from tools.pocket.skills import Step, Turn

ALL = {"lookup": 50, "memory": 30, "arithmetic": 30, "tools": 30, "unknown": 30, "talk": 30}
ASKED = {skill: count if SOAK else count // 5 for skill, count in ALL.items()}
RIGHT = {"lookup": 98, "memory": 96, "arithmetic": 95, "tools": 95, "unknown": 95, "talk": 95}
"""The percentage of right answers that Pocket's card promises."""
LENGTH = 300
AT_ONCE = 8
PER_CONVERSATION = 5
CLOSE = 1e-3
"""Two tokens whose logprobs are closer than this may change places by rounding."""
CANDIDATES = 5
ROUNDING = 0.005
"""The rounding of a candidate's logprob. Pocket's answers have high probabilities: damage to one
layer's state moves the logprobs of other candidates, by 0.01 to 2, before it changes an answer."""


@dataclass(frozen=True)
class Said:
    reasoning: str
    text: str
    calls: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Alone:
    """The answer of a single run without any cache."""

    said: Said
    margin: float
    """The smallest distance of a chosen token's logprob from the next one's."""
    likeliest: np.ndarray[Any, Any]
    """Logprobs of the first few candidates for each token."""


@dataclass(frozen=True)
class Asked:
    question: Question
    expected: list[Alone]
    """One answer for each step: a tool call, and the answer after its result."""


@pytest.fixture(scope="module")
def pocket() -> Any:
    return rewarm.load("pocket")


@pytest.fixture
def server(pocket: Any) -> Iterator[Running]:
    options = {"model": pocket.model, "memory": "48MB"}
    with running(pocket.tokenizer, options, warm_ahead=False) as found:
        yield found


def conversations(tokenizer: Any, counts: dict[str, int]) -> list[list[Question]]:
    asked = [q for skill, n in counts.items() for q in questions(tokenizer, skill, LENGTH, n)]
    return [asked[i : i + PER_CONVERSATION] for i in range(0, len(asked), PER_CONVERSATION)]


def forked(question: Question) -> Question:
    """Ask the same question after another last turn."""
    world = question.world
    if len(world.turns) < 2:
        return question
    return Question(replace(world, turns=[*world.turns[:-1], world.ask("talk")]), question.turn)


def with_answers(pocket: Any, found: Iterable[Question]) -> list[Asked]:
    return [Asked(question, answers(pocket, question)) for question in found]


def answers(pocket: Any, question: Question) -> list[Alone]:
    again = Question(question.world, question.turn)
    found: list[Alone] = []
    while True:
        step = question.turn.steps[len(found)]
        messages, tools = again.messages(), again.world.schemas()
        found.append(says(pocket, messages, tools, step) or alone(pocket, messages, tools))
        if not again.take(taken(found[-1].said)):
            return found


def says(pocket: Any, messages: list[Message], tools: list[Any] | None, step: Step) -> Alone | None:
    """Return the right answer if a single run gives it: each token must be the likeliest one. One
    pass over the whole answer shows that, and costs less than generating it."""
    model, tokenizer = pocket
    prompt = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
    right = Turn("", "", (step,)).messages()[1]
    whole = tokenizer.apply_chat_template([*messages, right], tools=tools)
    end = len(prompt) + whole[len(prompt) :].index(tokenizer.eos_token_id) + 1
    assert whole[: len(prompt)] == prompt
    logits = model(mx.array(whole[: end - 1])[None])[0, len(prompt) - 1 :]
    if mx.argmax(logits, axis=-1).tolist() != whole[len(prompt) : end]:
        return None
    likeliest = ranked(logits)
    calls = ((step.call.name, json.dumps(step.call.arguments)),) if step.call else ()
    return Alone(Said(step.thinking, step.text, calls), margin(likeliest), likeliest)


def alone(pocket: Any, messages: list[Message], tools: list[Any] | None) -> Alone:
    model, tokenizer = pocket
    prompt = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
    answer = Answer(tokenizer, prompt[-8:], tools=tools)
    steps = generate_step(
        mx.array(prompt), model, max_tokens=LONGEST_ANSWER, prompt_cache=make_prompt_cache(model)
    )
    candidates = []
    for token, logprobs in steps:
        candidates.append(logprobs)
        if token in tokenizer.eos_token_ids:
            break
        answer.add(int(token))
    answer.finish()
    calls = tuple(_call(call["function"]) for call in answer.calls)
    likeliest = ranked(mx.stack(candidates))
    return Alone(Said(answer.reasoning, answer.text, calls), margin(likeliest), likeliest)


def ranked(logits: mx.array) -> np.ndarray[Any, Any]:
    """Return the logprobs of the candidates for each token, the best one first."""
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return np.sort(np.asarray(logprobs), axis=-1)[:, : -CANDIDATES - 1 : -1]


def margin(likeliest: np.ndarray[Any, Any]) -> float:
    return float((likeliest[:, 0] - likeliest[:, 1]).min())


def _call(function: Any) -> tuple[str, str]:
    return function["name"], json.dumps(json.loads(function["arguments"]))


@dataclass(frozen=True)
class Result:
    question: Question
    differs: bool


def over_http(client: openai.OpenAI, asked: Asked) -> Result:
    question = asked.question
    tools = question.world.schemas()
    for expected in asked.expected:
        reply = client.chat.completions.create(
            model="pocket",
            messages=as_sent(question.messages()),  # type: ignore[arg-type]
            tools=tools or openai.omit,  # type: ignore[arg-type]
            max_tokens=LONGEST_ANSWER,
            temperature=0,
            logprobs=True,
            top_logprobs=CANDIDATES,
        )
        message: Any = reply.choices[0].message
        functions = [call.function for call in message.tool_calls or ()]
        said = Said(
            getattr(message, "reasoning_content", "") or "",
            message.content or "",
            tuple(_call(function.model_dump()) for function in functions),
        )
        goes_on = question.take(taken(said))
        if said != expected.said:
            return Result(question, differs=expected.margin > CLOSE)
        logprobs: Any = reply.choices[0].logprobs
        found = [[c.logprob for c in token.top_logprobs] for token in logprobs.content]
        # The answer does not include the token that ends it.
        if np.abs(np.array(found) - expected.likeliest[: len(found)]).max() > ROUNDING:
            return Result(question, differs=True)
        if not goes_on:
            break
    return Result(question, differs=False)


def as_sent(messages: list[Message]) -> list[Message]:
    """Add the ids that a client sends."""
    sent: list[Message] = []
    for number, message in enumerate(messages):
        if "tool_calls" in message:
            calls = [{"id": f"call_{number}", **call} for call in message["tool_calls"]]
            sent.append({**message, "tool_calls": calls})
        elif message["role"] == "tool":
            sent.append({**message, "tool_call_id": f"call_{number - 1}"})
        else:
            sent.append(message)
    return sent


def taken(said: Said) -> Any:
    """Make an answer that the evaluation can mark."""
    calls = [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in said.calls
    ]
    found = SimpleNamespace(text=said.text, reasoning=said.reasoning, calls=calls)
    found.message = lambda: Answer.message(found)  # type: ignore[arg-type]
    return found


def burst(server: Running, asked: list[Asked]) -> list[Result]:
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        found = list(pool.map(lambda each: over_http(client, each), asked))
    server.settle()
    server.engine.core.cache.verify()
    return found


@pytest.mark.long
def test_answers_in_bursts_are_those_of_single_uncached_runs_and_right(
    pocket: Any, server: Running
) -> None:
    chats = conversations(pocket.tokenizer, ASKED)
    cold = with_answers(pocket, (chat[0] for chat in chats))
    warm = with_answers(pocket, (question for chat in chats for question in chat[1:3]))
    after_branches = with_answers(pocket, (forked(chat[3]) for chat in chats))
    after_evictions = with_answers(pocket, (chat[4] for chat in chats))

    cache = server.engine.core.cache
    results = burst(server, cold)
    hits = cache.stats().hits
    results += burst(server, warm)
    assert cache.stats().hits >= hits + len(warm)
    results += burst(server, after_branches)
    evicted = cache.stats().evictions
    fill(server)
    assert cache.stats().evictions > evicted
    results += burst(server, after_evictions)

    assert len(results) == sum(ASKED.values())
    assert [r.question.turn.question for r in results if r.differs] == []
    wrong = Counter(r.question.turn.skill for r in results if not r.question.right)
    asked = Counter(r.question.turn.skill for r in results)
    for skill, count in asked.items():
        assert 100 * (1 - wrong[skill] / count) >= RIGHT[skill], (skill, wrong[skill], count)


def fill(server: Running) -> None:
    """Send unrelated prompts until something is evicted."""
    with server.client() as client:
        for i in range(5):
            text = f"{i} " + "A word and then another one. " * 120
            reply = client.post("/v1/completions", json={"prompt": text, "max_tokens": 1})
            assert reply.status_code == 200, reply.text
    server.settle()


@pytest.mark.parametrize("layer", [0, 3] if SOAK else [3])
def test_a_state_of_another_prompt_shows(pocket: Any, server: Running, layer: int) -> None:
    """This is the negative control of the test above: answers depend on each layer's state."""
    damaged = asked_again(pocket, server, lambda cache: swap_one_layer(cache, layer))
    assert sum(result.differs for result in damaged) > len(damaged) / 2


def test_rows_of_another_prompt_show_as_wrong_answers(pocket: Any, server: Running) -> None:
    damaged = asked_again(pocket, server, swap_rows)
    assert all(result.differs for result in damaged)
    assert any(not result.question.right for result in damaged)


def asked_again(pocket: Any, server: Running, damage: Callable[[Any], None]) -> list[Result]:
    """Ask a second question in conversations whose stored prefixes were damaged after the first."""
    chats = conversations(pocket.tokenizer, {"lookup": 20, "memory": 20})
    first, second = (with_answers(pocket, (chat[i] for chat in chats)) for i in range(2))
    assert not any(result.differs for result in burst(server, first))
    damage(server.engine.core.cache)
    return burst(server, second)


def swap_one_layer(cache: Any, layer: int) -> None:
    """Put one recurrent layer's state of each checkpoint in the place of another conversation's.

    Neighbours in the tree are often of one conversation, and their states differ little."""
    held = [n.checkpoint for n in cache.nodes() if n.checkpoint]
    values = [checkpoint.state.unpack() for checkpoint in held]
    moved = [value[layer] for value in values]
    far = len(moved) // 2
    for checkpoint, value, other in zip(held, values, moved[far:] + moved[:far], strict=True):
        value[layer] = other
        checkpoint.state = PackedState.pack(value)


def swap_rows(cache: Any) -> None:
    """Put the rows of each node in the place of another's, cut or repeated to its length."""
    nodes = [n for n in cache.nodes() if n.rows]
    others = [joined(node.rows) for node in nodes]
    for node, arrays in zip(nodes, others[1:] + others[:1], strict=True):
        node.rows = replace(
            node.rows,
            segments=tuple(
                replace(s, arrays=tuple(as_long(a, s.stop - s.start) for a in arrays))
                for s in node.rows.segments
            ),
        )


def joined(rows: Rows) -> list[mx.array]:
    each = zip(*(segment.arrays for segment in rows.segments), strict=True)
    return [mx.concatenate(arrays, axis=2) for arrays in each]


def as_long(array: mx.array, tokens: int) -> mx.array:
    found = mx.take(array, mx.arange(tokens) % array.shape[2], axis=2)
    mx.eval(found)  # here: an operation belongs to the thread that made it
    return found
