"""Pipeline parallelism on model types that differ in what lies around and between their layers; `make matrix-pp` takes
all.
"""

import pytest

from ds_trainer.models.spec import families
from tests.matrix.compare import worst
from tests.matrix.pp import TABLE, run, table
from tests.matrix.pp_compare import compare_all

SAMPLE = [
    "llama",
    "gemma3_text",  # Embedding scaled, logits capped, kinds of layers alternate.
    "gpt2",  # Positions have an embedding of their own, and attention is scaled by the layer's number.
    "opt",  # A list of layers deeper inside, projections before and after it.
    "mixtral",
    "granite",  # Multipliers of embedding, residuals and logits.
    "deepseek_v3",  # Latent attention, and a dense layer before the sparse ones.
    "bamba",  # Layers of Mamba and of attention.
    "bloom",  # A norm after the embedding.
    "phi",
    "mistral",
    "gpt_neox",  # Head and embedding have names of their own.
]


@pytest.fixture(scope="module")
def outcomes(world):
    return world(compare_all, 1, SAMPLE)[0]


@pytest.mark.parametrize("model_type", SAMPLE)
def test_loss_and_gradients_of_two_and_three_stages_are_those_of_the_whole_model(outcomes, model_type):
    for outcome in outcomes[model_type]:
        assert (outcome.verdict, outcome.reason) == ("passed", "")


@pytest.mark.slow
def test_every_model_type_is_as_the_table_in_the_docs_says():
    outcomes = run(list(families()))
    verdicts = {name: worst(of_sizes).verdict for name, of_sizes in outcomes.items()}
    assert "failed" not in verdicts.values(), {n: outcomes[n] for n in outcomes if verdicts[n] == "failed"}
    assert list(verdicts.values()).count("passed") >= 88
    assert table(outcomes) == TABLE.read_text(), "run `make matrix-pp`"
