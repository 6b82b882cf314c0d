"""The tiny model and data that parity is proved on."""

from __future__ import annotations

import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(
    tied: bool = True,
    vocab: int = 65,
    layers: int = 2,
    hidden: int = 32,
    intermediate: int | None = None,
    seed: int = 0,
    **extra,
):
    """A Llama of a few thousand parameters, fp32, seeded."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate or 2 * hidden,
        num_hidden_layers=layers,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **{"max_position_embeddings": 128, "num_attention_heads": 4, "num_key_value_heads": 2, **extra},
    )
    return LlamaForCausalLM(config)


def samples(n: int = 8, seed: int = 1, lengths=(4, 5, 6, 7, 40, 44, 48, 60), vocab: int = 65) -> list[dict]:
    """Samples of very different lengths, the first half of each without labels."""
    generator = random.Random(seed)
    out = []
    for i in range(n):
        length = lengths[i % len(lengths)]
        ids = [generator.randrange(3, vocab) for _ in range(length)]
        out.append({"input_ids": ids, "labels": [-100] * (length // 2) + ids[length // 2 :]})
    return out


def oracle(model: torch.nn.Module, rows: list[dict]) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, gradient norm and gradients of one process on one batch: the sum over label tokens by their number."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows])
    labels = torch.tensor([row["labels"] + [-100] * (longest - len(row["labels"])) for row in rows])
    logits = model(input_ids=ids, attention_mask=mask).logits
    target = labels[:, 1:]
    total = int((target != -100).sum())
    loss_sum = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), target.reshape(-1), ignore_index=-100, reduction="sum"
    )
    loss = loss_sum / total
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.sqrt(sum((g.double() ** 2).sum() for g in grads.values()))
    return loss.item(), norm.item(), grads
