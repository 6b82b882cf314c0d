"""Tiny models whose rotary frequencies depend on a sample's length, and samples on both sides of the limit."""

from __future__ import annotations

import torch
from transformers import Phi3Config, Phi3ForCausalLM

from tests.helpers.tiny import samples, tiny_llama

ROPES = ("longrope", "dynamic")


def rope_model(kind: str):
    """A model with 64 original positions whose weights are large, so that frequencies matter."""
    if kind == "dynamic":
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        model = tiny_llama(rope_parameters=rope, max_position_embeddings=64)
    else:
        torch.manual_seed(0)
        rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0}
        config = Phi3Config(
            vocab_size=65,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            original_max_position_embeddings=64,
            rope_parameters=rope | {"original_max_position_embeddings": 64},
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        model = Phi3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(15)
    return model.eval()


def rope_rows() -> list[dict]:
    """Four samples, short and long ones in turn."""
    return samples(4, lengths=(20, 100, 24, 90))
