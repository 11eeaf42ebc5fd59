"""Count the work at the model call, over HTTP: prompt tokens computed per distinct token."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import qwen3_5

from rewarm.cache.tree import agreement, encode
from tests import corpus
from tests.chats import tokenizer_of
from tests.server.servers import Running, running
from tests.sets import SOAK

pytestmark = pytest.mark.corpus

WORDS = (  # noqa: SIM905
    "harbour tide boat crane quay lantern rope anchor market mackerel storm pilot ledger ferry "
    "keeper gull chart compass bell mast"
).split()


def text(words: int, seed: int = 0) -> str:
    return " ".join(WORDS[(seed * 7 + i * i + i // 3) % len(WORDS)] for i in range(words))


def model(vocabulary: int) -> Any:
    """Make a model small enough to count with: gated delta-net and attention, 3:1."""
    sizes = {
        "model_type": "qwen3_5_text",
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "full_attention_interval": 4,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    }
    mx.random.seed(0)
    args = {"model_type": "qwen3_5", "text_config": sizes}
    made = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(args))
    mx.eval(made.parameters())
    return made.eval()


class Counting:
    """A server, with a count of the tokens that it computed for prompts."""

    def __init__(self, server: Running) -> None:
        self.server = server
        self.client = server.client()
        server.model.computed = 0
        self.replies: list[dict[str, Any]] = []

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
        body = {"messages": messages, "max_tokens": 4, **options}
        response = self.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        reply: dict[str, Any] = response.json()
        self.replies.append(reply)
        message: dict[str, Any] = reply["choices"][0]["message"]
        return message

    def together(self, chats: list[list[dict[str, Any]]]) -> None:
        with ThreadPoolExecutor(len(chats)) as pool:
            list(pool.map(self.chat, chats))

    @property
    def prefilled(self) -> int:
        """Add up the prefilled tokens of all replies, and check the sum at the model call."""
        self.server.settle()
        said = sum(r["rewarm"]["prefilled_tokens"] for r in self.replies)
        decoded = sum(r["usage"]["completion_tokens"] for r in self.replies)
        warmed = self.server.engine.core.stats().warm_tokens
        assert self.server.model.computed == said + decoded + warmed
        for reply in self.replies:
            parts = reply["rewarm"]["cached_tokens"] + reply["rewarm"]["prefilled_tokens"]
            assert parts == reply["usage"]["prompt_tokens"]
        return int(said)

    @property
    def distinct(self) -> int:
        """Count the tokens of the prompts' trie. Each sorted prompt adds what it does not share."""
        prompts = sorted({encode(r.tokens) for r in self.server.engine.requests})
        total, before = 0, b""
        for each in prompts:
            total += len(each) // 4 - agreement(before, each)
            before = each
        return total

    @property
    def amplification(self) -> float:
        return self.prefilled / self.distinct


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_of("chatml")


@contextmanager
def counting(tokenizer: Any, **options: Any) -> Iterator[Counting]:
    made = model(len(tokenizer.get_vocab()) + 64)
    with running(tokenizer, {"model": made}, **options) as server:
        yield Counting(server)


def chat_of(*turns: str, system: str | None = None) -> list[dict[str, Any]]:
    """Make a chat of questions and answers in turn, beginning with a question."""
    first = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return [*first, *({"role": roles[i % 2], "content": t} for i, t in enumerate(turns))]


def test_three_bursts_of_eight_over_one_system_prompt(tokenizer: Any) -> None:
    system = text(1500)
    with counting(tokenizer) as work:
        for burst in range(3):
            questions = [text(12, seed=100 * burst + i) for i in range(8)]
            work.together([chat_of(q, system=system) for q in questions])
        assert work.amplification <= 1.05


def test_a_thinking_chat_of_twelve_turns(tokenizer: Any) -> None:
    with counting(tokenizer, warm_ahead=False) as work:
        turns: list[str] = []
        for i in range(12):
            turns.append(text(30, seed=i))
            work.chat(chat_of(*turns, system=text(80)))
            turns.append(f"<think>\n{text(20, seed=i)}\n</think>\n\n{text(25, seed=50 + i)}")
        assert work.amplification <= 1.03


def test_a_chat_forked_at_earlier_turns(tokenizer: Any) -> None:
    with counting(tokenizer, warm_ahead=False) as work:
        turns: list[str] = []
        for i in range(6):
            turns.append(text(40, seed=i))
            work.chat(chat_of(*turns, system=text(80)))
            turns.append(text(40, seed=50 + i))
        for i in (5, 3, 1, 4, 2):
            forked = [*turns[: 2 * i], text(40, seed=200 + i)]
            work.chat(chat_of(*forked, system=text(80)))
        assert work.amplification <= 1.05


def test_the_same_prompt_three_times(tokenizer: Any) -> None:
    with counting(tokenizer) as work:
        for _ in range(3):
            work.chat(chat_of(text(300), system=text(100)))
        assert work.amplification <= 1.02


def test_agents_with_tools_replayed_turn_by_turn(tokenizer: Any) -> None:
    with counting(tokenizer, warm_ahead=False) as work:
        for messages in corpus.conversations(20 if SOAK else 4):
            for i, message in enumerate(messages):
                if message["role"] == "assistant":
                    work.chat(messages[:i], max_tokens=2)
        assert work.amplification <= 1.10


@pytest.mark.long
def test_with_warm_ahead_a_turn_computes_its_own_new_message(tokenizer: Any) -> None:
    with counting(tokenizer) as work:
        messages: list[dict[str, Any]] = [{"role": "system", "content": text(80)}]
        new = 0
        for i in range(12):
            question = text(30, seed=i)
            messages.append({"role": "user", "content": question})
            with work.server.says(
                f"{text(20, seed=i)}\n</think>\n\n{text(25, seed=50 + i)}<|im_end|>"
            ):
                messages.append(work.chat(messages, max_tokens=200))
            work.server.settle()
            if i:
                new += len(tokenizer.encode(question))
        later = [r["rewarm"]["prefilled_tokens"] for r in work.replies[1:]]
        assert messages[-1]["reasoning_content"]
        assert sum(later) / 11 <= new / 11 + 40
        assert work.prefilled > 0
