"""Tensor-parallel plans for model types without one in transformers, and additions to those of transformers.

Read only by `make_families`: the plans ship in `families.json`. The form is that of transformers: module name with
every number as `*` -> style. An entry here replaces that of transformers.
"""

from __future__ import annotations

Plan = dict[str, str]

_GATHERED, _SPLITS = "colwise_gather_output", "rowwise_split_input"
_SUMMED = "replicated_with_grad_allreduce"


def _named(prefix: str, plan: Plan) -> dict[str, str]:
    return {f"{prefix}.{name}": style for name, style in plan.items()}


def _attention(queries: str = "q_proj", keys: str = "k_proj", values: str = "v_proj", output: str = "o_proj") -> Plan:
    return {queries: "colwise", keys: "colwise", values: "colwise", output: "rowwise"}


def _gathered_attention(*inputs: str, output: str) -> Plan:
    """Shards the parameters; every rank computes all heads."""
    return dict.fromkeys(inputs, _GATHERED) | {output: _SPLITS}


def _gated_mlp(gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Plan:
    return {gate: "colwise", up: "colwise", down: "rowwise"}


def _mlp(up: str, down: str) -> Plan:
    return {up: "colwise", down: "rowwise"}


_HEAD = {"lm_head": _GATHERED}
_HEAD_NORMS = {"q_norm": _SUMMED, "k_norm": _SUMMED}  # Over this rank's heads.
_MLA = {
    "q_proj": "colwise",
    "q_b_proj": "colwise",
    "kv_a_proj_with_mqa": "mla_kv_a_proj",
    "kv_b_proj": "colwise",
    "o_proj": "rowwise",
}
_BART = _named("self_attn", _attention(output="out_proj")) | _mlp("fc1", "fc2")
_GPT2 = {"attn.c_attn": "qkv_colwise", "attn.c_proj": "rowwise"} | _named("mlp", _mlp("c_fc", "c_proj"))
# Queries, keys and values of each head are adjacent, so a range of heads is a range of outputs.
_NEOX = {"query_key_value": "colwise", "dense": "rowwise"}
_NEOX_MLP = _named("mlp", _mlp("dense_h_to_4h", "dense_4h_to_h"))
_LFM2_MLP = _gated_mlp("w1", "w3", "w2")
_LFM2_ATTENTION = _attention(output="out_proj") | {"q_layernorm": _SUMMED, "k_layernorm": _SUMMED}
_HUNYUAN_ATTENTION = _attention() | {"query_layernorm": _SUMMED, "key_layernorm": _SUMMED}
_PACKED_MLP = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
_GRANITE_SHARED = {"input_linear": "packed_colwise", "output_linear": "rowwise"}

_NONE_OF_TRANSFORMERS: dict[str, Plan] = {
    "biogpt": _named("biogpt.layers.*", _BART) | {"output_projection": _GATHERED},
    "bloom": _named("transformer.h.*", _named("self_attention", _NEOX) | _NEOX_MLP) | _HEAD,
    # The order of queries, keys and values depends on its config.
    "falcon": _named("transformer.h.*.self_attention", _gathered_attention("query_key_value", output="dense"))
    | _named("transformer.h.*", _NEOX_MLP)
    | _HEAD,
    "gpt-sw3": _named("transformer.h.*", _GPT2) | _HEAD,
    "gpt2": _named("transformer.h.*", _GPT2) | _HEAD,
    "gpt_bigcode": _named("transformer.h.*.attn", _gathered_attention("c_attn", output="c_proj"))
    | _named("transformer.h.*.mlp", _mlp("c_fc", "c_proj"))
    | _HEAD,
    "gpt_neo": _named("transformer.h.*.attn.attention", _attention(output="out_proj"))
    | _named("transformer.h.*.mlp", _mlp("c_fc", "c_proj"))
    | _HEAD,
    "gpt_neox_japanese": _named("gpt_neox_japanese.layers.*", _named("attention", _NEOX) | _NEOX_MLP)
    | {"embed_out": _GATHERED},
    "mpt": _named("transformer.blocks.*.attn", {"Wqkv": "qkv_colwise", "out_proj": "rowwise"})
    | _named("transformer.blocks.*.ffn", _mlp("up_proj", "down_proj"))
    | _HEAD,
    "openai-gpt": _named("transformer.h.*", _GPT2) | _HEAD,
    "opt": _named("model.decoder.layers.*", _BART) | _HEAD,
    "persimmon": _named(
        "model.layers.*",
        _named("self_attn", _NEOX | {"q_layernorm": _SUMMED, "k_layernorm": _SUMMED}) | _NEOX_MLP,
    )
    | _HEAD,
    "stablelm": _named("model.layers.*", _named("self_attn", _attention()) | _named("mlp", _gated_mlp())) | _HEAD,
    "xglm": _named("model.layers.*", _BART) | _HEAD,
}

# The plans of transformers shard the vocabulary or the experts, and replicate most other parameters.
_MORE: dict[str, Plan] = {
    "afmoe": _named("self_attn", _attention() | _HEAD_NORMS | {"gate_proj": "colwise"})
    | _named("mlp", _gated_mlp())
    | _named("mlp.shared_experts", _gated_mlp()),
    "bamba": _named("self_attn", _attention()) | _named("feed_forward", _gated_mlp()),
    "deepseek_v3": _named("self_attn", _MLA),
    # The two halves of its KV heads are used together.
    "diffllama": _named("self_attn", _gathered_attention("q_proj", "k_proj", "v_proj", output="o_proj"))
    | _named("mlp", _gated_mlp()),
    "falcon_h1": _named("self_attn", _attention()) | _named("feed_forward", _gated_mlp()),
    "glm": _named("mlp", _PACKED_MLP),
    "glm4": _named("mlp", _PACKED_MLP),
    # Gate and up projection of its experts alternate.
    "gpt_oss": _named("self_attn", _attention() | {"sinks": "colwise"})
    | _named(
        "mlp.experts",
        {
            "gate_up_proj": "rowwise",
            "gate_up_proj_bias": "rowwise",
            "down_proj": "colwise",
            "down_proj_bias": "moe_output_bias",
        },
    )
    | {"mlp.experts": "moe_tp_experts"},
    "granitemoehybrid": _named("self_attn", _attention()) | _named("shared_mlp", _GRANITE_SHARED),
    "granitemoeshared": _named("self_attn", _attention()) | _named("shared_mlp", _GRANITE_SHARED),
    "hunyuan_v1_dense": _named("self_attn", _HUNYUAN_ATTENTION) | _named("mlp", _gated_mlp()),
    "hunyuan_v1_moe": _named("self_attn", _HUNYUAN_ATTENTION) | _named("mlp.shared_mlp", _gated_mlp()),
    "jamba": _named("self_attn", _attention()) | _named("feed_forward", _gated_mlp()),
    "lfm2": _named("self_attn", _LFM2_ATTENTION) | _named("feed_forward", _LFM2_MLP),
    "lfm2_moe": _named("self_attn", _LFM2_ATTENTION) | _named("feed_forward", _LFM2_MLP),
    "lfm3": _named("self_attn", _attention() | _HEAD_NORMS | {"g_proj": "colwise"}) | _named("feed_forward", _LFM2_MLP),
    "minimax_m3_vl_text": _named("mlp.shared_experts", _PACKED_MLP),
    "nemotron_h": _named("mixer", _attention() | _mlp("up_proj", "down_proj"))
    | _named("mixer.shared_experts", _mlp("up_proj", "down_proj")),
    "phi3": _named("mlp", _PACKED_MLP),
    "youtu": _named("self_attn", _MLA),
}

# The plans of transformers differ from one process in a result, or leave a parameter with its rank's partial gradient.
_OTHERWISE: dict[str, Plan] = {
    # Its activation has two parameters, which act on the sharded width.
    "apertus": {"mlp.act_fn": _SUMMED},
    "apertus1p5_text": {"mlp.act_fn": _SUMMED},
    # A mask for all heads is computed from the values of all heads.
    "doge": _named(
        "self_attn", _gathered_attention("q_proj", "k_proj", "v_proj", output="o_proj") | {"dt_proj": "replicate"}
    ),
    # The gate is thresholded by its mean and deviation over the full width.
    "gemma3n_text": _named("mlp", _gathered_attention("gate_proj", "up_proj", output="down_proj")),
    # Gate and up projection of its experts are two halves.
    "inkling2_loop_text": {"mlp.experts.gate_up_proj": "packed_colwise"},
    "inkling2_text": {"mlp.experts.gate_up_proj": "packed_colwise"},
    "inkling_text": {"mlp.experts.gate_up_proj": "packed_colwise"},
    "sarvam_moe": _named("self_attn", _HEAD_NORMS),
}

_IN_BLOCKS = _MORE | _OTHERWISE
_ELSEWHERE: dict[str, Plan] = {
    # Queries, values and keys are stored in four groups of heads, whatever the number of ranks.
    "codegen": _named("transformer.h.*.attn", _gathered_attention("qkv_proj", output="out_proj")),
    # Its head scales each logit by a parameter of that logit.
    "dory": {"lm_head": "replicate"},
    # Its embedding normalises each vector before the ranks' vectors, all but one of which are 0, are summed.
    "inkling_text": {"model.embed_tokens.embed_norm": _SUMMED},
    "nemotron_h": _HEAD,
}

EXTRA_TP_PLANS: dict[str, Plan] = {
    name: _NONE_OF_TRANSFORMERS.get(name, {})
    | _named("model.layers.*", _IN_BLOCKS.get(name, {}))
    | _ELSEWHERE.get(name, {})
    for name in sorted({*_NONE_OF_TRANSFORMERS, *_IN_BLOCKS, *_ELSEWHERE})
}
"""Model type -> plan."""
