"""The order of samples depends on the seed and the global size alone."""

import pytest

from ds_trainer.data.sampler import GlobalBatchSampler
from ds_trainer.errors import DataError


def sampler(num_samples=23, global_size=8, micro_size=2, dp_rank=0, dp_size=1, seed=7, shuffle=True):
    return GlobalBatchSampler(num_samples, global_size, micro_size, dp_rank, dp_size, seed, shuffle)


@pytest.mark.case("A9")
def test_ten_samples_at_global_size_16_are_one_step_per_epoch():
    s = sampler(num_samples=10, global_size=2 * 4 * 2, micro_size=2, dp_size=2)
    assert s.steps_per_epoch == 1
    assert [s.position(step).epoch for step in range(3)] == [0, 1, 2]


@pytest.mark.case("J7")
def test_each_epoch_is_another_permutation_of_all_samples():
    s = sampler()
    epochs = [[i for b in range(3) for i in s.global_batch(3 * epoch + b)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.case("J7")
@pytest.mark.parametrize(("dp_size", "micro_size"), [(1, 1), (1, 8), (2, 4), (4, 1), (3, 2)])
def test_ranks_and_micro_sizes_share_out_the_same_global_batches(dp_size, micro_size):
    reference = sampler()
    ranks = [sampler(micro_size=micro_size, dp_size=dp_size, dp_rank=r) for r in range(dp_size)]
    for step in range(7):
        per_rank = [rank.microbatches(step) for rank in ranks]
        assert len({len(microbatches) for microbatches in per_rank}) == 1
        in_turn = [i for microbatch in zip(*per_rank, strict=True) for part in microbatch for i in part]
        assert in_turn == reference.global_batch(step)
        assert all(len(part) <= micro_size for microbatches in per_rank for part in microbatches)


def test_the_short_last_batch_leaves_some_micro_batches_empty_but_as_many_on_every_rank():
    ranks = [sampler(num_samples=10, global_size=8, dp_size=2, dp_rank=r, shuffle=False) for r in range(2)]
    assert [rank.microbatches(1) for rank in ranks] == [[[8, 9]], [[]]]
    ranks = [sampler(num_samples=10, global_size=16, dp_size=2, dp_rank=r, shuffle=False) for r in range(2)]
    assert [rank.microbatches(0) for rank in ranks] == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], []]]


def test_any_step_can_be_asked_for_first():
    forward = sampler()
    batches = [forward.global_batch(step) for step in range(9)]
    assert [sampler().global_batch(step) for step in (8, 0, 5)] == [batches[8], batches[0], batches[5]]
    assert [forward.global_batch(step) for step in (8, 0, 5)] == [batches[8], batches[0], batches[5]]


def test_the_seed_decides_the_order():
    assert sampler(seed=7).global_batch(0) == sampler(seed=7).global_batch(0)
    assert sampler(seed=7).global_batch(0) != sampler(seed=8).global_batch(0)


def test_without_shuffling_samples_come_in_their_own_order_each_epoch():
    s = sampler(shuffle=False)
    assert s.global_batch(0) == s.global_batch(3) == list(range(8))


def test_an_empty_data_set_is_refused():
    with pytest.raises(DataError, match="no samples"):
        sampler(num_samples=0)
