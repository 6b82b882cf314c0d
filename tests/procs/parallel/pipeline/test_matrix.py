"""Pipeline parallelism on model types that differ in what lies around and between their layers; `make matrix-pp` takes
all.
"""

from dataclasses import replace
from unittest import mock

import pytest

from ds_trainer.models.transformer_blocks import map_hidden_states
from ds_trainer.parallel.make_families import stages
from ds_trainer.parallel.pipeline.split import split_into_stages
from ds_trainer.planning.checkpoint_spec import families
from tests.helpers.table import table
from tests.matrix import pp_compare
from tests.matrix.pp import MATRIX
from tests.matrix.pp_compare import compare_all

QUICK = [
    "llama",
    "gemma3_text",  # Embedding scaled, logits capped, kinds of layers alternate.
]
SLOW = [
    "gpt2",  # Positions have an embedding of their own, and attention is scaled by the layer's number.
    "deepseek_v3",  # Latent attention, and a dense layer before the sparse ones.
    "opt",  # A list of layers deeper inside, projections before and after it.
    "mixtral",
    "granite",  # Multipliers of embedding, residuals and logits.
    "bamba",  # Layers of Mamba and of attention.
    "bloom",  # A norm after the embedding.
    "phi",
    "mistral",
    "gpt_neox",  # Head and embedding have names of their own.
]


@pytest.mark.parametrize("types", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["some", "others"])
def test_loss_and_gradients_of_two_and_three_stages_are_those_of_the_whole_model(world, types):
    outcomes = world(compare_all, 1, types)[0]
    found = {name: {(outcome.verdict, outcome.reason) for outcome in outcomes[name]} for name in types}
    assert found == {name: {("passed", "")} for name in types}


@table("model_type", QUICK)
def test_the_shipped_plan_is_what_small_models_show(model_type):
    shipped = vars(families()[model_type])
    assert stages(model_type).items() <= shipped.items(), "run `make families`"


def compare_with(fault, model_type):
    with mock.patch.object(pp_compare, "split_into_stages", fault):
        return compare_all([model_type])[model_type]


def scales_what_it_receives(model, ranges, own_stages, owner_of):
    staged = split_into_stages(model, ranges, own_stages, owner_of)
    if own_stages[0] > 0:
        layer = model.get_submodule(f"model.layers.{ranges[own_stages[0]][0]}")
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: map_hidden_states(args, kwargs, lambda hidden: 1.375 * hidden),
            with_kwargs=True,
        )
    return staged


def loses_the_gradient_of_its_copy(model, ranges, own_stages, owner_of):
    staged = split_into_stages(model, ranges, own_stages, owner_of)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(own_stages[0] not in staged.replicas.get(name, ()))
    return staged


def keeps_a_copy_of_its_own(model, ranges, own_stages, owner_of):
    return replace(split_into_stages(model, ranges, own_stages, owner_of), replicas={})


@pytest.mark.parametrize(
    "fault, found",
    [
        (scales_what_it_receives, "model.layers.0.input_layernorm.weight is off by"),
        (loses_the_gradient_of_its_copy, "model.embed_tokens.weight is off by"),
        (keeps_a_copy_of_its_own, "does not hold what it should of model.embed_tokens.weight"),
    ],
)
def test_a_cut_that_computes_something_else_shows(world, fault, found):
    for outcome in world(compare_with, 1, fault, "llama")[0]:
        assert outcome.verdict == "failed"
        assert found in outcome.reason


def test_the_page_has_every_model_type_and_no_fault():
    rows = MATRIX.read()
    assert list(rows) == sorted(families()), "run `make matrix-pp`"
    verdicts = [columns[1:3] for columns in rows.values()]
    assert {verdict for pair in verdicts for verdict in pair} == {"passed", "refused"}
    assert verdicts.count(["passed", "passed"]) >= 170
