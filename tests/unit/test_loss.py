"""Sums of token losses and the counts they are divided by."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from ds_trainer.config.training_sections import LossConfig
from ds_trainer.errors import ConfigError, DataError
from ds_trainer.loss import CausalLMLoss, CrossEntropy, ModelOwnLoss, UserLoss, make_loss, shifted_labels


@pytest.fixture
def batch():
    return {
        "input_ids": torch.tensor([[3, 4, 5, 6], [7, 8, 9, 0]]),
        "labels": torch.tensor([[3, -100, 5, 6], [7, 8, -100, -100]]),
    }


@pytest.fixture
def outputs():
    generator = torch.Generator().manual_seed(0)
    return {"logits": torch.randn(2, 4, 11, generator=generator)}


def by_hand(outputs, smoothing=0.0):
    """Position 1 and 2 predict the tokens 5 and 6 of the first row, position 0 the token 8 of the second."""
    picked = outputs["logits"][[0, 0, 1], [1, 2, 0]].log_softmax(-1)
    target = picked[range(3), [5, 6, 8]]
    return -((1 - smoothing) * target + smoothing * picked.mean(-1)).sum()


def test_labels_are_held_against_the_logits_one_position_before():
    assert shifted_labels(torch.tensor([[1, 2, 3]])).tolist() == [[2, 3, -100]]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_sum_counts_each_predicted_label_once(batch, outputs, smoothing):
    loss = CausalLMLoss(CrossEntropy(smoothing))
    assert loss.num_tokens(batch) == 3, "nothing predicts the first label of a row"
    torch.testing.assert_close(loss.loss_sum(outputs, batch, step_tokens=99), by_hand(outputs, smoothing))
    assert loss.inputs(batch).keys() == {"input_ids"}


def test_a_batch_without_labels_sums_to_zero_and_keeps_its_graph(batch, outputs):
    outputs["logits"].requires_grad_()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss = CausalLMLoss(CrossEntropy())
    assert loss.num_tokens(batch) == 0
    total = loss.loss_sum(outputs, batch, step_tokens=5)
    total.backward()
    assert total.item() == 0.0 and outputs["logits"].grad.abs().max() == 0.0


def test_the_loss_of_low_precision_logits_is_computed_in_fp32(batch, outputs):
    low = {"logits": outputs["logits"].bfloat16()}
    got = CausalLMLoss(CrossEntropy()).loss_sum(low, batch, step_tokens=3)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, by_hand({"logits": low["logits"].float()}))


@pytest.mark.parametrize(
    ("labels", "count"),
    [
        (torch.tensor([0, 2, -100]), 2),
        (torch.tensor([[4, -100], [5, 6]]), 3),
        (torch.tensor([0.5, 1.5, -100.0]), 3),
        (torch.tensor([[0.0, 1.0], [1.0, 1.0]]), 2),
        (torch.full((2,), -100.0), 0),
    ],
    ids=["classes", "tokens", "values", "value-rows", "filler-values"],
)
def test_a_models_own_mean_is_weighted_by_what_it_averages_over(labels, count):
    loss = ModelOwnLoss("Bert", True)
    assert loss.num_tokens({"labels": labels}) == count


def test_a_models_own_mean_becomes_a_sum(batch):
    outputs = {"loss": torch.tensor(2.0), "logits": torch.ones(2, 3)}
    loss = ModelOwnLoss("Bert", True)
    assert loss.loss_sum(outputs, batch, step_tokens=99).item() == 2.0 * 5
    assert loss.inputs(batch).keys() == {"input_ids", "labels"}


def test_a_models_mean_over_nothing_does_not_reach_the_gradient(batch):
    logits = torch.ones(2, 3, requires_grad=True)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    total = ModelOwnLoss("Bert", True).loss_sum(
        {"loss": logits.sum() * torch.nan, "logits": logits}, batch, step_tokens=5
    )
    total.backward()
    assert total.item() == 0.0 and logits.grad.tolist() == [[0.0] * 3] * 2


def test_a_users_function_gets_the_tokens_of_the_whole_step(batch, outputs):
    def function(outputs, labels, num_items_in_batch):
        assert num_items_in_batch == 12
        logits = outputs["logits"][:, :-1].flatten(0, 1)
        return cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    loss = UserLoss(function, counts_like=CausalLMLoss(CrossEntropy()))
    assert loss.num_tokens(batch) == 3
    assert loss.inputs(batch).keys() == {"input_ids"}
    torch.testing.assert_close(loss.loss_sum(outputs, batch, step_tokens=12), by_hand(outputs))


def test_the_loss_of_a_run_follows_from_its_model_and_its_function():
    assert isinstance(make_loss("LlamaForCausalLM", "causal_lm", LossConfig(), None, CrossEntropy()), CausalLMLoss)
    assert isinstance(make_loss("BertForMaskedLM", "mean_of_labels", LossConfig(), None, CrossEntropy()), ModelOwnLoss)
    assert isinstance(make_loss("BertForMaskedLM", "mean_of_labels", LossConfig(), max, CrossEntropy()), UserLoss)


@pytest.mark.parametrize(
    ("kind", "function", "whose"), [("mean_of_labels", None, "BertForMaskedLM"), ("causal_lm", max, "Trainer")]
)
@pytest.mark.parametrize("key", [{"label_smoothing": 0.1}, {"chunk_tokens": 4}])
def test_keys_of_a_loss_that_is_not_ours_are_refused(kind, function, whose, key):
    ((name, value),) = key.items()
    with pytest.raises(ConfigError, match=f"loss.{name} is {value} and .*{whose}"):
        make_loss("BertForMaskedLM", kind, LossConfig(**key), function, CrossEntropy())


@pytest.mark.case("N9")
def test_no_digit_is_lost_at_a_large_vocabulary():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 262_144, generator=generator).mul(3).requires_grad_()
    labels = torch.randint(0, 262_144, (4,), generator=generator)
    exact = logits.detach().double().requires_grad_()
    expected = cross_entropy(exact, labels, reduction="sum")
    expected.backward()
    loss = CrossEntropy().sum(logits, labels)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=2e-7)
    assert (logits.grad - exact.grad).abs().max() <= 2e-7 * exact.grad.abs().max()
    torchs_own = cross_entropy(logits.detach(), labels, reduction="sum")
    assert torchs_own.item() != pytest.approx(expected.item(), rel=1e-6), "the fault is still torch's"


@pytest.mark.case("K8")
@pytest.mark.parametrize("label", [11, 999, -1, -5])
def test_a_label_beyond_the_vocabulary_is_named_before_the_pass_and_never_gives_a_plausible_loss(batch, outputs, label):
    batch["labels"][1, 1] = label
    loss = CausalLMLoss(CrossEntropy(vocab_size=11))
    with pytest.raises(DataError, match=f"sample 8 has the label {label}, and the model's head has 11 rows"):
        loss.check(batch, [3, 8])
    assert loss.loss_sum(outputs, batch, step_tokens=3).isnan()


def test_a_mean_that_may_leave_out_the_first_position_is_taken_only_without_a_label_there(batch):
    with pytest.raises(DataError, match=r"samples \[3, 8\] have a label at the first position, .* of Mine returns"):
        ModelOwnLoss("Mine", False).check(batch, [3, 8])
    ModelOwnLoss("Bert", True).check(batch, [3, 8])
    batch["labels"][:, 0] = -100
    ModelOwnLoss("Mine", False).check(batch, [3, 8])
