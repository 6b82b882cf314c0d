"""Tensor parallelism on the model types that most people train, and on those of each special style; `make matrix-tp`
takes all.
"""

import pytest

from tests.matrix.compare import compare_all
from tests.matrix.tp import MATRIX, types

# The last with mla_kv_a_proj.
QUICK = ["llama", "qwen3_moe", "mixtral", "gemma3_text", "phi3", "gpt2", "deepseek_v3"]
SLOW = ["qwen2", "qwen3", "mistral", "gemma2", "gpt_neox", "olmo2"]
# moe_output_bias, all_reduce, moe_identity_expert, embedding_colwise.
SLOW += ["gpt_oss", "inkling_text", "longcat_flash", "qwen4_exp_text"]


@pytest.mark.parametrize("types", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["some", "others"])
def test_loss_and_gradients_are_those_of_one_process_without_and_with_sequence_parallelism(world, types):
    outcomes = world(compare_all, 2, types)[0]
    found = {name: {(outcome.verdict, outcome.reason) for outcome in outcomes[name]} for name in types}
    assert found == {name: {("passed", "")} for name in types}
    assert all(outcome.share < 0.75 for name in types for outcome in outcomes[name])


@pytest.mark.parametrize(
    "model_type, name, style, off",
    [
        ("qwen3", "model.layers.*.self_attn.q_norm", "replicate", "self_attn.q_norm.weight is off by"),
        ("mixtral", "model.layers.*.mlp.experts", "local_params", "mlp.experts.down_proj is off by"),
        ("mixtral", "model.layers.*.mlp.experts.gate_up_proj", "colwise", "mlp.experts.gate_up_proj is off by"),
        (
            "deepseek_v3",
            "model.layers.*.self_attn.kv_a_proj_with_mqa",
            "replicate",
            "kv_a_proj_with_mqa.weight is off",
        ),
        ("longcat_flash", "model.layers.*.mlp.experts.identity_expert", "replicate", "loss is off by"),
        ("gpt_oss", "model.layers.*.mlp.experts.down_proj_bias", "replicate", "mlp.experts.down_proj_bias is off by"),
    ],
)
def test_a_style_that_is_left_out_shows(world, model_type, name, style, off):
    plain, _ = world(compare_all, 2, [model_type], {name: style})[0][model_type]
    assert plain.verdict == "failed"
    assert off in plain.reason


def test_the_page_has_every_model_type_with_a_plan_and_no_fault():
    rows = MATRIX.read()
    assert list(rows) == sorted(types()), "run `make matrix-tp`"
    assert {columns[1] for columns in rows.values()} == {"passed"}
    refused = [columns[2] for columns in rows.values() if columns[2] != "passed"]
    assert len(refused) <= 2 and all(verdict.startswith("refused: ") for verdict in refused)
