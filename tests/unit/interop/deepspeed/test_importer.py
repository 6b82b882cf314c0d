"""A DeepSpeed JSON becomes a run that means the same, and every key of it is accounted for."""

import hjson
import pytest
import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig

from ds_trainer.config.backend import backend
from ds_trainer.config.deepspeed.arguments import to_deepspeed
from ds_trainer.config.io import load_config
from ds_trainer.config.key_support import key_support
from ds_trainer.config.keys import assign, flatten, leaf_fields, value
from ds_trainer.config.resolve import resolve
from ds_trainer.config.resolved import Machine
from ds_trainer.errors import ConfigError
from ds_trainer.interop.deepspeed.importer import from_deepspeed
from ds_trainer.optim import lr_factor
from tests.helpers.deepspeed_reads import accept
from tests.helpers.foreign_configs import DEEPSPEED_FILES
from tests.helpers.shipped_configs import WHOLE_MODELS, resolved
from tests.helpers.table import table

GPU = Machine(2, "cuda", ("fp32", "bf16", "fp16"), "a GPU")


def imported(native):
    return from_deepspeed(hjson.loads(native) if isinstance(native, str) else native)


def tree(native):
    return flatten(imported(native).tree)


def line(native, key):
    (found,) = [line for line in imported(native).lines if line.key == key]
    return found


def resolve_tree(found, machine=GPU):
    return resolve(*load_config(found.tree), machine)


@pytest.mark.parametrize("name", DEEPSPEED_FILES)
def test_every_key_of_a_file_has_one_line_and_the_rest_are_defaults(name):
    native = hjson.loads(DEEPSPEED_FILES[name])
    found = from_deepspeed(native)
    lines = [line.key for line in found.lines]
    written = set(flatten(native))
    assert len(lines) == len(set(lines)) and written <= set(lines)
    assert all(line.value is None for line in found.lines if line.key not in written)
    assert all(flatten(native)[line.key] == line.value for line in found.lines if line.key in written)
    assert all(line.note for line in found.lines if line.outcome != "carried")


@pytest.mark.parametrize("name", DEEPSPEED_FILES)
def test_every_key_of_the_outcome_stands_in_a_line(name):
    found = imported(DEEPSPEED_FILES[name])
    assert set(flatten(found.tree)) - {"parallel.engine"} <= {key for line in found.lines for key in line.ours}


@pytest.mark.parametrize("name, ours", [("tutorial", set()), ("nvme", {"sub_group_size", "prefetch_bucket_size"})])
def test_deepspeed_reads_the_run_as_it_reads_the_file(name, ours):
    """`ours`: sizes that are derived because DeepSpeed's own do not work with nvme offload."""
    native = hjson.loads(DEEPSPEED_FILES[name])
    there, here = accept(native, 2), accept(to_deepspeed(resolve_tree(from_deepspeed(native))), 2)
    for part in (
        "zero_optimization_stage",
        "gradient_clipping",
        "bfloat16_config",
        "float16_config",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "prescale_gradients",
        "steps_per_print",
    ):
        assert getattr(here, part) == getattr(there, part), part
    assert here.grad_accum_dtype == ("bf16" if there.bfloat16_config.enabled else "fp16")
    mine, theirs = here.zero_config.model_dump(exclude=ours), there.zero_config.model_dump(exclude=ours)
    assert mine == theirs


def test_auto_is_left_open_and_names_the_key_to_set():
    native = DEEPSPEED_FILES["hf_zero3"]
    autos = {key for key, item in flatten(hjson.loads(native)).items() if item == "auto"}
    left_open = {line.key: line for line in imported(native).lines if line.key in autos}
    assert len(left_open) == len(autos)
    for key, each in left_open.items():
        assert each.outcome == "carried"
        assert not set(each.ours) & set(tree(native)), key
    assert "set optimizer.lr" in left_open["optimizer.params.lr"].note
    assert "precision.dtype" not in tree(native) and "optimizer.max_grad_norm" not in tree(native)
    assert tree(native)["zero.offload_param.device"] == "cpu" and tree(native)["zero.sub_group_size"] == 10**9


@table(
    "native, ours",
    [
        ({}, {"zero.stage": 0, "precision.dtype": "fp32", "optimizer.max_grad_norm": 1.0}),
        ({"train_batch_size": 8}, {"batch.global_size": 8, "batch.accumulation": 1}),
        (
            {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}},
            {
                "zero.stage": 1,
                "precision.dtype": "fp16",
                "precision.grad_dtype": "fp16",
                "precision.communication_data_type": "fp16",
            },
        ),
        (
            {
                "zero_optimization": {"stage": 2},
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "float32"},
            },
            {"precision.grad_dtype": "fp32", "precision.communication_data_type": "bf16"},
        ),
        ({"optimizer": {"type": "AdamW"}}, {"optimizer.lr": 1e-3, "schedule.name": "constant"}),
        (
            {"optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}}},
            {"optimizer.weight_decay": 0.1, "optimizer.decay_norms_and_biases": True},
        ),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, {"optimizer.name": "adam"}),
        ({"optimizer": {"type": "Adam"}}, {"optimizer.name": "adamw"}),
        (
            {"optimizer": {"type": "Adam", "params": {"torch_adam": True}}},
            {"optimizer.weight_decay": 0.01, "optimizer.decay_norms_and_biases": True},
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"torch_adam": True, "weight_decay": 0}}},
            {"optimizer.weight_decay": 0},
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False}}},
            {"optimizer.name": "adam", "optimizer.weight_decay": None},
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}},
            {"optimizer.name": "sgd", "optimizer.momentum": 0.9},
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5000}}},
            {"schedule.name": "linear", "schedule.warmup_steps": 1000, "run.max_steps": 5000, "optimizer.lr": 1e-3},
        ),
        (
            {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 50, "warmup_num_steps": 5}}},
            {"schedule.name": "cosine", "schedule.warmup_steps": 5, "schedule.min_lr_ratio": 1e-4},
        ),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, {"zero.offload_optimizer.device": "cpu"}),
        ({"zero_optimization": {"stage": 3, "sub_group_size": 0}}, {"zero.sub_group_size": 1}),
        ({"comms_logger": {"enabled": True}}, {"native.deepspeed.comms_logger.enabled": True}),
        (
            {"zero_optimization": True, "allgather_size": 4e8},
            {"zero.stage": 1, "zero.allgather_bucket_size": 400000000},
        ),
    ],
)
def test_a_file_keeps_its_meaning_where_it_speaks_and_deepspeeds_where_it_is_silent(native, ours):
    found = tree(native)
    assert {key: found.get(key) for key in ours} == ours
    load_config(imported(native).tree)


@table(
    "native, key, part",
    [
        ({"zero_optimization": {"stage": 3, "allgather_bucket_size": 5}}, "allgather_bucket_size", "at stage 3"),
        ({"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 5}}, "stage3_max_live_parameters", "stage 2"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": "/n"}}},
            "nvme_path",
            "cpu",
        ),
        ({"aio": {"block_size": 4}}, "block_size", "nvme"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1}}}, "lr", "set optimizer.name"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "foo": 1}}}, "foo", "no key"),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1}}}, "cycle_min_lr", "set schedule.name"),
        ({"gradient_cliping": 1}, "gradient_cliping", "gradient_clipping"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "cpu_checkpointing", "gradient_checkpointing"),
        ({"fp16": True}, "fp16", "object"),
        ({"fp16": {"enabled": "auto", "initial_scale_power": 12}}, "initial_scale_power", "precision.loss_scale"),
    ],
)
def test_what_cannot_be_carried_says_why_and_leaves_nothing_behind(native, key, part):
    (found,) = [line for line in imported(native).lines if line.key.rpartition(".")[2] == key]
    assert found.outcome == "dropped" and part in found.note
    load_config(imported(native).tree)


@pytest.mark.parametrize(
    "native, key, part",
    [
        ({"bf16": {"enabled": True}}, "bf16.enabled", "torch.autocast"),
        (
            {"zero_optimization": {"stage": 2}, "torch_autocast": {"enabled": True}},
            "torch_autocast.enabled",
            "master weights",
        ),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast.enabled", "held in fp16"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "fp16.loss_scale", "dynamic"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.offload_optimizer.device",
            "silently takes cpu",
        ),
        (
            {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            "bf16.bf16_master_weights_and_grads",
            "fp32",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "log"}}},
            "scheduler.params.warmup_type",
            "linear",
        ),
    ],
)
def test_what_changes_its_meaning_says_how(native, key, part):
    assert line(native, key).outcome == "changed" and part in line(native, key).note
    load_config(imported(native).tree)


def test_two_number_formats_are_refused_as_deepspeed_refuses_them():
    both = {"train_batch_size": 2, "fp16": {"enabled": True}, "bf16": {"enabled": True}}
    with pytest.raises(ConfigError, match="fp16.enabled and bf16.enabled are both true"):
        imported(both)
    with pytest.raises(ConfigError, match="both true"):
        imported({"fp16": {"enabled": True}, "bfloat16": {"enabled": True}})
    with pytest.raises(AssertionError, match="simultaneously"):
        accept(both, 2)


def test_torch_adam_asks_for_torchs_own_default():
    assert torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).defaults["weight_decay"] == 0.01
    native = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    assert "0.01" in line(native, "optimizer.params.weight_decay").note


def test_aio_within_zero_optimization_is_carried_and_told_where_it_belongs():
    offload = {"device": "nvme", "nvme_path": "/n"}
    nested = {"zero_optimization": {"stage": 3, "offload_param": offload, "aio": {"block_size": 4096}}}
    assert tree(nested)["zero.aio.block_size"] == 4096
    found = line(nested, "zero_optimization.aio.block_size")
    assert found.outcome == "carried" and "top level" in found.note
    both = nested | {"aio": {"block_size": 8192}}
    assert tree(both)["zero.aio.block_size"] == 8192
    assert line(both, "zero_optimization.aio.block_size").outcome == "dropped"


def test_an_unknown_key_of_a_section_is_not_taken_for_the_section():
    note = line({"zero_optimization": {"stage": 2, "foo_bar": 1}}, "zero_optimization.foo_bar").note
    assert "did you mean" not in note and note.endswith("remove it")
    note = line({"zero_optimization": {"stage": 2, "overlap_com": True}}, "zero_optimization.overlap_com").note
    assert "did you mean zero_optimization.overlap_comm?" in note


@pytest.mark.parametrize("total, is_possible", [(8, False), (12, True)])
def test_a_batch_that_fits_no_number_of_ranks_says_so(total, is_possible):
    native = {"train_batch_size": total, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    assert ("fits no number of ranks" in line(native, "train_batch_size").note) is not is_possible


@pytest.mark.parametrize("name", DEEPSPEED_FILES)
def test_a_line_that_leads_nowhere_says_why(name):
    assert all(line.ours or line.note for line in imported(DEEPSPEED_FILES[name]).lines)


def test_the_schedulers_peak_rules_over_the_optimizers_learning_rate():
    native = DEEPSPEED_FILES["tutorial"]
    assert tree(native)["optimizer.lr"] == 0.002
    assert line(native, "optimizer.params.lr").outcome == "dropped"


@pytest.mark.parametrize(
    "kind, params",
    [
        ("WarmupLR", {"warmup_num_steps": 4, "warmup_max_lr": 0.5}),
        ("WarmupDecayLR", {"warmup_num_steps": 4, "warmup_max_lr": 0.5, "total_num_steps": 12}),
        ("WarmupCosineLR", {"warmup_num_steps": 4, "total_num_steps": 12, "cos_min_ratio": 0.1}),
    ],
)
def test_the_schedule_is_deepspeeds_but_for_the_step_that_is_reported(kind, params):
    native = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "scheduler": {"type": kind, "params": params | {"warmup_type": "linear"}},
    }
    config, _ = load_config(imported(native).tree)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs_by_step = getattr(lr_schedules, kind)(optimizer, **native["scheduler"]["params"])
    theirs = []
    for _ in range(12):
        theirs.append(optimizer.param_groups[0]["lr"])
        theirs_by_step.step()
    ours = [config.optimizer.lr * lr_factor(config.schedule, step, 12) for step in range(12)]
    late = [0.0, *ours[:-1]]
    if kind == "WarmupCosineLR":  # it makes up for the step after the warm-up
        late = [*late[:5], *ours[5:]]
    assert theirs == pytest.approx(late)
    assert "one step later" in line(native, "scheduler.type").note


ON_DEEPSPEED = [name for name in WHOLE_MODELS if "ddp" not in name and "fsdp2" not in name and "accelerate" not in name]
MAPPED = [key for key in leaf_fields() if key_support(key, "deepspeed").status == "mapped"]


def values(run, keys=MAPPED):
    return {key: value(run.config, key) for key in keys}


@table("name", ON_DEEPSPEED)
def test_a_shipped_config_comes_back_from_deepspeeds_json(name):
    run = resolved(name)
    assert backend(run.config) == "deepspeed"
    back = resolve_tree(imported(to_deepspeed(run)), run.machine)
    assert values(back) == values(run)


AUTO_TP = [
    ("autotp_size", 2, "carried", "plan of the model's type"),
    ("autotp_size", 1, "carried", "off here too"),
    ("tp_overlap_comm", True, "carried", "weight gradients"),
    ("tp_overlap_comm", False, "changed", "weight gradients"),
    ("vocab_parallel_lm_head", True, "carried", "over the vocabulary"),
    ("vocab_parallel_ce_backend", "liger", "changed", "ds_trainer's own"),
    ("partition_config.use_default_specs", False, "dropped", "parallel.tp_plan"),
    ("preset_model", "llama", "dropped", "parallel.tp_plan"),
    ("dtype", "bf16", "dropped", "precision.dtype"),
    ("tp.tp_size", 2, "dropped", "nothing is lost"),
    ("keep_module_on_host", True, "dropped", "only its slices"),
    ("kernel_inject", True, "dropped", "inference"),
]


@table("name, item, outcome, part", AUTO_TP)
def test_every_key_of_autotp_is_reported(name, item, outcome, part):
    native = {}
    assign(native, f"tensor_parallel.{name}", item)
    found = line(native, f"tensor_parallel.{name}")
    assert found.outcome == outcome and part in found.note
    assert found.ours == (("parallel.tp",) if (name, item) == ("autotp_size", 2) else ())
    load_config(imported(native).tree)


def test_the_keys_of_autotp_are_those_of_the_installed_deepspeed():
    known = {name.partition(".")[0] for name, *_ in AUTO_TP}
    fields = TPTrainingConfig.model_fields.items()
    assert {field.alias or name for name, field in fields} - known == {"injection_policy_tuple"}


def test_autotp_goes_there_and_back_in_a_standalone_json():
    run = resolve(*load_config({"parallel": {"tp": 2}, "schedule": {"name": "constant"}}), GPU)
    assert "tensor_parallel" not in to_deepspeed(run), "DeepSpeed would cut layers that are cut already"
    back = resolve_tree(imported(to_deepspeed(run, standalone=True)))
    assert (back.config.parallel.tp, back.dp_size) == (2, run.dp_size)


FORMATS = [("fp32", None), ("bf16", "bf16"), ("bf16", None), ("fp16", "fp16")]
OFFLOADS = [(0, "none"), *((stage, device) for stage in (1, 2, 3) for device in ("none", "cpu")), (3, "nvme")]
RUNS = [(*offload, *formats) for offload in OFFLOADS for formats in FORMATS if (offload[0], formats[1]) != (0, "bf16")]


@table("stage, device, dtype, grad_dtype", RUNS)
def test_every_stage_format_and_offload_comes_back_from_deepspeeds_json(stage, device, dtype, grad_dtype):
    offload = {"device": device} | ({"nvme_path": "/n"} if device == "nvme" else {})
    zero = {"stage": stage, "offload_optimizer": offload} | ({"offload_param": offload} if stage == 3 else {})
    raw = {"zero": zero, "precision": {"dtype": dtype} | ({"grad_dtype": grad_dtype} if grad_dtype else {})}
    if dtype == "fp16":
        raw["precision"]["loss_scale"] = {"hysteresis": 3, "min_loss_scale": 4}
    run = resolve(*load_config(raw), GPU)
    assert values(resolve_tree(imported(to_deepspeed(run)))) == values(run)


@table("schedule", ["constant", "linear", "cosine"])
@table("optimizer", ["adamw", "adam", "lion", "sgd"])
def test_optimizer_and_schedule_come_back_from_a_standalone_json(schedule, optimizer):
    raw = {
        "optimizer": {"name": optimizer, "lr": 3e-4, "weight_decay": 0.25},
        "schedule": {"name": schedule, "warmup_steps": 3},
        "run": {"max_steps": 20},
    }
    if optimizer == "sgd":
        raw["optimizer"]["momentum"] = 0.5
    else:
        raw["optimizer"]["betas"] = [0.8, 0.9]
    if schedule == "cosine":
        raw["schedule"]["min_lr_ratio"] = 0.25
    run = resolve(*load_config(raw), GPU)
    back = resolve_tree(imported(to_deepspeed(run, standalone=True)))
    keys = [key for key in leaf_fields() if key.startswith(("optimizer.", "schedule."))]
    if schedule != "constant":
        keys.append("run.max_steps")
    keys.remove("optimizer.decay_norms_and_biases")  # DeepSpeed has no such choice: it decays all it is given
    assert values(back, keys) == values(run, keys)
    assert back.config.optimizer.decay_norms_and_biases


PIPELINE = [
    ("stages", 4, "carried", "num_stages"),
    ("stages", 1, "carried", "num_stages"),
    ("stages", "auto", "carried", "set parallel.pp"),
    ("partition", "best", "carried", "balanced by what their layers cost"),
    ("partition", "uniform", "changed", "parallel.pp_split"),
    ("activation_checkpoint_interval", 0, "carried", "off here too"),
    ("activation_checkpoint_interval", 1, "carried", ""),
    ("activation_checkpoint_interval", 2, "changed", "by itself"),
    ("seed_layers", True, "dropped", "read from a checkpoint"),
    ("pipe_partitioned", True, "dropped", "parallel.sequence_parallel"),
    ("grad_partitioned", True, "dropped", "parallel.sequence_parallel"),
    ("use_reentrant", False, "dropped", "nothing is lost"),
]


@table("name, item, outcome, part", PIPELINE)
def test_every_key_of_deepspeeds_pipeline_is_reported(name, item, outcome, part):
    native = {"pipeline": {name: item}, "zero_optimization": {"stage": 1}}
    found = line(native, f"pipeline.{name}")
    assert found.outcome == outcome and part in found.note
    config = load_config(imported(native).tree)[0]
    assert config.parallel.pp == (4 if item == 4 else 1)
    assert config.model.gradient_checkpointing is (name == "activation_checkpoint_interval" and item > 0)


@pytest.mark.case("M3")
def test_a_file_that_is_silent_about_clipping_is_told_what_that_once_meant():
    (line,) = [line for line in from_deepspeed({"train_batch_size": 8}).lines if line.key == "gradient_clipping"]
    assert line.ours == ("optimizer.max_grad_norm",)
    assert "DeepSpeed's default: 1.0; before mid-2026 it was 0, no clipping" in line.note
