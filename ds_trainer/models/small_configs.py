"""Configs of a model type with a few thousand parameters: every kind of layer, small sizes in valid relations."""

from __future__ import annotations

import re
from math import ceil
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4, 2, 16, 99
HIDDEN = HEADS * HEAD_DIM

# Pattern -> size: the first pattern that matches an attribute's full name. Without a match the default stays.
SIZES: tuple[tuple[str, int], ...] = (
    (r"(unpadded_)?vocab_size(_per_layer_input)?|n_words|encoder_hash_byte_group_vocab", VOCAB),
    (r"(backbone_)?hidden_size(_global)?|n_embd|d_model|emb_dim|word_embed_proj_dim|ple_embed_dim", HIDDEN),
    (
        r"(swa_)?num_attention_heads|n_heads?|num_heads|((en|de)coder_)?attention_heads|index_n_heads|indexer_n_heads",
        HEADS,
    ),
    (r"(swa_)?num_key_value_heads|num_kv_heads|linear_num_(key_)?heads|indexer_kv_heads", KV_HEADS),
    (r"linear_num_value_heads", HEADS),
    (r"(swa_|index_|indexer_|mamba_|linear_(key_|value_)?)?head_dim|mamba_d_head", HEAD_DIM),
    (r"qk_(nope|rope)_head_dim|rotary_dim", HEAD_DIM // 2),
    (r"v_head_dim", 12),
    (r"moe_intermediate_size|expert_ffn_hidden_size", 48),
    (r".*intermediate_size.*|ffn_dim|ffn_hidden_size|n_inner", 96),
    (r".*_lora_rank|.*_rank|hc_lowrank|hidden_size_per_layer_input|d_rel", 16),
    (r"(moe_)?num_(local_)?experts|n_routed_experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k", 2),
    (r"(n|num)_shared_experts|num_expert_group|n_group|topk_group", 1),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length", 64),
    (r"(keep_|attention_)?(sliding_)?window(_size)?|attention_chunk_size|rel_extent", 8),
    (r"index_topk(_blocks)?|index_block_size|indexer_budget|indexer_compress_ratio|block_size|(mamba_)?chunk_size", 4),
    (r"mamba_n_heads|mamba_num_heads", 2 * HEADS),
    (r"mamba_d_state|ssm_state_size|mamba_dt_rank", 8),
    (r"mamba_d_ssm", 2 * HIDDEN),
    (r"(mamba_)?n_groups", 2),
    (r"first_k_dense_replace|num_dense_layers|.*_layer_offset", 1),
    (r".*_layer_period|interleave_moe_layer_step|no_rope_layer_interval|layer_group_size", 2),
    (r"n_input_layers|n_output_layers|n_recurrent_layers|num_layers_per_stack", 1),
    (r"bos_token_id|eos_token_id|decoder_start_token_id|sep_token_id|eod_token_id", 1),
    (r"pad_token_id", 0),
)
# Attributes that stay None where that is their default.
OPTIONAL = r".*_rank|.*_token_id|n_inner"
DEPTHS = r"num_hidden_layers|n_layers?|num_layers|(num_)?(en|de)coder_layers"

_TWO_KINDS = ["sliding_attention", "full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 1e4}

# Settings that follow from neither a name nor a default. Several configs where one cannot have all modules of the plan.
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    # Its default has no rotary parameters, which its rotary embedding needs for each kind of layer.
    "cohere_compass_text": ({"rope_parameters": dict.fromkeys(_TWO_KINDS, _ROPE)},),
    # Its default has no dense layer, or none beside the sparse ones.
    "cohere2_moe": ({"mlp_layer_types": ["dense", "sparse"]},),
    "mellum": ({"mlp_layer_types": ["dense", "sparse"]},),
    "inkling_text": ({"mlp_layer_types": ["dense", "sparse"]},),
    # Its default has no attention, or names no kinds of layers.
    "bamba": ({"attn_layer_indices": [1]},),
    "granitemoehybrid": ({"layer_types": ["linear_attention", "full_attention"]},),
    "lfm2_moe": ({"layer_types": ["conv", "full_attention"]},),
    # Queries come through a latent or directly.
    "deepseek_v2": ({}, {"q_lora_rank": None}),
    "deepseek_v3": ({}, {"q_lora_rank": None}),
    "minicpm3": ({}, {"q_lora_rank": None}),
    "youtu": ({}, {"q_lora_rank": None}),
    "doge": ({}, {"is_moe": True}),
    # Its layers are of three sections, and written out as two each.
    "dory": ({"num_hidden_layers": 4, "layer_types": _TWO_KINDS * 2, "n_recurrent_layers": 2},),
    # Its default has neither base of rotary frequencies nor bounds of queries, which every checkpoint has.
    "dbrx": ({"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0, "kv_n_heads": KV_HEADS}},),
    # Each of its heads is as wide as the others, and together they are as wide as its inner states.
    "mamba2": ({"num_heads": 2 * HEADS},),
    # Its tokens are of one codebook, not of several at once.
    "musicgen_decoder": ({"num_codebooks": 1},),
    "musicgen_melody_decoder": ({"num_codebooks": 1},),
    # Its embedding is narrower than its layers or not.
    "opt": ({}, {"word_embed_proj_dim": HIDDEN // 2}),
    # Its table of positions is one, not the sum of two whose sizes have to multiply to the length of a sample.
    "reformer": ({"axial_pos_embds": False},),
    # Its layers have adapters for languages, one of which must be set.
    "xmod": ({"default_language": "en_XX"},),
    # It routes each token to one expert.
    "zaya": ({"num_experts_per_tok": 1},),
    # The last layers take keys and values of earlier ones of their kind.
    "gemma3n_text": (
        {
            "num_hidden_layers": 4,
            "layer_types": _TWO_KINDS * 2,
            "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
            "num_kv_shared_layers": 2,
        },
    ),
    "gemma4_text": ({"enable_moe_block": True, "top_k_experts": 2},),
    # Kinds of layers are run lengths.
    "gpt_neo": ({"attention_types": [[["global"], 1], [["local"], 1]], "attention_layers": ["global", "local"]},),
    # Its default has neither the indexer nor the n-gram embedding that its plan shards.
    "qwen4_exp_text": (
        {
            "indexer_kv_heads": 1,
            "indexer_budget": 8,
            "ple_layer_ids": [1],
            "eos_token_id": 1,
            "ngram_vocab_size_base": 100,
            "split_ngram_parts": 2,
        },
    ),
}


def causal_lm_classes(model_type: str) -> tuple[type[PreTrainedModel], type[PretrainedConfig]]:
    """The class that `AutoModelForCausalLM` builds for a model type, and the class of its config."""
    cls = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    config_class = CONFIG_MAPPING[model_type]
    return cls, next((part for part in config_class.sub_configs.values() if part == cls.config_class), config_class)


def small_configs(config_class: type[PretrainedConfig], min_layers: int = 2) -> list[PretrainedConfig]:
    """Small configs of a class, without dropout, with one layer of each kind that the default config has.

    Several configs where one cannot have all modules of the type's plans.

    Args:
        config_class: The class.
        min_layers: Least number of layers; where there are fewer kinds, they are repeated.
    """
    text = config_class.sub_configs.get("text_config", config_class)
    variants = VARIANTS.get(getattr(text, "model_type", ""), ({},))
    return [_small_config(config_class, variant, min_layers) for variant in range(len(variants))]


def _small_config(config_class: type[PretrainedConfig], variant: int, min_layers: int) -> PretrainedConfig:
    default = config_class()
    values = {name: None for name in config_class.__dataclass_fields__} | default.to_dict()
    depth = next((value for name, value in values.items() if re.fullmatch(DEPTHS, name)), 0)
    lists = {name: value for name, value in values.items() if _is_per_layer(value, depth)}
    each = {int(layer): fields for layer, fields in (values.pop("per_layer_config", None) or {}).items()}
    kinds = _one_of_each_kind([(*(x[i] for x in lists.values()), each.get(i)) for i in range(depth)])
    layers = kinds * ceil(min_layers / len(kinds))

    given = _small(values)
    given |= {name: [_small_or_same(name, value[i]) for i in layers] for name, value in lists.items()}
    given |= {name: len(layers) for name in values if re.fullmatch(DEPTHS, name)}
    if each:
        given["per_layer_config"] = {k: _small(each[i]) for k, i in enumerate(layers) if i in each}
    if values.get("head_dim") == values.get("qk_rope_head_dim", 0):
        given["head_dim"] = given["qk_rope_head_dim"]
    for name in config_class.sub_configs:
        part = getattr(default, name, None)
        given[name] = _small_config(type(part), variant, min_layers) if isinstance(part, PretrainedConfig) else part
    given = {name: value for name, value in given.items() if value is not None}
    variants = VARIANTS.get(config_class.model_type, ())
    return config_class(**given | (_deep(variants[variant], len(kinds), min_layers) if variants else {}))


def _deep(values: dict[str, Any], depth: int, min_layers: int) -> dict[str, Any]:
    """A variant, which is written for few layers, with its layers repeated until there are `min_layers`."""
    depth = values.get("num_hidden_layers", depth)
    times = ceil(min_layers / depth)
    deep = {name: value * times if _is_per_layer(value, depth) else value for name, value in values.items()}
    return deep | ({"num_hidden_layers": depth * times} if "num_hidden_layers" in values else {})


def _is_per_layer(value: Any, depth: int) -> bool:
    """Whether an attribute holds one value for each layer, and is not just the list of layer numbers."""
    return isinstance(value, list | tuple) and len(value) == depth > 0 and list(value) != list(range(depth))


def _one_of_each_kind(layers: list[Any]) -> list[int]:
    """Numbers of the layers that are the first of their kind; at least two."""
    kinds = [repr(layer) for layer in layers]
    first = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    return first if len(first) > 1 else [0, 1]


def _small(values: dict[str, Any]) -> dict[str, Any]:
    small = {name: size for name, value in values.items() if (size := _scaled(name, value)) is not None}
    if values.get("kv_lora_rank"):  # Multi-head latent attention: each head has its own keys, from one latent.
        small["num_key_value_heads"] = HEADS
    return small


def _small_or_same(name: str, value: Any) -> Any:
    small = _scaled(name.removesuffix("_per_layer"), value)
    return value if small is None else small


def _scaled(name: str, value: Any) -> Any:
    """The small value of an attribute; None: its default stays."""
    if isinstance(value, float):
        return 0.0 if re.search(r"drop", name) else None
    if name == "mlp_only_layers":
        return [0]
    if name == "is_decoder":
        return True
    if isinstance(value, bool | str | list | dict) or (value is None and re.fullmatch(OPTIONAL, name)):
        return None
    return next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
