"""Stock models split over real ranks: loss and gradients of one process, heads, sequences, random masks, refusals."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from ds_trainer.config.engine_sections import ParallelConfig
from ds_trainer.errors import ModelError
from ds_trainer.launch.rank_grid import Grid
from ds_trainer.parallel.tensor.parallelize import split_model
from ds_trainer.parallel.tensor.styles import STYLES
from ds_trainer.planning.tp_plan import STYLE_NAMES
from tests.helpers.tensor_parallel import from_all_ranks, split_copy
from tests.helpers.threads import Communication
from tests.helpers.tiny import tiny_llama

GRADIENT_TOLERANCE = 1e-5
"""Of each tensor's largest element: fp32, sums over ranks in another order."""
LOSS_TOLERANCE = 1e-6
VOCAB = 65
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
SEQUENCE = {"sequence_parallel": True}


def tiny_gpt2(**dropout: float) -> GPT2LMHeadModel:
    config = GPT2Config(
        n_embd=32, n_head=4, n_layer=2, n_positions=64, vocab_size=VOCAB, bos_token_id=1, eos_token_id=2
    )
    for name, rate in (NO_DROPOUT | dropout).items():
        setattr(config, name, rate)
    torch.manual_seed(0)
    return GPT2LMHeadModel(config)


def tiny_qwen3(**heads: int) -> Qwen3ForCausalLM:
    """Norms over the heads of queries and keys."""
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, **heads}
    config = Qwen3Config(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=VOCAB, **sizes)
    return Qwen3ForCausalLM(config)


MODELS = {
    "llama": lambda: tiny_llama(tied=False, vocab=VOCAB),
    "tied llama": lambda: tiny_llama(vocab=VOCAB),
    "llama with biases": lambda: tiny_llama(attention_bias=True, mlp_bias=True),
    "llama with one KV head": lambda: tiny_llama(num_key_value_heads=1),
    "gpt2": tiny_gpt2,
    "qwen3": tiny_qwen3,
}


def make(kind: str) -> Any:
    """A model in training mode, whose every parameter has moved from its first value, which may be 0."""
    model = MODELS[kind]().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def batch(length: int, samples: int = 2) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, VOCAB, (samples, length))
    mask = torch.ones_like(ids)
    mask[0, length - length // 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def loss_of(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(**inputs, use_cache=False).logits
    target = inputs["input_ids"].roll(-1, 1).flatten()
    return nn.functional.cross_entropy(logits.flatten(0, 1), target, reduction="sum") / target.numel()


def compare(kind: str, lengths: tuple[int, ...], parallel: dict, checkpointed: bool = False) -> dict[str, Any]:
    """Largest errors of this rank's losses and of the sum of gradients over batches, and what is on this rank."""
    whole = make(kind)
    part, split = split_copy(whole, **parallel)
    if checkpointed:
        part.gradient_checkpointing_enable({"use_reentrant": False})
    shapes: list[tuple[int, ...]] = []
    norms = [module for name, module in part.named_modules() if name.endswith((".input_layernorm", ".ln_1"))]
    norms[0].register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    errors = []
    for length in lengths:
        inputs = batch(length)
        expected, got = (loss_of(model, inputs) for model in (whole, part))
        (expected + 0).backward()
        got.backward()
        errors.append(abs(got.item() - expected.item()) / abs(expected.item()))
    assert not any("forward" in vars(module) for module in part.modules())
    merged = dict(split.merged((name, parameter.grad) for name, parameter in part.named_parameters()))
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    assert all(gradient.any() for gradient in gradients.values())
    assert merged.keys() == gradients.keys()
    return {
        "loss": max(errors),
        "gradients": {n: ((merged[n] - g).abs().max() / g.abs().max()).item() for n, g in gradients.items()},
        "sizes": {n: p.numel() / gradients[n].numel() for n, p in part.named_parameters()},
        "shapes": shapes,
    }


def check(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["loss"] <= LOSS_TOLERANCE
        off = {name: error for name, error in result["gradients"].items() if not error <= GRADIENT_TOLERANCE}
        assert not off, result["case"]


def compare_many(*cases: tuple) -> list[dict[str, Any]]:
    """In one world: to start one costs more than a case."""
    return [compare(*case) | {"case": case} for case in cases]


@pytest.mark.case("I1", "I2", "I4")
def test_loss_and_every_gradient_equal_one_process(world):
    cases = [(kind, (11,), parallel) for kind in MODELS for parallel in ({}, SEQUENCE)]
    for results in world(compare_many, 2, *cases):
        check(results)
        # Norms see all positions, or a half of them.
        assert [result["shapes"] for result in results] == [[(2, 11, 32)], [(2, 6, 32)]] * len(MODELS)


@pytest.mark.case("I1")
def test_kv_heads_fewer_than_ranks_are_repeated_with_the_gradient_of_all(world):
    cases = [(kind, (11,), parallel) for kind in ("llama", "qwen3") for parallel in ({}, SEQUENCE)]
    for results in world(compare_many, 4, *cases):
        check(results)
        for result in results:
            assert result["sizes"]["model.layers.0.self_attn.k_proj.weight"] == 1 / 2  # 2 heads on 4 ranks
            assert result["sizes"]["model.layers.0.self_attn.q_proj.weight"] == 1 / 4


def test_gradients_are_the_same_with_recomputed_activations(world):
    ways = ({}, SEQUENCE, {**SEQUENCE, "keep_gathered_input": True})
    cases = [(kind, (11,), parallel, True) for kind in ("llama", "gpt2") for parallel in ways]
    for results in world(compare_many, 2, *cases):
        check(results)
        # Once in the forward pass and once in the backward pass.
        assert [len(result["shapes"]) for result in results] == [2] * len(cases)


@pytest.mark.slow
def test_sequences_of_any_length_are_cut_or_stay_whole(world):
    lengths = (12, 9, 8, 5, 4, 3, 1)
    results = world(compare_many, 4, ("llama", lengths, SEQUENCE))[0]
    check(results)
    # 4 positions and fewer stay whole; 9 and 5 are padded.
    assert [shape[1] for shape in results[0]["shapes"]] == [3, 3, 2, 2, 4, 3, 1]


def communication(*ways: dict) -> list[tuple[Counter, Counter]]:
    """Of each way the collectives of hidden states' size in a forward and a backward pass."""
    counted = []
    for parallel in ways:
        part, _ = split_copy(make("llama"), **parallel)
        inputs = batch(12)
        size = 2 * 12 * 32 * 4  # samples, positions, hidden size, bytes of fp32
        with pytest.MonkeyPatch.context() as patch:
            watched = Communication(patch)
            loss = loss_of(part, inputs)
            forward = Counter(kind for kind, payload in watched.since_last() if payload == size)
            loss.backward()
            backward = Counter(kind for kind, payload in watched.since_last() if payload == size)
        counted.append((forward, backward))
    return counted


def test_attention_and_mlp_communicate_once_per_pass(world):
    ways = ({}, SEQUENCE, {**SEQUENCE, "keep_gathered_input": True})
    whole, sharding, kept = world(communication, 2, *ways)[0]
    each = 2 * 2  # attention and MLP of two blocks
    assert whole == ({"all-reduce": each + 1}, {"all-reduce": each + 1})  # embedding; head
    # The hidden states are sharded at the first block and gathered behind the last one.
    assert sharding == (
        {"all-reduce": 1, "all-gather": each + 1, "reduce-scatter": each},
        {"all-reduce": 1, "all-gather": each + each + 1, "reduce-scatter": each},
    )
    assert kept == (sharding[0], {**sharding[1], "all-gather": each + 1})


def generated(parallel: dict) -> tuple[list, list]:
    whole = make("llama").eval()
    part, _ = split_copy(whole, **parallel)
    inputs = {"input_ids": batch(9)["input_ids"]}
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return whole.generate(**inputs, **options).tolist(), part.generate(**inputs, **options).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{}, SEQUENCE], ids=["whole sequences", "cut sequences"])
def test_text_is_generated_with_a_cache_as_by_one_process(world, parallel):
    for expected, got in world(generated, 2, parallel):
        assert got == expected


def train(parallel: dict) -> tuple[int, int]:
    """20 steps; how many tensors are on several ranks, and how often two of them differed in a bit."""
    part, split = split_copy(make("llama with biases"), **parallel)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
    shared = [name for name, _ in part.named_parameters() if _has_copies(split.shardings.get(name))]
    differ = 0
    for step in range(20):
        optimizer.zero_grad()
        loss_of(part, batch(11 + step % 3)).backward()
        optimizer.step()
        for name, parameter in part.named_parameters():
            everyones = from_all_ranks(parameter)
            sharding = split.shardings.get(name)
            for rank, tensor in enumerate(everyones):
                first = 0 if sharding is None else sharding.ranges.index(sharding.ranges[rank])
                differ += not torch.equal(tensor, everyones[first])
    return len(shared), differ


def _has_copies(sharding: Any) -> bool:
    return sharding is None or len(set(sharding.ranges)) < len(sharding.ranges)


@pytest.mark.slow
@pytest.mark.case("I4")
@pytest.mark.parametrize("parallel", [{}, SEQUENCE], ids=["whole sequences", "cut sequences"])
def test_what_several_ranks_hold_stays_equal_to_the_bit(world, parallel):
    for shared, differ in world(train, 4, parallel):
        assert shared == 5 + 2 * 2 + 2 * 4  # norms; biases of row layers; keys' and values' weights and biases
        assert differ == 0


# Random masks


def masks(dropout: dict, parallel: dict) -> dict[str, Any]:
    """What ranks see of two forward passes of GPT-2, all of whose heads are equal."""
    whole = tiny_gpt2(**dropout).train()
    with torch.no_grad():
        for block in whole.transformer.h:
            for parameter in (block.attn.c_attn.weight, block.attn.c_attn.bias):
                heads = parameter.unflatten(-1, (3, 4, 8))
                heads.copy_(heads[..., :1, :].expand_as(heads))
    part, _ = split_copy(whole, **parallel)
    seen: dict[str, list[torch.Tensor]] = {"heads": [], "residual": []}
    attention = part.transformer.h[0].attn
    attention.c_proj.register_forward_pre_hook(lambda module, args: seen["heads"].append(args[0]))
    attention.resid_dropout.register_forward_hook(lambda module, args, out: seen["residual"].append(out))
    inputs = batch(32)
    outputs = []
    for _ in range(2):
        torch.manual_seed(5)
        loss = loss_of(part, inputs)
        loss.backward()
        outputs.append(loss.item())
    state = from_all_ranks(torch.get_rng_state())
    everyones = {name: from_all_ranks(tensors[0]) for name, tensors in seen.items()}
    return {
        "repeats": outputs[0] == outputs[1],
        "loss": outputs[0],
        "generators agree": all(torch.equal(each, state[0]) for each in state),
        "equal": {name: torch.equal(*tensors) for name, tensors in everyones.items()},
        "same zeros": torch.equal(*(tensor == 0 for tensor in everyones["residual"])),
        "zeros": (torch.stack(everyones["residual"]) == 0).float().mean().item(),
        "gradients agree": all(
            torch.equal(*from_all_ranks(p.grad)) for n, p in part.named_parameters() if "ln_" in n or "wpe" in n
        ),
    }


def masks_many(parallel: dict, *dropouts: dict) -> list[dict[str, Any]]:
    return [masks(dropout, parallel) for dropout in dropouts]


@pytest.mark.case("I6")
def test_masks_are_the_same_on_what_all_ranks_hold_and_differ_on_their_own_heads(world):
    without, on_heads, on_residual = world(masks_many, 2, {}, {}, {"attn_pdrop": 0.5}, {"resid_pdrop": 0.5})[0]
    assert without["equal"] == {"heads": True, "residual": True}  # The heads are equal, so only masks tell them apart.
    assert on_heads["equal"] == {"heads": False, "residual": True}
    assert on_residual["equal"]["residual"] and 0.45 < on_residual["zeros"] < 0.55
    for result in (on_heads, on_residual):
        assert result["repeats"] and result["generators agree"] and result["gradients agree"]
        assert abs(result["loss"] - without["loss"]) > 1e-6


@pytest.mark.case("I6")
def test_masks_of_cut_sequences_are_each_ranks_own(world):
    for result in world(masks_many, 2, SEQUENCE, {"resid_pdrop": 0.5}, {"resid_pdrop": 0.5, "attn_pdrop": 0.5})[0]:
        assert result["repeats"] and result["generators agree"] and result["gradients agree"]
        assert 0.45 < result["zeros"] < 0.55 and not result["same zeros"]


def recomputed_with_dropout(parallel: dict) -> float:
    """The largest difference of a gradient when activations are recomputed, by that gradient's largest element."""
    whole = tiny_gpt2(attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3).train()
    gradients = []
    for checkpointed in (False, True):
        part, _ = split_copy(whole, **parallel)
        if checkpointed:
            part.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(5)
        loss_of(part, batch(11)).backward()
        gradients.append([parameter.grad for parameter in part.parameters()])
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(*gradients, strict=True))


@pytest.mark.slow
@pytest.mark.case("I6")
@pytest.mark.parametrize("parallel", [{}, SEQUENCE], ids=["whole sequences", "cut sequences"])
def test_recomputed_activations_get_the_masks_they_had(world, parallel):
    assert max(world(recomputed_with_dropout, 2, parallel)) <= GRADIENT_TOLERANCE


def mean_output(parallel: dict, rate: float, passes: int) -> torch.Tensor:
    """The mean over passes of what the last MLP adds to the hidden states, all positions of it."""
    part, _ = split_copy(make_wide_gpt2(rate), **parallel)
    total: list[torch.Tensor] = []
    part.transformer.h[-1].mlp.register_forward_hook(lambda module, args, out: total.append(out.detach()))
    inputs = batch(8)
    with torch.no_grad():
        for _ in range(passes):
            part(**inputs, use_cache=False)
    mean = torch.stack(total).mean(0)
    return torch.cat(from_all_ranks(mean), 1) if parallel else mean


def make_wide_gpt2(rate: float) -> GPT2LMHeadModel:
    """Dropout behind the MLP of its only block, so that its mean is the output without it."""
    model = tiny_gpt2().train()
    del model.transformer.h[1:]
    model.config.n_layer = 1
    model.transformer.h[0].mlp.dropout.p = rate
    return model


@pytest.mark.slow
@pytest.mark.case("I6")
@pytest.mark.parametrize("parallel", [{}, SEQUENCE], ids=["whole sequences", "cut sequences"])
def test_dropout_leaves_the_mean_as_it_is(world, parallel):
    expected = world(mean_output, 2, {}, 0.0, 1)[0]
    got = world(mean_output, 2, parallel, 0.5, 400)[0]
    # Each element is 0 or doubled: the mean of 400 is off by 1/20 of its size; of all 512 the worst by 4.5 times that.
    assert ((got - expected).abs() <= 0.25 * expected.abs() + 1e-6).all()
    assert not torch.equal(got, expected)


# Refusals


def mesh_of(size: int) -> Any:
    group = SimpleNamespace(size=lambda: size, rank=lambda: 0)
    return SimpleNamespace(tp_group=group, tp_host_group=group, grid=Grid(size, 0, 0, size, size))


def split(model: nn.Module, size: int, **parallel: Any) -> Any:
    return split_model(model, ParallelConfig(tp=size, **parallel), mesh_of(size))


@pytest.mark.case("I1")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "says", "sizes"),
    [
        (6, 6, 4, "6 attention heads", "1, 2, 3, 6"),
        (12, 3, 2, "3 KV heads", "1, 3, 6, 12"),
        (9, 3, 2, "9 attention heads", "1, 3, 9"),
    ],
)
def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_work(heads, kv_heads, tp, says, sizes):
    model = tiny_llama(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden=72, intermediate=144)
    with pytest.raises(ModelError) as error:
        split(model, tp)
    assert says in error.value.found
    assert error.value.change.endswith(f": {sizes}")
    for size in map(int, sizes.split(",")):
        split(tiny_llama(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden=72, intermediate=144), size)


def test_a_width_that_does_not_divide_is_refused():
    with pytest.raises(ModelError, match=r"50 outputs of model\.layers\.\*\.mlp\.gate_proj"):
        split(tiny_llama(intermediate=50), 4)


class NoPlan(nn.Module):
    """No model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def test_a_model_without_a_plan_is_refused_and_takes_one_from_the_config():
    with pytest.raises(ModelError, match=r"there is no plan for NoPlan[\s\S]*parallel\.tp_plan"):
        split(NoPlan(), 2)
    shardings = split(NoPlan(), 2, tp_plan={"up": "colwise", "down": "rowwise"}).shardings
    assert {name: sharding.local_shape for name, sharding in shardings.items()} == {
        "up.weight": (4, 4),
        "up.bias": (4,),
        "down.weight": (4, 4),
    }


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"model.layers.*.mlp.gate": "colwise"}, "model.layers.*.mlp.gate, which matches no module"),
        ({"model.layers.*.mlp.act_fn": "colwise"}, "colwise is given to model.layers.0.mlp.act_fn"),
        ({"model.layers.*.mlp.up_proj": "diagonal"}, "diagonal"),
        ({"*": "colwise"}, 'colwise is given to model, which is a LlamaModel (entry "*" of parallel.tp_plan)'),
        ({"*": "replicate"}, "no entry of the plan shards a module"),
        ({"model.layers.*.mlp": "replicate"}, "inside it model.layers.0.mlp.down_proj is sharded"),
    ],
)
def test_a_wrong_entry_of_the_configs_plan_is_refused(plan, says):
    with pytest.raises(ModelError) as error:
        split(tiny_llama(), 2, tp_plan=plan)
    assert says in error.value.found
    assert "parallel.tp_plan" in str(error.value)


@pytest.mark.parametrize(
    ("name", "style", "says"),
    [
        ("model.layers.*.mlp.gate_proj", "replicate", "by colwise, together with up_proj, down_proj"),
        ("model.layers.*.mlp.gate_proj", "rowwise", "by colwise, together with"),
        ("model.layers.*.mlp.gate_proj", "packed_colwise", "by colwise, together with"),
        ("model.layers.*.mlp.down_proj", "replicate", "by rowwise, together with gate_proj, up_proj"),
        ("model.layers.*.self_attn.q_proj", "replicate", "by colwise, together with k_proj, v_proj, o_proj"),
        ("model.layers.*.self_attn.q_proj", "qkv_colwise", "by colwise, together with"),
        ("model.layers.*.mlp", "all_reduce", "model.layers.0.mlp.down_proj sums its output already"),
        ("model.layers.*.input_layernorm", "all_reduce", "no layer inside it is sharded"),
        ("model.norm", "replicated_with_grad_allreduce", "no module that holds it has layers that are sharded"),
        ("lm_head", "rowwise", "lm_head, the head, is given"),
        ("lm_head", "packed_colwise", "lm_head, the head, is given"),
    ],
)
def test_a_style_that_does_not_fit_a_layers_role_is_refused(name, style, says):
    with pytest.raises(ModelError) as error:
        split(tiny_llama(tied=False, vocab=64), 2, tp_plan={name: style})
    assert says in error.value.found
    assert f'style {style} (entry "{name}" of parallel.tp_plan)' in error.value.found


def test_a_norm_whose_attention_is_left_whole_has_no_gradient_to_sum():
    plan = {"model.layers.*.self_attn.?_proj": "replicate"}
    with pytest.raises(ModelError, match=r"self_attn\.q_norm has style replicated_with_grad_allreduce"):
        split(tiny_qwen3(), 2, tp_plan=plan)


@pytest.mark.parametrize(
    "plan",
    [
        {"lm_head": "replicate"},
        {"model.embed_tokens": "replicate"},
        {"model.embed_tokens": "embedding_colwise"},
        {"model.embed_tokens": "embedding_colwise", "lm_head": "rowwise_split_input"},
    ],
)
def test_styles_that_a_tied_embedding_and_head_cannot_both_have_are_refused(plan):
    with pytest.raises(ModelError, match="model.embed_tokens and lm_head share one parameter") as error:
        split(tiny_llama(), 2, tp_plan=plan)
    for name, style in plan.items():
        assert f'{name} style {style} (entry "{name}" of parallel.tp_plan)' in error.value.found


def test_layers_whose_shapes_do_not_fit_are_told_in_the_first_forward_pass():
    model = NoPlan()
    split(model, 2, tp_plan={"up": "colwise"})
    with pytest.raises(ModelError, match=r"do not fit one another[\s\S]*parallel\.tp_plan, which has 'up'") as error:
        model.to_empty(device="cpu")(torch.ones(3, 4))
    assert type(error.value.__cause__) is RuntimeError


def test_a_user_defined_plan_is_warned_of(caplog):
    for plan, warnings in (({}, 0), ({"model.layers.*.mlp.*": "replicate"}, 1)):
        caplog.clear()
        with caplog.at_level("WARNING"):
            split(tiny_llama(), 2, tp_plan=plan)
        assert caplog.text.count("not verified") == warnings


USER_PLANS = [
    {"model.layers.*.mlp.*": "replicate"},
    {"model.layers.0.self_attn.*": "replicate"},
    {"model.embed_tokens": "replicate"},
    {"model.embed_tokens": "embedding_colwise"},
    {"lm_head": "replicate"},
    {"lm_head": "rowwise_split_input"},
]


def test_user_defined_plans_that_fit_give_loss_and_gradients_of_one_process(world):
    cases = [("llama", (11, 9), {"tp_plan": plan, **way}) for plan in USER_PLANS for way in ({}, SEQUENCE)]
    cases.append(("tied llama", (11,), {"tp_plan": {"model.embed_tokens": "replicate", "lm_head": "replicate"}}))
    cases.append(("qwen3", (11,), {"tp_plan": {"model.layers.*.self_attn.*": "replicate"}}))
    for results in world(compare_many, 2, *cases):
        check(results)
        kept = [{n for n, share in result["sizes"].items() if share == 1} for result in results]
        assert "model.layers.1.mlp.up_proj.weight" in kept[0]
        assert "model.layers.0.self_attn.q_proj.weight" in kept[2]
        assert "model.embed_tokens.weight" in kept[4]
        assert results[6]["sizes"]["model.embed_tokens.weight"] == 1 / 2  # not padded, as rows would be
        assert "lm_head.weight" in kept[8]


def test_a_plan_that_fits_nothing_is_refused_and_not_run_whole():
    with pytest.raises(ModelError, match=r"matches a module of LlamaModel[\s\S]*layers\.\*\.self_attn\.q_proj"):
        split(tiny_llama().model, 2)


def test_every_style_that_a_plan_may_name_is_there():
    assert set(STYLES) == set(STYLE_NAMES)


def test_modules_that_stay_whole_are_listed_once_per_kind():
    assert split(tiny_llama(), 2).whole_modules == (
        "model.layers.*.input_layernorm",
        "model.layers.*.post_attention_layernorm",
        "model.norm",
    )


def test_hidden_states_of_single_blocks_are_refused_where_sequences_are_cut(world):
    with pytest.raises(AssertionError, match=r"output_hidden_states is true[\s\S]*sequence_parallel to false"):
        world(ask_for_hidden_states, 2)


def ask_for_hidden_states() -> None:
    part, _ = split_copy(make("llama"), **SEQUENCE)
    part(**batch(11), output_hidden_states=True)


def test_layers_that_read_one_tensor_are_computed_together():
    model = tiny_llama()
    split(model, 2)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    assert attention.q_proj.column_group.members == [attention.q_proj, attention.k_proj, attention.v_proj]
    assert mlp.gate_proj.column_group is mlp.up_proj.column_group


def test_the_model_its_class_and_its_config_stay_as_they_are():
    model = tiny_llama()
    names, config = [name for name, _ in model.named_parameters()], model.config.to_dict()
    split(model, 2)
    assert [name for name, _ in model.named_parameters()] == names
    assert model.config.to_dict() == config
    assert type(model).__name__ == "LlamaForCausalLM" and not dist.is_initialized()
    assert model.lm_head.weight is model.model.embed_tokens.weight
