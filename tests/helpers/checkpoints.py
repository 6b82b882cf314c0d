"""Tiny real checkpoints on disk, with a tokenizer, made by transformers itself."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.helpers.tokenizers import make_tokenizer

VOCAB = 320

_COMMON = dict(vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False)
_LLAMA = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
_KINDS: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaConfig", _LLAMA),
    "llama_tied": ("LlamaConfig", _LLAMA | {"tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, tie_word_embeddings=True)),
    "mixtral": ("MixtralConfig", _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        _LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    ),
    "gemma2": ("Gemma2Config", _LLAMA | {"head_dim": 8, "tie_word_embeddings": True}),
    "phi3": ("Phi3Config", _LLAMA),
    "gpt_neo": (  # A buffer of truth values that the class's own initialisation leaves out.
        "GPTNeoConfig",
        dict(hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=8)
        | {"max_position_embeddings": 64, "tie_word_embeddings": True},
    ),
    "sarvam_moe": (  # Fused query, key and value in the checkpoint, three parameters in the model.
        "SarvamMoEConfig",
        _LLAMA
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
        | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "phi": ("PhiConfig", _LLAMA | {"num_key_value_heads": 4}),
    "deepseek_v3": (
        "DeepseekV3Config",
        _LLAMA
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
        | {"n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 8, "num_key_value_heads": 4}
        | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    ),
}
KINDS = tuple(_KINDS)
_KINDS |= {  # It runs in fp32 only.
    "inkling2_text": (  # Gate and up projection interleaved in the checkpoint, one after the other in the model.
        "Inkling2TextConfig",
        _LLAMA
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
        | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "unpadded_vocab_size": VOCAB}
        | {"layer_types": ["hybrid_sliding", "hybrid"]},
    ),
}


def make_model(kind: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A tiny model with random fp32 values of the given seed; `changes` go to its config."""
    name, options = _KINDS[kind]
    config = getattr(transformers, name)(**(_COMMON | options | changes))
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


def make_checkpoint(
    folder: str | Path,
    kind: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    pickled: bool = False,
    seed: int = 0,
    **changes: object,
) -> str:
    """Writes a tiny checkpoint with `save_pretrained`, or pickled as transformers once did, and returns its folder."""
    model = make_model(kind, seed, **changes).to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    make_tokenizer(Path(folder))
    if pickled:
        for path in Path(folder).glob("model*.safetensors*"):
            path.unlink()
        torch.save(model.state_dict(), Path(folder, "pytorch_model.bin"))
    return str(folder)


def edit_config(folder: str, **changes: object) -> None:
    """Changes keys of a checkpoint's config.json."""
    path = Path(folder, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
