"""Every key has its say on every engine, and the table tells the truth about it."""

import json
from typing import get_args

import pytest
from pydantic import ValidationError

from ds_trainer.config.coverage import coverage, covered_engines
from ds_trainer.config.io import load_config
from ds_trainer.config.keys import assign, default, flatten, leaf_fields
from ds_trainer.config.resolve import resolve
from ds_trainer.config.resolved import Machine
from ds_trainer.config.schema import RunConfig
from ds_trainer.config.to_deepspeed import to_deepspeed
from ds_trainer.errors import ConfigErrors

GPU = Machine(4, "cuda", ("fp32", "bf16", "fp16"), "Ampere")
NVME = {"device": "nvme", "nvme_path": "/n", "buffer_count": 12}
# The run in which a key has a part, by the key's longest prefix.
CONTEXTS = {
    "": {},
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
    "schedule.decay_ratio": {"schedule": {"name": "wsd"}},
}


def candidates(annotation):
    """Values that a field of this type may take; the schema says which it does."""
    literals = [item for item in get_args(annotation) if isinstance(item, str | int)]
    nested = [item for part in get_args(annotation) if get_args(part) for item in candidates(part)]
    return [*literals, *nested, True, False, 2, 4, 16, 0.5, 0.25, [0.5, 0.6], "7GB", ["wandb"], {"dump_state": True}]


def with_key(key, engine, value):
    raw = json.loads(json.dumps({"parallel": {"engine": engine}}))
    parts = key.split(".")
    context = next(CONTEXTS[p] for n in range(len(parts), -1, -1) if (p := ".".join(parts[:n])) in CONTEXTS)
    for section, content in json.loads(json.dumps(context)).items():
        if engine == "deepspeed" or section != "zero":
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
    return [key for key in leaf_fields() if coverage(key, engine).status == status]


def translated(raw):
    return to_deepspeed(resolve(*load_config(raw), GPU))


@pytest.mark.parametrize("engine", covered_engines())
def test_every_key_has_an_entry_with_a_note(engine):
    assert all(coverage(key, engine).note for key in leaf_fields())


@pytest.mark.parametrize("key", keys_that_are("mapped", "deepspeed"))
def test_a_mapped_key_changes_what_deepspeed_gets(key):
    accepted = []
    for before, after in changes(key, "deepspeed"):
        try:
            accepted.append(translated(before) != translated(after))
        except ConfigErrors:
            continue
    assert accepted and any(accepted)


@pytest.mark.parametrize(
    "key", [k for k in keys_that_are("implied", "deepspeed") if k not in ("$schema", "parallel.engine")]
)
def test_an_implied_key_leaves_what_deepspeed_gets_alone(key):
    accepted = []
    for before, after in changes(key, "deepspeed"):
        try:
            accepted.append(translated(before) == translated(after))
        except ConfigErrors:
            continue
    assert accepted and all(accepted)


@pytest.mark.parametrize("engine, key", [(e, k) for e in covered_engines() for k in keys_that_are("refused", e)])
def test_a_refused_key_stops_the_run_when_it_asks_for_something(engine, key):
    asking = [raw for _, raw in changes(key, engine) if flatten(raw).get(key) not in coverage(key, engine).already]
    for after in asking:
        with pytest.raises(ConfigErrors) as caught:
            load_config(after)
        assert any(f"remove {key}" in error.change for error in caught.value.errors)
    assert asking


@pytest.mark.parametrize("engine, key", [(e, k) for e in covered_engines() for k in keys_that_are("no_effect", e)])
def test_a_key_without_effect_is_warned_of(engine, key):
    _, after = next(changes(key, engine))
    assert any(f"{key} has no effect" in text for text in resolve(*load_config(after), GPU).warnings)
