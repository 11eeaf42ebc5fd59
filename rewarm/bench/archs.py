"""Models with the dimensions of real ones and random weights, to measure speed and bytes.

The configurations are those that the models' makers publish. Only the context is longer, so that a
prompt of 100,000 tokens fits.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_map

from rewarm.errors import InvalidOption

CONTEXT = 262_144

Config = dict[str, Any]


def _qwen3(hidden: int, layers: int, heads: int, inner: int, tied: bool) -> Config:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": tied,
    }


def _qwen3_5(
    hidden: int, layers: int, heads: int, kv: int, inner: int, values: int, tied: bool, **text: int
) -> Config:
    """Make the configuration of a Qwen3.5. `text` are other fields of its text model."""
    return {
        "model_type": "qwen3_5",
        "text_config": {
            "model_type": "qwen3_5_text",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "intermediate_size": inner,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "head_dim": 256,
            "vocab_size": 248_320,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": values,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": tied,
            **text,
        },
    }


def _small_hybrid(
    hidden: int, layers: int, heads: int, kv: int, inner: int, keys: int, values: int, **text: int
) -> Config:
    """Make a Qwen3.5 for a CPU, with heads of 64 unless `text` says otherwise."""
    sizes = {
        "head_dim": 64,
        "linear_num_key_heads": keys,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "vocab_size": 8192,
    }
    return _qwen3_5(hidden, layers, heads, kv, inner, values, tied=True, **{**sizes, **text})


def _gemma3(hidden: int, layers: int, heads: int, kv: int, inner: int, window: int) -> Config:
    return {
        "model_type": "gemma3_text",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": 256,
        "vocab_size": 262_144,
        "query_pre_attn_scalar": 256,
        "sliding_window": window,
        "sliding_window_pattern": 6,
        "max_position_embeddings": CONTEXT,
    }


_HEADS_32 = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}

ARCHS: dict[str, Config] = {
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288, tied=False),
    # Nobody published this one: the smallest Qwen3.5 with the layers of a 0.6B.
    "qwen3.5-0.6b": _qwen3_5(1024, 24, 8, 2, 3072, 16, tied=True),
    "qwen3.5-9b": _qwen3_5(4096, 32, 16, 4, 12288, 32, tied=False),
    "nemotron-h-4b": {
        "model_type": "nemotron_h",
        "hidden_size": 3072,
        "num_hidden_layers": 52,
        "hybrid_override_pattern": list("M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"),
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": False,
        "mamba_num_heads": 112,
        "mamba_head_dim": 64,
        "mamba_proj_bias": False,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "n_groups": 8,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "vocab_size": 131_072,
        "max_position_embeddings": CONTEXT,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "rope_theta": 150_000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "vocab_size": 201_088,
    },
    "gemma3-270m": _gemma3(640, 18, 4, 1, 2048, 512),
    "gemma3-4b": _gemma3(2560, 34, 8, 4, 10240, 1024),
    # Small enough for two CPU cores: one for each way in which a model can be resumed.
    "attention-tiny": {
        **_qwen3(256, 4, 4, 512, tied=True),
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 8192,
    },
    "window-tiny": {**_gemma3(256, 6, 4, 1, 512, 128), "head_dim": 64, "vocab_size": 8192},
    "hybrid-tiny": _small_hybrid(256, 4, 4, 2, 512, keys=2, values=4),
    # Large enough that the operations of a step count, and not their launch.
    "attention-small": {
        **_qwen3(576, 10, 9, 1536, tied=False),
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 1536,
    },
    "hybrid-8x256": _small_hybrid(256, 8, 4, 2, 682, keys=4, values=4),
    "hybrid-12x384": _small_hybrid(384, 12, 6, 2, 1024, keys=6, values=6),
    # 1 and 8 KB of rows a token.
    "hybrid-narrow": _small_hybrid(128, 4, 4, 4, 256, keys=2, values=4, head_dim=32, **_HEADS_32),
    "hybrid-wide": _small_hybrid(128, 4, 16, 16, 256, keys=2, values=4, **_HEADS_32),
}


def config(name: str) -> Config:
    if name not in ARCHS:
        raise InvalidOption(f"{name!r} is an unknown model: give one of {', '.join(ARCHS)}")
    return ARCHS[name]


def text_config(name: str) -> Config:
    """Give the part of the configuration with the sizes of the text model."""
    found = config(name)
    return cast(Config, found.get("text_config", found))


def vocabulary(name: str) -> int:
    return cast(int, text_config(name)["vocab_size"])


def dtype() -> mx.Dtype:
    """Give the type of the weights: MLX's CPU backend has no experts in half precision, and is slow
    at the other operations."""
    return mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16


def build(name: str, dtype: mx.Dtype = mx.bfloat16, seed: int = 0) -> Any:
    """Make a model of mlx-lm's own classes. Its weights stay lazy, so that only reading its shapes
    takes no memory."""
    made = config(name)
    module = importlib.import_module(f"mlx_lm.models.{made['model_type']}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(made))
    model.update(
        tree_map(
            lambda a: a.astype(dtype) if mx.issubdtype(a.dtype, mx.floating) else a,
            model.parameters(),
        )
    )
    return model.eval()


def random_model(name: str) -> Any:
    """Make a model with weights, ready to run."""
    model = build(name, dtype())
    mx.eval(model.parameters())
    return model
