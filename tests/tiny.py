"""A tiny hybrid model with random weights, and tokenizers of bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|start|>", "<|end|>", "<think>", "</think>")

# Like the templates of thinking models, it leaves an answer's thinking out of the next prompt.
TEMPLATE = """\
{%- for message in messages -%}
<|start|>{{ message.role }}
{{ message.content.split('</think>')[-1] }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant
<think>{%- endif -%}"""

END = "<|end|>"

# It is like the templates of thinking models that call tools.
TOOL_TEMPLATE = """\
{%- if tools -%}<|start|>tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor -%}<|end|>{%- endif -%}
{%- set last = namespace(user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
<|start|>{{ m.role }}
{%- if m.reasoning_content and loop.index0 > last.user %}
<think>{{ m.reasoning_content }}</think>{%- endif %}
{{ m.content }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor -%}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant
<think>{%- if enable_thinking is defined and not enable_thinking -%}</think>{%- endif -%}
{%- endif -%}"""


def _config() -> dict[str, Any]:
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
    return {"model_type": "qwen3_5", "text_config": text}


def tiny_model(seed: int = 0) -> Any:
    """Make a model of half a million parameters: gated delta-net and attention, 3:1, as Qwen3.5."""
    mx.random.seed(seed)
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(_config()))
    mx.eval(model.parameters())
    return model.eval()


def tiny_tokenizer() -> TokenizerWrapper:
    return TokenizerWrapper(byte_tokenizer())


def tool_tokenizer() -> TokenizerWrapper:
    """Make a tokenizer of bytes whose template has thinking and tool calls in JSON."""
    fast = byte_tokenizer()
    fast.chat_template = TOOL_TEMPLATE
    return TokenizerWrapper(
        fast,
        tool_call_start=json_tools.tool_call_start,
        tool_call_end=json_tools.tool_call_end,
        tool_parser=json_tools.parse_tool_call,
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {byte: i for i, byte in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = TEMPLATE
    return fast


def save(folder: Path) -> None:
    """Write the model and the tokenizer as a folder that mlx-lm loads."""
    folder.mkdir()
    byte_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(_config()))
    weights = dict(tree_flatten(tiny_model().parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
