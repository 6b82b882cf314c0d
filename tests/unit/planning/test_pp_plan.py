"""Where the model types of the shipped table can be cut into stages, and that transformers' own plans say the same."""

import pytest

from ds_trainer.planning.checkpoint_spec import families
from ds_trainer.planning.pp_plan import StagePlan, pp_unsupported_reason, stage_plan
from tests.helpers.table import table

PLANS = {name: plan for name in families() if (plan := stage_plan(name)) is not None}


def test_a_plan_names_what_lies_around_the_layers():
    assert stage_plan("gpt2") == StagePlan(
        "transformer.h", ("transformer.wte", "transformer.wpe"), ("transformer.ln_f", "lm_head")
    )
    assert pp_unsupported_reason("gpt2") is None


def test_a_type_that_cannot_be_cut_has_a_reason_and_an_unknown_one_has_none():
    assert (stage_plan("cpmant"), stage_plan("no_such_type"), pp_unsupported_reason("no_such_type")) == (
        None,
        None,
        None,
    )
    assert "more that has a gradient than hidden states" in pp_unsupported_reason("cpmant")


def test_every_type_has_either_a_plan_or_a_reason_why_not():
    assert all((stage_plan(name) is None) != (pp_unsupported_reason(name) is None) for name in families())


def test_plans_reach_most_model_types():
    assert len(PLANS) >= 170


@table("model_type", PLANS)
def test_no_module_is_both_before_and_after_the_layers_or_holds_them(model_type):
    plan = PLANS[model_type]
    names = [plan.layers, *plan.first, *plan.last]
    assert not [(a, b) for a in names for b in names if a is not b and f"{a}.".startswith(f"{b}.")]


@pytest.mark.slow
def test_what_transformers_plans_name_is_where_they_have_it():
    import torch

    from ds_trainer.models.small_configs import causal_lm_classes, small_configs

    agreeing = 0
    for name, plan in PLANS.items():
        cls, config_class = causal_lm_classes(name)
        with torch.device("meta"):
            model = cls(small_configs(config_class)[0])
        theirs = [n for n in model.pp_plan if n.startswith(plan.layers.rpartition(".")[0])]
        if plan.layers in theirs:
            at = theirs.index(plan.layers)
            has_parameters = {n for n, module in model.named_modules() if any(True for _ in module.parameters())}
            assert set(theirs[:at]) & has_parameters <= set(plan.first), name
            assert set(theirs[at + 1 :]) & has_parameters <= set(plan.last), name
            agreeing += 1
    assert agreeing >= 88
