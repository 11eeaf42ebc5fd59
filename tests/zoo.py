"""Tiny models with random weights, one for each mlx-lm architecture worth a cache test.

Every model is the real class of mlx-lm at toy dimensions, in float32, so that it runs on any
CPU. The weights are random but not arbitrary: `_draw` says what makes the logits depend on every
token of the history.
"""

from copy import deepcopy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes

from rewarm import accel
from tests.sets import SOAK

Config = dict[str, Any]

VOCABULARY = 512
WINDOW = 32


def _all(value: Any, names: str) -> Config:
    return dict.fromkeys(names.split(), value)


# Configs spell one quantity in many ways, and every ModelArgs ignores the keys it does not know.
# So one set of sizes serves all, and the groups below it add the keys of a family of models.
SIZES: Config = {
    **_all(VOCABULARY, "vocab_size vocab_size_per_layer_input"),
    **_all(128, "hidden_size hidden_dim block_dim dim_model_base"),
    **_all(192, "intermediate_size ffn_hidden_size dense_intermediate_size intermediate_size_mlp"),
    **_all(64, "expert_ffn_hidden_size share_expert_dim global_head_dim"),
    **_all(16, "rotary_dim hidden_size_per_layer_input"),
    **_all(4, "num_hidden_layers num_attention_heads swa_num_attention_heads num_heads"),
    **_all(2, "num_key_value_heads swa_num_key_value_heads num_kv_heads num_attention_groups"),
    **_all(32, "head_dim hidden_size_per_head v_head_dim swa_head_dim swa_v_head_dim"),
    **_all(WINDOW, "sliding_window sliding_window_size window_size attention_window_size"),
    **_all(WINDOW, "attention_chunk_size loop_window_size"),
    **_all(65536, "max_position_embeddings model_max_length"),
    **_all(1e-5, "rms_norm_eps norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon"),
    **_all(10000.0, "rope_theta rope_local_base_freq swa_rope_theta"),
    **_all(1.0, "embedding_multiplier key_multiplier attention_out_multiplier scale_depth"),
    **_all(1.0, "residual_multiplier lm_head_multiplier logits_scaling logit_scale scale_emb"),
    **_all(1.0, "ssm_in_multiplier ssm_out_multiplier output_multiplier"),
    **_all(1.5, "block_ffn_dim_multiplier hidden_dim_scale_factor"),
    **_all(30.0, "final_logit_softcapping logits_soft_cap"),
    **_all(False, "attention_bias mlp_bias use_bias conv_bias tie_word_embeddings"),
    "query_pre_attn_scalar": 32.0,
    "attention_multiplier": 32**-0.5,
    "block_auto_adjust_ff_dim": False,
    "block_multiple_of": 32,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "use_qk_norm": True,
    "conv_L_cache": 3,
}

MOE: Config = {
    **_all(4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    **_all(2, "num_experts_per_tok num_experts_per_token moe_top_k moe_topk top_k_experts"),
    **_all(64, "moe_intermediate_size shared_intermediate_size shared_expert_intermediate_size"),
    **_all(64, "moe_shared_expert_intermediate_size"),
    **_all(1, "n_shared_experts num_shared_experts num_shared_expert n_group topk_group"),
    **_all(1, "first_k_dense_replace num_dense_layers decoder_sparse_step"),
    **_all(1.0, "routed_scaling_factor route_scale moe_router_scaling_factor"),
    **_all(True, "norm_topk_prob use_expert_bias use_mixed_mlp_moe"),
    "mlp_only_layers": [],
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}

MLA: Config = {
    **_all(32, "kv_lora_rank qk_nope_head_dim v_head_dim o_lora_rank"),
    **_all(4, "num_key_value_heads"),
    **_all(48, "q_lora_rank"),
    **_all(16, "qk_rope_head_dim"),
}

# Attention over the keys that an indexer picks, fewer than a prompt has tokens. Every pick is a
# choice between scores that rounding can swap: few layers and few picks keep that rare.
DSA: Config = {
    **_all(32, "index_head_dim index_topk"),
    "index_n_heads": 8,
    "num_hidden_layers": 3,
    "moe_layer_freq": 1,
}

# With ranks below the hidden size its attention would pick few tokens.
LONGCAT: Config = {
    **_all(128, "q_lora_rank kv_lora_rank"),
    **_all(True, "mla_scale_q_lora mla_scale_kv_lora"),
    **_all(2, "num_layers zero_expert_num"),
    "attention_method": "MLA",
    "zero_expert_type": "identity",
}

DELTA_RULE: Config = {
    **_all(32, "linear_key_head_dim linear_value_head_dim"),
    **_all(4, "linear_num_value_heads linear_conv_kernel_dim"),
    "linear_num_key_heads": 2,
    "full_attention_interval": 3,
}

KDA: Config = {
    "linear_attn_config": {
        **_all(4, "num_heads short_conv_kernel_size"),
        "head_dim": 32,
        "kda_layers": [1, 2, 4],
    }
}

# Lightning attention: its state decays at fixed rates.
LIGHTNING: Config = {"layer_group_size": 2, "group_norm_size": 2}

MAMBA: Config = {
    **_all(16, "state_size ssm_state_size mamba_d_state"),
    **_all(4, "conv_kernel mamba_d_conv mamba_num_heads mamba_n_heads"),
    **_all(32, "mamba_head_dim mamba_d_head"),
    **_all(2, "n_groups mamba_n_groups mamba_expand"),
    **_all(True, "use_conv_bias mamba_conv_bias"),
    "mamba_d_ssm": 128,
    "mamba_proj_bias": False,
    "time_step_rank": 8,
    "time_step_limit": (0.0, float("inf")),
}

ROPE: Config = {"rope_type": "default", "rope_theta": 10000.0}
ROPE_PER_KIND: Config = {"rope_parameters": _all(ROPE, "sliding_attention full_attention")}
YARN: Config = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "llama_4_scaling_beta": 0.1,
}

DYNAMIC_NTK: Config = {"rope_scaling": {"type": "dynamic", "rope_type": "dynamic", "factor": 2.0}}
"""Changes for `tiny`. A test adds a `max_position_embeddings` that its prompts cross."""

LAYER_TYPES = {
    "a": "attention",
    "c": "conv",
    "f": "full_attention",
    "l": "linear_attention",
    "m": "mamba",
    "s": "sliding_attention",
    "x": "conv_mixer",
}


def _config(model_type: str, *groups: Config, layers: str = "", **own: Any) -> Config:
    config: Config = {"model_type": model_type, **SIZES}
    for group in groups:
        config |= group
    if layers:
        config["layer_types"] = [LAYER_TYPES[kind] for kind in layers]
        config["num_hidden_layers"] = len(layers)
    return config | own


def _wrapped(config: Config) -> Config:
    """Make the config of a multimodal model, with the language model's inside."""
    outer = {key: config[key] for key in ("model_type", "vocab_size")}
    return outer | {"text_config": config}


def _block(attention: Config, ffn: Config) -> Config:
    return {"attention": attention, "ffn": ffn}


ARCHITECTURES: dict[str, Config] = {
    # Full attention in every layer.
    "llama": _config("llama"),
    "qwen2": _config("qwen2", tie_word_embeddings=True),
    "qwen3": _config("qwen3"),
    "qwen3_moe": _config("qwen3_moe", MOE),
    "phi3": _config("phi3"),
    "gemma2": _config("gemma2"),
    "glm4_moe": _config("glm4_moe", MOE),
    "olmo2": _config("olmo2"),
    "internlm2": _config("internlm2", bias=False),
    "internlm3": _config("internlm3", bias=False, qkv_bias=False),
    "mixtral": _config("mixtral", MOE),
    "minimax": _config("minimax", MOE),
    "deepseek_v3": _config("deepseek_v3", MOE, MLA),
    "minicpm3": _config("minicpm3", MLA, rope_scaling={}),
    # Layers that share K/V, have none, or run twice, so there is not one cache for each layer.
    "hunyuan": _config(
        "hunyuan",
        MOE,
        use_cla=True,
        cla_share_factor=2,
        rope_scaling={"type": "dynamic", "factor": 1.0, "alpha": 1.0},
    ),
    "afm7": _config("afm7", num_layers=5, num_kv_reuse_layers=2),
    "nanbeige": _config("nanbeige", num_hidden_layers=2, num_loops=2),
    "iquestloopcoder": _config("iquestloopcoder", num_hidden_layers=3, loop_num=2),
    "nemotron-nas": _config(
        "nemotron-nas",
        block_configs=[
            _block({"n_heads_in_group": 2}, {"ffn_mult": 1.0}),
            _block({"no_op": True}, {"ffn_mult": 1.0}),
            _block({"n_heads_in_group": 4}, {"no_op": True}),
            _block({"replace_with_linear": True}, {"ffn_mult": 1.0}),
        ],
    ),
    # Several caches in one layer.
    "deepseek_v32": _config("deepseek_v32", MOE, MLA, DSA),
    "glm_moe_dsa": _config("glm_moe_dsa", MOE, MLA, DSA, rope_parameters=ROPE),
    # This head_dim is no multiple of 16, which leaves out the model's own rounding to fp8 and fp4:
    # a value on the edge of a step would turn the last bit of a sum into a visible difference.
    "deepseek_v41": _config(
        "deepseek_v41",
        *(MOE, MLA, DSA),
        **_all(40, "head_dim index_head_dim"),
        **_all(2, "o_groups hc_mult"),
        num_hidden_layers=5,
        compress_ratios=[0, 4, 4, 1, 1],
        kv_source_layer_ids=[1, 3],
        index_source_layer_ids=[1, 3, 4],
        candidate_source_layer_id=3,
        candidate_topk_blocks=12,
        candidate_block_size=4,
        hc_sinkhorn_iters=5,
        rms_norm_eps=1e-6,
    ),
    "minimax_m3_vl": _wrapped(
        _config(
            "minimax_m3_vl",
            *(MOE, DSA),
            **_all([0, 1, 1], "moe_layer_freq sparse_attention_freq"),
            index_n_heads=2,
            index_block_size=16,
            index_topk_blocks=6,
        )
    ),
    "longcat_flash": _config("longcat_flash", MOE, MLA, LONGCAT),
    "longcat_flash_ngram": _config(
        "longcat_flash_ngram",
        *(MOE, MLA, LONGCAT),
        **_all(2, "ngram_vocab_size_ratio emb_split_num"),
        emb_neighbor_num=3,
    ),
    # Sliding windows, or chunks, beside full attention.
    "llama_sliding": _config("llama", layers="ssfs"),
    "llama4": _wrapped(_config("llama4", MOE, num_experts_per_tok=1, interleave_moe_layer_step=2)),
    "gpt_oss": _config("gpt_oss", MOE, layers="sfsf"),
    "step3p5": _config(
        "step3p5",
        MOE,
        layers="fssf",
        moe_layers_enum="1,2,3",
        attention_other_setting={"num_attention_heads": 8, "num_attention_groups": 4},
    ),
    "gemma3_text": _config("gemma3_text", sliding_window_pattern=3),
    "gemma3n": _wrapped(
        _config(
            "gemma3n",
            layers="sfsfsf",
            **_all(2, "num_kv_shared_layers altup_num_inputs"),
            activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
            altup_coef_clip=120.0,
            altup_correct_scale=True,
            altup_active_idx=0,
            laurel_rank=8,
        )
    ),
    "gemma4_text": _config("gemma4_text", layers="sfsfsf", num_kv_shared_layers=2),
    "gemma4": _wrapped(
        _config(
            "gemma4",
            MOE,
            layers="sfsf",
            **_all(0, "num_kv_shared_layers hidden_size_per_layer_input"),
            **_all(True, "enable_moe_block attention_k_eq_v"),
            num_global_key_value_heads=1,
            use_double_wide_mlp=False,
        )
    ),
    "mimo_v2_flash": _config(
        "mimo_v2_flash",
        MOE,
        hybrid_layer_pattern=[0, 1, 1, 0],
        moe_layer_freq=[0, 1, 1, 1],
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
    ),
    "afmoe": _config("afmoe", MOE, layers="ssfs"),
    "cohere2": _config("cohere2", sliding_window_pattern=3),
    "exaone4": _config("exaone4", sliding_window_pattern="LLG"),
    "exaone_moe": _config("exaone_moe", MOE, layers="ssfs", is_moe_layer=[False, True, True, True]),
    "laguna": _config("laguna", MOE, ROPE_PER_KIND, layers="fssf"),
    "mellum": _config("mellum", MOE, ROPE_PER_KIND, layers="ssfs"),
    "ministral3": _config("ministral3", layers="sfsf", rope_parameters=YARN),
    "muse_glimmer": _config("muse_glimmer", layers="sssf"),
    "olmo3": _config("olmo3", layers="ssfs"),
    "plamo3": _config("plamo3", sliding_window_pattern=2),
    "spark2_5": _config("spark2_5", ROPE_PER_KIND, layers="ssfs"),
    # Recurrent state in every layer.
    "mamba": _config("mamba", MAMBA, num_hidden_layers=3),
    "mamba2": _config("mamba2", MAMBA, num_hidden_layers=3, intermediate_size=128),
    "rwkv7": _config(
        "rwkv7",
        num_hidden_layers=3,
        **_all(16, "a_low_rank_dim v_low_rank_dim gate_low_rank_dim decay_low_rank_dim"),
    ),
    # Recurrent state beside attention.
    "qwen3_5": _config("qwen3_5", DELTA_RULE),
    "qwen3_5_moe": _config("qwen3_5_moe", DELTA_RULE, MOE),
    "qwen3_next": _config("qwen3_next", DELTA_RULE, MOE),
    "olmo_hybrid": _config("olmo_hybrid", DELTA_RULE, layers="llfl", linear_allow_neg_eigval=True),
    "kimi_linear": _config("kimi_linear", MOE, MLA, KDA),
    "kimi_k3": _wrapped(
        _config("kimi_k3", MOE, MLA, KDA, attn_res_block_size=2, mla_use_output_gate=True)
    ),
    "bailing_hybrid": _config("bailing_hybrid", MOE, MLA, LIGHTNING),
    "bailing_moe_linear": _config("bailing_moe_linear", MOE, LIGHTNING),
    "bailing_moe_v3": _config(
        "bailing_hybrid", MOE, MLA, LIGHTNING, architectures=["BailingMoeV3ForCausalLM"]
    ),
    "nemotron_h": _config("nemotron_h", MAMBA, MOE, hybrid_override_pattern=list("M-M*ME")),
    "jamba": _config(
        "jamba",
        *(MAMBA, MOE),
        **_all(1, "attn_layer_offset expert_layer_offset"),
        attn_layer_period=3,
        expert_layer_period=2,
    ),
    "granitemoehybrid": _config("granitemoehybrid", MAMBA, MOE, layers="mmam"),
    "plamo2": _config("plamo2", MAMBA, full_attention_idx=[]),
    "recurrent_gemma": _config(
        "recurrent_gemma", conv1d_width=4, block_types=["recurrent", "recurrent", "attention"]
    ),
    "lfm2": _config("lfm2", layers="cfcf"),
    "lfm2_moe": _config("lfm2_moe", MOE, layers="cfcf"),
    "gear": _config("gear", layers="xsfx"),
    # Recurrent state and attention in one layer.
    "falcon_h1": _config("falcon_h1", MAMBA, mlp_multipliers=[1.0, 1.0], ssm_multipliers=[1.0] * 5),
    "baichuan_m1": _config("baichuan_m1", sliding_window_layers=[1, 3], conv_window=2),
}

REQUIRED = {
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "nemotron_h",
    "mamba",
    "mamba2",
    "gpt_oss",
    "step3p5",
    "gemma3_text",
    "gemma4_text",
    "llama",
    "qwen3",
    "llama4",
    "kimi_linear",
    "lfm2",
    "falcon_h1",
    "jamba",
    "granitemoehybrid",
    "recurrent_gemma",
    "rwkv7",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v41",
    "olmo_hybrid",
    "bailing_hybrid",
    "minimax",
    "mimo_v2_flash",
    "plamo2",
    "baichuan_m1",
    "bailing_moe_linear",
}
"""The architectures that tests of all of them must have."""

SAMPLE = sorted(ARCHITECTURES if SOAK else REQUIRED)
"""The architectures for tests of one thing on each: a sample has every kind of layer."""

# Models whose answers depend on the cuts by more than rounding. plamo3's mask lets a query see one
# row more than its ring holds, so the oldest row is there inside a chunk and gone after a cut.
CUT_DEPENDENT = frozenset({"plamo3"})


def vocabulary(name: str) -> int:
    return int(ARCHITECTURES[name]["vocab_size"])


def tiny(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """Make the model of that name. It seeds MLX's generator, so a seed always gives one model."""
    config = deepcopy(ARCHITECTURES[name]) | changes
    model_class, args_class = _get_classes(config)
    mx.random.seed(seed)
    model = model_class(args_class.from_dict(config))
    weights = [(path, _draw(path, value)) for path, value in tree_flatten(model.parameters())]
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    accel.install()  # now that the model's own module is imported
    return model


# These set how fast recurrent layers forget. With mlx-lm's values they forget within a few tokens.
FORGETTING = ("dt_bias", "dt_proj.bias", "w_lora.lora.2.bias", "recurrent_param")
# Gains that mlx-lm initialises with zeros.
GAINS = ("g_norm.weight", "k_k", "k_a")


def _draw(path: str, initial: mx.array) -> mx.array:
    """Draw a value for one parameter.

    Matrices keep the scale of what passes through them. Wider ones would make attention pick few
    tokens and forget the rest; narrower ones would leave nothing but the last token.
    """
    shape = initial.shape
    if path.endswith("A_log"):
        return mx.random.uniform(-1, 1, shape)
    if path.endswith(FORGETTING):
        return mx.random.uniform(-5, -3, shape)
    noise = mx.random.normal(shape)
    if path.endswith(GAINS):
        return 1 + 0.1 * noise
    if initial.ndim < 2:
        return initial + 0.1 * noise
    fan_in = shape[-1] if shape[-1] > 1 else shape[-2]  # the taps of a depthwise convolution
    # The logits get twice the spread: the further apart they are, the safer is a greedy choice.
    scale = 2 if shape[0] == VOCABULARY else 1
    return noise * scale / fan_in**0.5
