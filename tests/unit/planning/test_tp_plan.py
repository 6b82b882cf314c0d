"""Which style a plan gives which module, and that every shipped plan can be read."""

import pytest

from ds_trainer.planning.checkpoint_spec import families
from ds_trainer.planning.tp_plan import STYLE_NAMES, TensorPlan, plan_for
from tests.helpers.table import table

PLAN = TensorPlan(
    {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.experts": "moe_tp_experts", "lm_head": "replicate"},
    {"*.3.mlp.up_proj": "replicate", "*.up_proj": "rowwise"},
)


@table(
    "name, style",
    [
        ("model.layers.0.mlp.up_proj", "rowwise"),
        ("model.layers.3.mlp.up_proj", "replicate"),
        ("model.layers.12.mlp.experts", "moe_tp_experts"),
        ("model.layers.12.mlp.experts.3", None),
        ("model.layers.a.mlp.experts", None),
        ("encoder.model.layers.0.mlp.experts", None),
        ("lm_head", "replicate"),
    ],
)
def test_a_number_stands_for_a_layer_and_an_override_comes_first(name, style):
    assert PLAN.style_of(name) == style


@pytest.mark.parametrize(
    "name, entry",
    [
        ("model.layers.3.mlp.up_proj", "*.3.mlp.up_proj"),
        ("model.layers.0.mlp.up_proj", "*.up_proj"),
        ("lm_head", None),
    ],
)
def test_the_overrides_entry_that_decides_is_known(name, entry):
    assert PLAN.entry_of(name) == entry


def test_entries_that_match_nothing_are_named():
    assert PLAN.unmatched(["model.layers.0.mlp.up_proj", "lm_head"]) == [
        "model.layers.*.mlp.experts",
        "*.3.mlp.up_proj",
    ]


def test_an_entry_that_only_overrides_hide_counts_as_matched():
    plan = TensorPlan({"model.layers.*.mlp.up_proj": "colwise"}, {"*.up_proj": "replicate"})
    assert plan.unmatched(["model.layers.0.mlp.up_proj"]) == []


def test_a_type_without_a_plan_has_one_only_if_it_is_given():
    assert plan_for("rwkv") is None
    assert plan_for("no_such_type", {"*.up": "colwise"}).style_of("a.up") == "colwise"
    assert plan_for("llama").style_of("model.layers.0.self_attn.q_proj") == "colwise"


def test_every_shipped_plan_uses_known_styles_and_each_style_has_its_act():
    from ds_trainer.parallel.tensor.styles import STYLES

    shipped = {style for family in families().values() for style in family.tp_plan.values()}
    assert shipped <= set(STYLE_NAMES) == set(STYLES)


def test_plans_reach_most_model_types():
    assert sum(bool(family.tp_plan) for family in families().values()) >= 116
