"""Combinations that an engine lacks are refused, naming the keys and what to change."""

import pytest

from ds_trainer.config.io import load_config
from ds_trainer.config.resolve import resolve
from ds_trainer.config.resolved import Machine
from ds_trainer.errors import ConfigErrors
from tests.helpers.table import table

CPU = Machine(2, "cpu", ("fp32",), "no bf16")
GPU = Machine(8, "cuda", ("fp32", "bf16", "fp16"), "Ampere")
NVME = {"device": "nvme", "nvme_path": "/nvme"}

REFUSED = {
    "optimizer offload at stage 0": ({"zero": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}, "zero.stage"),
    "nvme optimizer at stage 2": ({"zero": {"stage": 2, "offload_optimizer": NVME}}, "zero.stage to 3"),
    "parameter offload at stage 2": ({"zero": {"stage": 2, "offload_param": {"device": "cpu"}}}, "zero.stage to 3"),
    "nvme without a path": ({"zero": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offload_param.nvme_path"),
    "a path without nvme": (
        {"zero": {"stage": 3, "offload_optimizer": {"device": "cpu", "nvme_path": "/n"}}},
        "nvme_path",
    ),
    "file I/O without nvme": ({"zero": {"aio": {"queue_depth": 32}}}, "zero.aio"),
    "a stage 3 key at stage 2": ({"zero": {"stage": 2, "sub_group_size": 5}}, "zero.sub_group_size"),
    "a stage 1 and 2 key at stage 3": (
        {"zero": {"stage": 3, "allgather_bucket_size": 4}},
        "zero.allgather_bucket_size",
    ),
    "a fused optimizer that has no kernel": ({"optimizer": {"name": "lion", "fused": True}}, "optimizer.fused"),
    "a fused SGD on shards": (
        {"parallel": {"engine": "fsdp2"}, "optimizer": {"name": "sgd", "fused": True}},
        "remove optimizer.fused or set optimizer.name to adamw",
    ),
    "overlap without ZeRO": ({"zero": {"stage": 0, "overlap_comm": True}}, "zero.overlap_comm"),
    "quantized weights below stage 3": (
        {"zero": {"stage": 2, "zero_quantized_weights": True}},
        "zero_quantized_weights",
    ),
    "an odd all-gather bucket": ({"zero": {"allgather_bucket_size": 5}}, "set it to 6"),
    "too few swap buffers": (
        {"zero": {"stage": 3, "offload_optimizer": {**NVME, "pipeline_read": True, "pipeline_write": True}}},
        "buffer_count to 12",
    ),
    "partial offload of lion": (
        {
            "optimizer": {"name": "lion"},
            "zero": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
            "schedule": {"name": "constant"},
        },
        "optimizer.name to adamw",
    ),
    "partial offload under a schedule": (
        {"zero": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        "schedule.name to constant",
    ),
    "quantized gradients without reduce-scatter": (
        {"zero": {"stage": 3, "zero_quantized_gradients": True, "reduce_scatter": False}},
        "zero.reduce_scatter to true",
    ),
    "gradients in another format": (
        {"precision": {"dtype": "bf16", "grad_dtype": "fp16"}},
        "precision.grad_dtype to fp32",
    ),
    "bf16 gradients at stage 0": (
        {"zero": {"stage": 0}, "precision": {"dtype": "bf16", "grad_dtype": "bf16"}},
        "zero.stage to 1",
    ),
    "fp32 gradients of fp16 at stage 0": (
        {"zero": {"stage": 0}, "precision": {"dtype": "fp16", "grad_dtype": "fp32"}},
        "precision.grad_dtype to fp16",
    ),
    "loss scale without fp16": ({"precision": {"loss_scale": {"hysteresis": 1}}}, "precision.loss_scale"),
    "adafactor on deepspeed": ({"optimizer": {"name": "adafactor"}}, "parallel.engine to ddp"),
    "betas of sgd": ({"optimizer": {"name": "sgd", "betas": [0.8, 0.9]}}, "optimizer.betas"),
    "eps of lion": ({"optimizer": {"name": "lion", "eps": 1e-6}}, "optimizer.eps"),
    "momentum of adamw": ({"optimizer": {"momentum": 0.9}}, "optimizer.name to sgd"),
    "a beta of one": ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas"),
    "two lengths of warm-up": ({"schedule": {"warmup_steps": 1, "warmup_ratio": 0.1}}, "one of the two"),
    "a warm-up beyond the run": ({"schedule": {"warmup_steps": 9}, "run": {"max_steps": 5}}, "warmup_steps to 5"),
    "warm-up and decay beyond the run": (
        {"schedule": {"name": "wsd", "warmup_ratio": 0.5, "decay_ratio": 0.6}},
        "decay_ratio to 0.5",
    ),
    "decay of a cosine": ({"schedule": {"decay_ratio": 0.1}}, "schedule.name to wsd"),
    "an end value of a constant": ({"schedule": {"name": "constant", "min_lr_ratio": 0.1}}, "schedule.min_lr_ratio"),
    "padding without resizing": ({"model": {"pad_embeddings_to_multiple_of": 8}}, "model.resize_embeddings to true"),
    "a rank without powersgd": ({"parallel": {"engine": "ddp"}, "ddp": {"powersgd_rank": 2}}, "ddp.powersgd_rank"),
    "a shard size without a number": ({"checkpoint": {"max_shard_size": "big"}}, "5GB"),
    "an engine that is not installed": ({"parallel": {"engine": "fsdp9"}}, "ddp, deepspeed"),
    "ZeRO on ddp": ({"parallel": {"engine": "ddp"}, "zero": {"stage": 2}}, "remove zero.stage"),
    "DDP keys on deepspeed": ({"ddp": {"bucket_cap_mb": 5}}, "remove ddp.bucket_cap_mb"),
    "native DeepSpeed keys on ddp": (
        {"parallel": {"engine": "ddp"}, "native": {"deepspeed": {"dump_state": True}}},
        "remove native.deepspeed",
    ),
}


@table("raw, change", REFUSED.values(), ids=list(REFUSED))
def test_a_combination_that_cannot_run_as_asked_is_refused(raw, change):
    with pytest.raises(ConfigErrors) as caught:
        load_config(raw)
    (error,) = caught.value.errors
    assert change in error.change


@pytest.mark.parametrize(
    "raw, machine, key",
    [
        ({"precision": {"dtype": "fp16"}}, CPU, "precision.dtype"),
        ({"parallel": {"engine": "ddp"}, "ddp": {"comm_hook": "bf16"}}, CPU, "ddp.comm_hook"),
        ({"zero": {"stage": 3, "zero_quantized_weights": True}}, CPU, "zero.zero_quantized_weights"),
        ({"zero": {"stage": 3, "zero_hpz_partition_size": 3}}, GPU, "zero.zero_hpz_partition_size"),
    ],
)
def test_what_the_machine_lacks_is_refused(raw, machine, key):
    config, origins = load_config(raw)
    with pytest.raises(ConfigErrors) as caught:
        resolve(config, origins, machine)
    assert key in caught.value.errors[0].found


@pytest.mark.parametrize(
    "raw",
    [
        {"optimizer": {"name": "sgd"}, "zero": {"stage": 3, "offload_optimizer": NVME}},
        {"optimizer": {"name": "lion"}, "zero": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
        {"zero": {"stage": 3, "offload_optimizer": NVME, "offload_param": NVME}},
        {"zero": {"stage": 3, "offload_param": {"device": "cpu"}}},
        {"zero": {"stage": 2, "zero_quantized_weights": False, "offload_param": {"device": "none"}}},
        {"parallel": {"engine": "ddp"}, "optimizer": {"name": "adafactor"}, "precision": {"grad_dtype": "fp32"}},
        {"parallel": {"engine": "ddp"}, "ddp": {"comm_hook": "powersgd", "powersgd_rank": 2}},
    ],
)
def test_a_combination_that_runs_is_let_through(raw):
    config, origins = load_config(raw)
    assert resolve(config, origins, CPU).config.parallel.engine == config.parallel.engine


def test_a_key_that_deepspeeds_bf16_optimizer_ignores_is_warned_of():
    raw = {"zero": {"stage": 1, "reduce_bucket_size": 1000}, "precision": {"dtype": "bf16"}}
    resolved = resolve(*load_config(raw), GPU)
    assert [text for text in resolved.warnings if "zero.reduce_bucket_size has no effect" in text]
    raw["precision"]["grad_dtype"] = "bf16"
    assert not resolve(*load_config(raw), GPU).warnings
