"""Every key has its say on every engine, and the table tells the truth about it."""

import json
from typing import get_args

import pytest
from pydantic import ValidationError

from ds_trainer.config.deepspeed.arguments import to_deepspeed
from ds_trainer.config.io import load_config
from ds_trainer.config.key_support import key_support, known_engines
from ds_trainer.config.keys import assign, default, flatten, leaf_fields
from ds_trainer.config.resolve import resolve
from ds_trainer.config.resolved import Machine
from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import ConfigErrors
from ds_trainer.interop.torch.snippet import ddp_snippet, fsdp2_snippet
from tests.helpers.table import table

GPU = Machine(4, "cuda", ("fp32", "bf16", "fp16"), "Ampere")
NVME = {"device": "nvme", "nvme_path": "/n", "buffer_count": 12}
# The run in which a key has a part, by the key's longest prefix.
CONTEXTS = {
    "": {},
    "parallel.tp": {"batch": {"global_size": 8}},
    "parallel.tp_plan": {"parallel": {"tp": 2}},
    "parallel.sequence_parallel": {"parallel": {"tp": 2}},
    "parallel.keep_gathered_input": {"parallel": {"tp": 2, "sequence_parallel": True}},
    "parallel.pp": {"batch": {"global_size": 8}, "zero": {"stage": 1}},
    "parallel.schedule": {"parallel": {"pp": 2}, "batch": {"accumulation": 4}, "zero": {"stage": 1}},
    "parallel.virtual_stages": {
        "parallel": {"pp": 2, "schedule": "interleaved_1f1b"},
        "batch": {"accumulation": 4},
        "zero": {"stage": 1},
    },
    "parallel.pp_split": {"parallel": {"pp": 2}, "zero": {"stage": 1}},
    "zero.offload_optimizer": {"zero": {"stage": 3, "offload_optimizer": NVME}},
    "zero.offload_optimizer.device": {},
    "zero.offload_optimizer.ratio": {
        "zero": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "schedule": {"name": "constant"},
    },
    "zero.offload_param": {"zero": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/n"}}},
    "zero.offload_param.device": {"zero": {"stage": 3}},
    "zero.aio": {"zero": {"stage": 3, "offload_optimizer": NVME}},
    "zero.sub_group_size": {"zero": {"stage": 3}},
    "zero.stage3_prefetch_bucket_size": {"zero": {"stage": 3}},
    "zero.stage3_param_persistence_threshold": {"zero": {"stage": 3}},
    "zero.stage3_model_persistence_threshold": {"zero": {"stage": 3}},
    "zero.stage3_max_live_parameters": {"zero": {"stage": 3}},
    "zero.stage3_max_reuse_distance": {"zero": {"stage": 3}},
    "zero.zero_hpz_partition_size": {"zero": {"stage": 3}},
    "zero.zero_quantized_weights": {"zero": {"stage": 3}},
    "zero.zero_quantized_gradients": {"zero": {"stage": 3}},
    "precision": {"precision": {"dtype": "bf16"}},
    "precision.loss_scale": {"precision": {"dtype": "fp16"}},
    "batch": {"batch": {"micro_size": 1}},
    "batch.micro_size": {},
    "batch.accumulation": {},
    "model.pad_embeddings_to_multiple_of": {"model": {"resize_embeddings": True}},
    "optimizer.momentum": {"optimizer": {"name": "sgd"}},
    "evaluation.max_new_tokens": {"evaluation": {"generate_samples": 1}},
    "evaluation.greater_is_better": {"evaluation": {"metric_for_best_model": "accuracy"}},
    "evaluation.early_stopping_threshold": {"evaluation": {"early_stopping_patience": 1}},
    "checkpoint.resume_weights_only": {"checkpoint": {"resume": "auto"}},
    "checkpoint.allow_global_size_change": {"checkpoint": {"resume": "auto"}},
    "ddp.powersgd_rank": {"ddp": {"comm_hook": "powersgd"}},
    "schedule.decay_ratio": {"schedule": {"name": "wsd"}},
}


# What these need on fsdp2 instead.
ON_HOST = {"zero": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}
FSDP2_CONTEXTS = {
    "parallel.pp": {"batch": {"global_size": 8}},
    "parallel.schedule": {"parallel": {"pp": 2}, "batch": {"accumulation": 4}},
    "parallel.virtual_stages": {"parallel": {"pp": 2, "schedule": "interleaved_1f1b"}, "batch": {"accumulation": 4}},
    "parallel.pp_split": {"parallel": {"pp": 2}},
    "zero.stage": {"zero": {"stage": 2}},
    "zero.offload_optimizer.pin_memory": ON_HOST,
    "zero.offload_param.pin_memory": ON_HOST,
    "fsdp.pin_memory": {"fsdp": {"cpu_offload": True}},
    "fsdp.min_num_params": {"fsdp": {"auto_wrap_policy": "size_based_wrap"}},
    "fsdp.transformer_layer_cls_to_wrap": {"fsdp": {"auto_wrap_policy": "transformer_based_wrap"}},
}


def candidates(annotation):
    """Values that a field of this type may take; the schema says which it does."""
    literals = [item for item in get_args(annotation) if isinstance(item, str | int)]
    nested = [item for part in get_args(annotation) if get_args(part) for item in candidates(part)]
    return [
        *literals,
        *nested,
        True,
        False,
        2,
        4,
        16,
        0.5,
        0.25,
        [0.5, 0.6],
        "7GB",
        ["wandb"],
        {"dump_state": True},
        {"*": "replicate"},
        [3, 2],
    ]


def of_column(column):
    """The config that runs on the engine of a column."""
    engine, _, backend = column.partition("+")
    return {"parallel": {"engine": engine}} | ({"accelerate": {"backend": backend}} if backend else {})


def with_key(key, column, value):
    raw = of_column(column)
    parts = key.split(".")
    context = next(CONTEXTS[p] for n in range(len(parts), -1, -1) if (p := ".".join(parts[:n])) in CONTEXTS)
    if column.endswith("fsdp2"):
        context = FSDP2_CONTEXTS.get(key, {} if "zero" in context else context)
    for section, content in json.loads(json.dumps(context)).items():
        if section != "zero" or not column.endswith("ddp"):
            raw.setdefault(section, {}).update(content)
    before = json.loads(json.dumps(raw))
    assign(raw, key, value)
    return before, raw


def is_valid(raw):
    try:
        RunConfig.model_validate_json(json.dumps(raw))
    except ValidationError:
        return False
    return True


def changes(key, engine):
    """Runs before and after `key` takes another value, for every candidate that the schema admits."""
    for value in candidates(leaf_fields()[key].annotation):
        before, after = with_key(key, engine, value)
        if value != json.loads(json.dumps(default(key))) and before != after and is_valid(after):
            yield before, after


def keys_that_are(status, engine):
    return [key for key in leaf_fields() if key_support(key, engine).status == status]


def code_of(snippet):
    """Less the comments, which say what the loop around it has to do."""
    return lambda resolved: [line for line in snippet(resolved).splitlines() if not line.startswith("#")]


TRANSLATIONS = {"deepspeed": to_deepspeed, "fsdp2": code_of(fsdp2_snippet), "ddp": code_of(ddp_snippet)}
"""What a backend gets."""


def translated(raw, backend):
    return TRANSLATIONS[backend](resolve(*load_config(raw), GPU))


def accepted(key, column):
    """What the backend gets before and after, for every value of a key that the rules admit in some run."""
    backend = column.partition("+")[2] or column
    for before, after in changes(key, column):
        try:
            yield translated(before, backend), translated(after, backend)
        except ConfigErrors:
            continue


# The first chooses the column, the second is checked against the ranks, the others go together.
NOT_BY_THEMSELVES = [
    "accelerate.backend",
    "parallel.dp_shard",
    *(f"zero.{part}.device" for part in ("offload_optimizer", "offload_param")),
]
MAPPED = [
    (column, key)
    for column in ("deepspeed", "fsdp2", "ddp", "accelerate+fsdp2")
    for key in keys_that_are("mapped", column)
    if column == "deepspeed" or key not in NOT_BY_THEMSELVES
]
# A snippet names the device.
IMPLIED = [
    (column, key)
    for column in ("deepspeed", "fsdp2", "ddp")
    for key in keys_that_are("implied", column)
    if key not in ("$schema", "parallel.engine") and not (key == "run.device" and column != "deepspeed")
]


@pytest.mark.parametrize("engine", known_engines())
def test_every_key_has_an_entry_with_a_note(engine):
    assert all(key_support(key, engine).note for key in leaf_fields())


@table("column, key", MAPPED)
def test_a_mapped_key_changes_what_the_engine_gets(column, key):
    pairs = list(accepted(key, column))
    assert pairs and any(before != after for before, after in pairs)


@table("column, key", IMPLIED)
def test_an_implied_key_leaves_what_the_engine_gets_alone(column, key):
    pairs = list(accepted(key, column))
    assert pairs and all(before == after for before, after in pairs)


@table("engine, key", [(e, k) for e in known_engines() for k in keys_that_are("refused", e)])
def test_a_refused_key_stops_the_run_when_it_asks_for_something(engine, key):
    asking = [raw for _, raw in changes(key, engine) if flatten(raw).get(key) not in key_support(key, engine).already]
    for after in asking:
        with pytest.raises(ConfigErrors) as caught:
            load_config(after)
        assert any(f"remove {key}" in error.change for error in caught.value.errors)
    assert asking


@table("engine, key", [(e, k) for e in known_engines() for k in keys_that_are("no_effect", e)])
def test_a_key_without_effect_is_warned_of(engine, key):
    _, after = next(changes(key, engine))
    assert any(f"{key} has no effect" in text for text in resolve(*load_config(after), GPU).warnings)


def test_both_offloads_together_are_fsdp2s_one():
    plain, on_host = ({"parallel": {"engine": "fsdp2"}} | more for more in ({}, ON_HOST))
    assert not any('offload_policy": CPUOffloadPolicy' in line for line in translated(plain, "fsdp2"))
    assert any('offload_policy": CPUOffloadPolicy(pin_memory=True)' in line for line in translated(on_host, "fsdp2"))
