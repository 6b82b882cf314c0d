"""A sample is rotated by its own length, whatever samples it is batched with and whatever came before."""

import copy

import pytest
import torch

from ds_trainer.models.rope_lengths import use_own_lengths
from tests.helpers.rope import ROPES, rope_model, rope_rows


def padded(rows):
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.case("K4")
@pytest.mark.parametrize("kind", ROPES)
def test_logits_of_a_batch_are_those_of_each_sample_alone(kind):
    model, rows = rope_model(kind), [row["input_ids"] for row in rope_rows()]
    alone = [copy.deepcopy(model)(input_ids=torch.tensor([row])).logits[0] for row in rows]
    together = copy.deepcopy(model)(**padded(rows)).logits
    use_own_lengths(model)
    for order in ([1, 0, 2, 3], [0, 2], [3, 2, 0]):
        logits = model(**padded([rows[i] for i in order])).logits
        for place, i in enumerate(order):
            torch.testing.assert_close(logits[place, : len(rows[i])], alone[i], rtol=1e-5, atol=1e-5)
    assert (together[0, : len(rows[0])] - alone[0]).abs().max() > 1e-3, "transformers' own depends on the batch"


@pytest.mark.parametrize("kind", ROPES)
def test_a_batch_within_the_original_positions_costs_one_call(kind, monkeypatch):
    model, calls = rope_model(kind), []
    rotary = type(model.model.rotary_emb)
    forward = rotary.forward
    monkeypatch.setattr(rotary, "forward", lambda *args, **inputs: calls.append(0) or forward(*args, **inputs))
    use_own_lengths(model)
    model(**padded([[5] * 60, [6] * 20]))
    assert len(calls) == 1
