"""A model of which each sample runs one of two branches."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from tests.helpers.tiny import samples, tiny_llama


class Branches(LlamaForCausalLM):
    """TINY with a linear layer before the head: `a` where a micro-batch's first token is even, else `b`."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.a, self.b = (nn.Linear(config.hidden_size, config.hidden_size) for _ in "ab")

    def forward(self, input_ids=None, attention_mask=None, labels=None, **_):
        """Logits only: the loss is summed outside."""
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        branch = self.a if input_ids[0, 0] % 2 == 0 else self.b
        return CausalLMOutput(logits=self.lm_head(branch(hidden)))


def branches() -> Branches:
    """The model, the same at every call."""
    config = tiny_llama().config
    torch.manual_seed(0)
    return Branches(config)


def rows(*first: int) -> list[dict]:
    """Samples that begin with these tokens: even ones run `a`, odd ones `b`."""
    return [
        row | {"input_ids": [token, *row["input_ids"][1:]]}
        for token, row in zip(first, samples(len(first)), strict=True)
    ]


def expected(steps: list[list[dict]]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Loss of each step of SGD at learning rate 1 in one process, sample by sample, and the weights after them."""
    model, losses = branches(), []
    for batch in steps:
        model.zero_grad()
        total = sum(label != -100 for row in batch for label in row["labels"][1:])
        loss = torch.zeros(())
        for row in batch:
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
            loss = loss + nn.functional.cross_entropy(logits, torch.tensor(row["labels"][1:]), reduction="sum") / total
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= parameter.grad
    return losses, {name: p.detach() for name, p in model.named_parameters()}
