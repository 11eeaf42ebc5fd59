"""A short demonstration on a tiny hybrid model with random weights: it says nothing of use, and
computes its prompts exactly as a large one does."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import qwen3_5
from mlx_lm.tokenizer_utils import TokenizerWrapper
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rewarm.cache import PrefixCache
from rewarm.errors import InvalidOption
from rewarm.session import Reply, Session

SPECIAL = ("<|start|>", "<|end|>", "<think>", "</think>")

# Like the templates of thinking models: an answer's thinking is not part of the next prompt.
TEMPLATE = """\
{%- for message in messages -%}
<|start|>{{ message.role }}
{{ message.content.split('</think>')[-1] }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant
<think>{%- endif -%}"""

SYSTEM = (
    "You are the keeper of a small harbour. You know the tides, the boats and their owners, the "
    "prices at the fish market, and which of the old stories about the lighthouse are true. Answer "
    "in one or two sentences, and say so when you do not know."
)
QUESTIONS = (
    "Which boats are in today?",
    "And which of them belongs to the widow at the end of the quay?",
    "When is the next high tide?",
    "Is the story of the second lighthouse true?",
    "What does a crate of mackerel cost this morning?",
    "Who repaired the crane?",
)
ANSWER = "Three came in before dawn, and the blue one is still being unloaded."


def tiny_model(seed: int = 0) -> Any:
    """Gated delta-net and attention, 3:1, as in Qwen3.5; half a million parameters."""
    text = {
        "model_type": "qwen3_5_text",
        "vocab_size": 256 + len(SPECIAL),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "full_attention_interval": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    }
    mx.random.seed(seed)
    model = qwen3_5.Model(
        qwen3_5.ModelArgs.from_dict({"model_type": "qwen3_5", "text_config": text})
    )
    mx.eval(model.parameters())
    return model.eval()


def tiny_tokenizer() -> TokenizerWrapper:
    """One byte is one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {byte: i for i, byte in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = TEMPLATE
    return TokenizerWrapper(fast)


def show(turns: int, reuse: str) -> None:
    if reuse not in ("fast", "exact"):
        raise InvalidOption(f'reuse={reuse!r} is unknown: give "fast" or "exact"')
    console = Console()
    model = tiny_model()
    # A short chunk, so that a short chat has several.
    cache = PrefixCache(
        model, memory="64MB", reuse="exact" if reuse == "exact" else "fast", chunk=64
    )
    session = Session(model, tiny_tokenizer(), cache)
    console.print(
        "A tiny model with recurrent layers and attention, random weights, and a template\n"
        "that strips thinking. Every turn sends the whole history again.\n"
    )
    table = Table(
        "", "prompt", "cached", "again", "new", "first token", "", box=None, pad_edge=False
    )
    for column in table.columns[1:6]:
        column.justify = "right"
    messages: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
    for turn in range(turns):
        messages.append({"role": "user", "content": QUESTIONS[turn % len(QUESTIONS)]})
        _row(table, f"turn {turn + 1}", session.chat(messages, max_tokens=24))
        messages.append({"role": "assistant", "content": ANSWER})
    edited = [*messages[:-4], {"role": "user", "content": "Forget that. What is the weather like?"}]
    _row(table, "edited", session.chat(edited, max_tokens=24))
    _row(table, "repeated", session.chat(edited, max_tokens=24))
    console.print(table)
    stats = cache.stats()
    console.print(
        f"\n{stats.tokens:,} distinct tokens are held in {stats.held / 1e6:.2f} MB, "
        f"with {stats.checkpoints} checkpoints."
    )


def _row(table: Table, name: str, reply: Reply) -> None:
    used = reply.usage
    new = used.prefilled_tokens - used.replayed_tokens
    cells = 24
    cached = round(cells * used.cached_tokens / used.prompt_tokens)
    again = round(cells * used.replayed_tokens / used.prompt_tokens)
    rest = cells - cached - again
    bar = f"[green]{'█' * cached}[/][yellow]{'▒' * again}[/][red]{'░' * rest}[/]"
    table.add_row(
        name,
        f"{used.prompt_tokens:,}",
        f"{used.cached_tokens:,}",
        f"{used.replayed_tokens:,}",
        f"{new:,}",
        f"{reply.timings.ttft_ms:.0f} ms",
        bar,
    )
