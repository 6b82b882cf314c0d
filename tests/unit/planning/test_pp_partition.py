"""What layers cost, and which of them each stage gets: held to a count by hand, to built models, and to all cuts."""

import random
from itertools import combinations, pairwise

import pytest

from ds_trainer.planning.pp_costs import FACTS, Costs, ModelParts
from ds_trainer.planning.pp_partition import partition, split_of
from tests.helpers.table import table

LLAMA = {"vocab_size": 50, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}


def shapes(layers=2, **more):
    found = {"model.embed_tokens.weight": (50, 8), "model.norm.weight": (8,)}
    for layer in range(layers):
        found |= {
            f"model.layers.{layer}.self_attn.q_proj.weight": (8, 8),
            f"model.layers.{layer}.self_attn.o_proj.weight": (8, 8),
            f"model.layers.{layer}.mlp.up_proj.weight": (24, 8),
            f"model.layers.{layer}.input_layernorm.weight": (8,),
        }
    return found | {name.replace("__", "."): shape for name, shape in more.items()}


def lengths(ranges):
    return [stop - start for start, stop in ranges]


def test_flops_are_two_for_each_weight_and_four_for_each_feature_of_a_key_that_is_met():
    found = ModelParts(shapes(), LLAMA).flops(5)
    matrices, keys = 8 * 8 + 8 * 8 + 24 * 8, (1 + 2 + 3 + 4 + 5) / 5
    assert found.layers == (2 * matrices + 4 * 8 * keys,) * 2
    assert (found.first, found.last) == (0, 2 * 50 * 8), "a tied head computes as much as one of its own"
    untied = ModelParts(shapes(lm_head__weight=(50, 8)), LLAMA)
    assert untied.flops(5) == found
    assert [part.parameters().last for part in (ModelParts(shapes(), LLAMA), untied)] == [8, 408]


def test_windows_and_kinds_of_layers_bound_the_keys_that_are_met():
    kinds = ["full_attention", "sliding_attention", "linear_attention", "chunked_attention"]
    facts = LLAMA | {"num_hidden_layers": 4, "layer_types": kinds, "sliding_window": 2, "attention_chunk_size": 3}
    without = ModelParts(shapes(4), facts | {"num_attention_heads": 0}).flops(5).layers
    found = ModelParts(shapes(4), facts).flops(5).layers
    keys = [3.0, (1 + 2 * 4) / 5, 0.0, (1 + 2 + 3 * 3) / 5]
    assert [a - b for a, b in zip(found, without, strict=True)] == [pytest.approx(4 * 8 * number) for number in keys]
    everywhere = ModelParts(shapes(), LLAMA | {"sliding_window": 2})
    assert everywhere.flops(5).layers < ModelParts(shapes(), LLAMA).flops(5).layers
    off = ModelParts(shapes(), LLAMA | {"sliding_window": 2, "use_sliding_window": False})
    assert off.flops(5) == ModelParts(shapes(), LLAMA).flops(5)


def test_of_the_experts_those_count_that_a_token_is_sent_to_however_they_are_stored():
    facts = LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}
    apart = {f"model.layers.0.mlp.experts.{number}.w1.weight": (16, 8) for number in range(4)}
    merged = {"model.layers.0.mlp.experts.gate_up_proj": (4, 16, 8)}
    counts = [ModelParts(shapes() | experts, facts) for experts in (apart, merged)]
    extra = [parts.flops(5).layers[0] - parts.flops(5).layers[1] for parts in counts]
    assert extra == [2 * 2 * 16 * 8] * 2
    assert [parts.parameters().layers[0] - parts.parameters().layers[1] for parts in counts] == [4 * 16 * 8] * 2


def test_layers_are_found_beside_towers_of_vision_and_layers_for_further_tokens():
    tower = {f"vision.blocks.{number}.fc.weight": (8, 8) for number in range(5)}
    more = {"model.layers.2.eh_proj.weight": (99, 99)}
    parts = ModelParts(shapes() | tower | more, LLAMA)
    assert parts.num_layers == 2
    assert parts.parameters() == ModelParts(shapes(), LLAMA).parameters()
    body = {name.removeprefix("model.layers."): shape for name, shape in shapes().items()}
    assert ModelParts(body, LLAMA).flops(5) == ModelParts(shapes(), LLAMA).flops(5), "names without what precedes them"
    assert ModelParts({"weight": (3, 3)}, LLAMA).num_layers == 0


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "gemma3_text", "deepseek_v2", "qwen3_next"])
def test_headers_and_the_built_model_cost_the_same(tmp_path, kind):
    from ds_trainer.config.stage_assignment import model_parts
    from ds_trainer.models.small_configs import causal_lm_classes, small_configs
    from ds_trainer.planning.checkpoint_spec import read_spec

    cls, config_class = causal_lm_classes(kind)
    model = cls(small_configs(config_class)[0])
    model.save_pretrained(tmp_path)
    facts = {name: getattr(model.config, name) for name in FACTS if hasattr(model.config, name)}
    built = ModelParts({n: tuple(p.shape) for n, p in model.named_parameters()}, facts)
    told = model_parts(read_spec(str(tmp_path)))
    assert told.flops(64) == built.flops(64)
    assert told.parameters() == built.parameters()
    whole = built.parameters()
    assert whole.first + sum(whole.layers) + whole.last == sum(p.numel() for p in model.parameters())


@table("seed", range(40))
def test_no_other_cut_has_a_faster_slowest_stage_nor_of_these_more_even_ones(seed):
    draw = random.Random(seed)
    num_layers = draw.randint(2, 9)
    num_stages = draw.randint(1, num_layers)
    layers = tuple(draw.randint(1, 6) for _ in range(num_layers))
    costs = Costs(draw.randint(0, 4), layers, draw.randint(0, 9))

    def key(ranges):
        of_stages = costs.of_stages(ranges)
        return max(of_stages), sum(cost * cost for cost in of_stages)

    cuts = combinations(range(1, num_layers), num_stages - 1)
    best = min(key(tuple(pairwise((0, *cut, num_layers)))) for cut in cuts)
    found = partition(costs, num_stages)
    assert key(found) == best
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])] and found[-1][1] == num_layers
    assert min(lengths(found)) >= 1


@pytest.mark.case("I9")
def test_layers_that_do_not_divide_are_dealt_out_all_the_same():
    assert lengths(partition(Costs(0, (1.0,) * 5, 0.5), 2)) == [3, 2]
    assert lengths(partition(Costs(0, (1.0,) * 5, 0.5), 4)) == [1, 1, 2, 1]
    many = lengths(partition(Costs(0, (1.0,) * 80, 0.5), 32))
    assert sum(many) == 80 and set(many) == {2, 3} and many[-1] == 2, "80 layers on 16 ranks with 2 stages each"


def test_a_heavy_head_makes_the_last_stage_short():
    assert lengths(partition(Costs(0, (1.0,) * 8, 3.0), 2)) == [5, 3]
    assert lengths(partition(Costs(0, (1.0,) * 8, 30.0), 2)) == [7, 1]
    assert split_of([3, 1, 2]) == ((0, 3), (3, 4), (4, 6))
