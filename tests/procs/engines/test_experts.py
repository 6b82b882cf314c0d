"""Experts that get tokens on some ranks only, or on none: nothing waits for them, and their gradient is zero."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM

from tests.helpers.runs import largest_difference, make_trainer, weights

HIDDEN, VOCAB, STEPS = 16, 64, 5
BY_THE_FIRST, BY_THE_SECOND = range(3, 32), range(32, 64)
"""Tokens that the router sends to the first expert, and to the second; the others get none."""


def mixtral():
    """Four experts, one per token, which the token alone decides on."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            hidden_size=HIDDEN,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=1,
            vocab_size=VOCAB,
            max_position_embeddings=64,
        )
    )
    with torch.no_grad():
        for place, tokens in enumerate((BY_THE_FIRST, BY_THE_SECOND)):
            model.model.embed_tokens.weight[list(tokens), place] += 3.0
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()
            layer.mlp.gate.weight[0, 0] = layer.mlp.gate.weight[1, 1] = 20.0
            layer.mlp.gate.weight[2:, 2:] = -1e-3
    return model


def rows():
    """Samples of tokens of one kind and of the other in turn, as two data ranks take turns."""
    generator = torch.Generator().manual_seed(1)
    out = []
    for i in range(4 * STEPS):
        tokens = torch.tensor(list(BY_THE_FIRST if i % 2 == 0 else BY_THE_SECOND))
        ids = tokens[torch.randint(len(tokens), (12,), generator=generator)].tolist()
        out.append({"input_ids": ids, "labels": ids})
    return out


def train(engine, out, parallel):
    """Experts that this rank's tokens went to, and the weights after the steps."""
    model, used = mixtral(), set()
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda gate, args, output: used.update(output[2].flatten().tolist()))
    trainer = make_trainer(
        engine,
        out,
        model=model,
        rows=rows(),
        parallel=parallel,
        batch={"global_size": 4, "micro_size": 1},
        optimizer={"name": "sgd", "lr": 0.05},
        run={"max_steps": STEPS},
    )
    trainer.train()
    trainer.save_model(out / "model")
    final = weights(trainer)
    trainer.close()
    return used, final


@pytest.fixture(scope="module")
def alone(world, tmp_path_factory):
    return world(train, 1, "ddp", tmp_path_factory.mktemp("alone"), {})[0][1]


@pytest.mark.case("F3")
@pytest.mark.parametrize(
    ("engine", "ranks", "parallel"),
    [
        ("zero3", 2, {}),
        ("zero3", 4, {"tp": 2}),
        pytest.param("fsdp2", 4, {"tp": 2, "sequence_parallel": True}, marks=pytest.mark.slow),
        pytest.param("zero1", 4, {"tp": 2}, marks=pytest.mark.slow),
    ],
    ids=["zero3", "zero3-tp2", "fsdp2-tp2-sequence", "zero1-tp2"],
)
def test_ranks_that_route_to_other_experts_train_and_save_as_one_process(
    world, tmp_path, alone, engine, ranks, parallel
):
    everyone = world(train, ranks, engine, tmp_path, parallel)
    used = [experts for experts, _ in everyone]
    assert used[0] == {0} and used[-1] == {1}, "data ranks use other experts"
    before = {name: p.detach() for name, p in mixtral().named_parameters()}
    for _, final in everyone:
        assert largest_difference(final, alone) < 1e-5
        for name, value in final.items():
            if name.endswith("experts.down_proj"):
                moved = [not torch.equal(value[i], before[name][i]) for i in range(4)]
                assert moved == [True, True, False, False]
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert sum(tensor.numel() for tensor in saved.values()) == sum(p.numel() for p in before.values())
