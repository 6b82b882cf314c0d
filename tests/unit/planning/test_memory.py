"""Bytes per parameter, held to figures measured on DeepSpeed at 1, 2 and 4 ranks."""

import pytest

from ds_trainer.planning.memory import bytes_per_parameter, ddp_bytes_per_parameter, fsdp2_bytes_per_parameter
from tests.helpers.table import table


@table(
    ("stage", "dtype", "grad_dtype", "ranks", "after_backward", "after_step"),
    [
        (0, "fp32", "fp32", 2, 16, 12),
        (0, "bf16", "bf16", 2, 16, 14),
        (1, "fp32", "fp32", 1, 20, 16),
        (1, "fp32", "fp32", 2, 12, 10),
        (1, "fp32", "fp32", 4, 8, 7),
        (1, "bf16", "bf16", 2, 9, 8),
        (1, "bf16", "bf16", 4, 5.5, 5),
        (1, "bf16", "fp32", 1, 20, 18),
        (1, "bf16", "fp32", 2, 14, 12),
        (1, "bf16", "fp32", 4, 11, 9),
        (2, "fp32", "fp32", 2, 12, 10),
        (2, "bf16", "bf16", 2, 9, 8),
        (2, "bf16", "fp32", 2, 10, 8),
        (2, "bf16", "fp32", 4, 6, 5),
        (3, "fp32", "fp32", 1, 20, 20),
        (3, "fp32", "fp32", 2, 10, 10),
        (3, "fp32", "fp32", 4, 5, 5),
        (3, "bf16", "bf16", 2, 8, 8),
        (3, "bf16", "fp32", 2, 9, 9),
    ],
)
def test_the_table_says_what_was_measured_without_offload(stage, dtype, grad_dtype, ranks, after_backward, after_step):
    row = bytes_per_parameter(stage, dtype, grad_dtype, ranks)
    assert (row.after_backward, row.after_step) == (after_backward, after_step)
    assert (row.host, row.nvme) == (0, 0)


@table(
    ("stage", "dtype", "grad_dtype", "ranks", "accumulation", "after_backward", "after_step"),
    [
        (1, "fp32", "fp32", 2, 2, 14, 14),
        (2, "fp32", "fp32", 2, 1, 14, 14),
        (2, "fp32", "fp32", 2, 2, 16, 16),
        (2, "fp32", "fp32", 4, 2, 10, 10),
        (2, "bf16", "fp32", 2, 2, 13, 11),
        (2, "bf16", "fp32", 4, 2, 7.5, 6.5),
        (1, "bf16", "fp32", 2, 2, 15, 11),
        (1, "bf16", "fp32", 4, 1, 10.5, 6.5),
        (3, "fp32", "fp32", 2, 1, 12, 12),
        (3, "fp32", "fp32", 4, 2, 6, 6),
        (3, "bf16", "fp32", 2, 2, 11, 11),
    ],
)
def test_the_table_says_what_was_measured_with_the_optimizer_on_the_host(
    stage, dtype, grad_dtype, ranks, accumulation, after_backward, after_step
):
    row = bytes_per_parameter(stage, dtype, grad_dtype, ranks, offload_optimizer="cpu", accumulation=accumulation)
    assert (row.after_backward, row.after_step) == (after_backward, after_step)


@pytest.mark.parametrize(("views", "after_step"), [(True, 16), (False, 12)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_ddp_keeps_fp32_whole_and_its_gradients_as_long_as_its_buckets(dtype, views, after_step):
    row = ddp_bytes_per_parameter(dtype, gradient_as_bucket_view=views)
    assert (row.after_backward, row.after_step) == (16, after_step)
    assert ("buckets, which last" in row.why) is views
    assert ("autocast" in row.why) is (dtype == "bf16")


def test_swap_files_hold_masters_moments_and_gradients_and_the_parameters_if_asked():
    optimizer = bytes_per_parameter(3, "fp32", "fp32", 2, offload_optimizer="nvme")
    assert (optimizer.nvme, optimizer.after_step) == (8, 4)
    both = bytes_per_parameter(3, "bf16", "fp32", 2, offload_optimizer="nvme", offload_param="nvme")
    assert (both.nvme, both.after_step) == (9, 2)


def test_parameters_on_the_host_change_the_place_and_not_the_sum():
    device = bytes_per_parameter(3, "bf16", "fp32", 2)
    host = bytes_per_parameter(3, "bf16", "fp32", 2, offload_param="cpu")
    assert host.after_step == device.after_step
    assert (device.host, host.host) == (0, 1)


@pytest.mark.parametrize(("stage", "paper"), [(0, 16), (1, 4 + 12 / 4), (2, 2 + 14 / 4), (3, 16 / 4)])
def test_the_paper_column_is_the_zero_papers_formula(stage, paper):
    assert bytes_per_parameter(stage, "bf16", "bf16", 4).paper == paper


def test_a_row_that_departs_from_the_paper_says_why_and_one_that_does_not_says_so():
    assert bytes_per_parameter(2, "bf16", "bf16", 2).why.startswith("as in the paper")
    assert "BF16_Optimizer" in bytes_per_parameter(1, "bf16", "fp32", 2).why
    assert "separate fp32 copy" in bytes_per_parameter(3, "fp32", "fp32", 2).why


@pytest.mark.parametrize(
    ("optimizer", "momentum", "after_step"), [("lion", False, 8), ("sgd", False, 6), ("sgd", True, 8)]
)
def test_optimizers_with_fewer_moments_keep_less(optimizer, momentum, after_step):
    assert bytes_per_parameter(2, "fp32", "fp32", 2, optimizer, momentum=momentum).after_step == after_step


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_fsdp2_cuts_fp32_parameters_gradients_and_moments_whatever_it_computes_in(dtype):
    row = fsdp2_bytes_per_parameter(dtype, "fp32", 4)
    assert (row.after_backward, row.after_step, row.host) == (4, 3, 0)
    assert row.paper == bytes_per_parameter(3, dtype, "fp32", 4).paper
    on_host = fsdp2_bytes_per_parameter(dtype, "fp32", 4, cpu_offload=True)
    assert (on_host.after_backward, on_host.host) == (4, 4)


@pytest.mark.parametrize(
    ("reshard", "accumulation", "peak"),
    [(True, 1, 4), (False, 1, 3 + 2), (2, 1, 4), (True, 2, 3 + 4), (False, 2, 3 + 2 + 4), (2, 2, 3 + 1 + 4)],
)
def test_what_fsdp2_keeps_gathered_and_sums_whole_counts_towards_the_peak(reshard, accumulation, peak):
    row = fsdp2_bytes_per_parameter("bf16", "fp32", 4, reshard_after_forward=reshard, accumulation=accumulation)
    assert row.peak == peak
