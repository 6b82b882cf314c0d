"""A run as arguments of transformers' Trainer, and back: parsed by the real class, and none of its fields forgotten."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import ParallelismConfig
from transformers import Trainer, TrainingArguments
from transformers.optimization import get_scheduler

from ds_trainer.cli import main
from ds_trainer.config.backend import backend
from ds_trainer.config.deepspeed.arguments import to_deepspeed
from ds_trainer.config.io import load_config
from ds_trainer.config.keys import flatten, leaf_fields, leaf_values
from ds_trainer.config.resolve import resolve
from ds_trainer.config.resolved import Machine
from ds_trainer.errors import ConfigError, ConfigErrors
from ds_trainer.interop.accelerate.snippet import accelerate_snippet
from ds_trainer.interop.hf.exporter import hf_snippet, to_hf
from ds_trainer.interop.hf.fields import KEY_OF_FIELD, TRAINING_ARGUMENTS, with_field_names
from ds_trainer.interop.hf.importer import from_hf
from ds_trainer.interop.hf.notes import ENGINES, TRANSLATED, UNTRANSLATED, reason
from ds_trainer.interop.import_report import report
from ds_trainer.optim import lr_factor
from ds_trainer.trainer.inputs import config_of_arguments
from tests.helpers.shipped_configs import FOLDER, MACHINES, TABLE, WHOLE_MODELS
from tests.helpers.table import table

CPU = Machine(2, "cpu", ("fp32",), "a CPU")
GPU = Machine(2, "cuda", ("fp32", "bf16", "fp16"), "a GPU")


def run(machine=CPU, **sections):
    return resolve(*load_config(sections), machine)


def lines_of(found, name):
    return [line for line in found.lines if line.key == name]


def imported(**arguments):
    found = from_hf(arguments)
    return found, flatten(found.tree)


@pytest.fixture
def arguments(monkeypatch):
    """The real class, in a process that no launcher started."""
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    # A machine without a GPU can only read what is meant for one.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    return TrainingArguments


def test_the_table_holds_every_field_of_the_installed_class_with_its_default(arguments):
    made = arguments()
    wrong = {}
    for field in dataclasses.fields(TrainingArguments):
        usual = field.default_factory() if field.default is dataclasses.MISSING else field.default
        ours = TRAINING_ARGUMENTS[field.name].default
        if ours not in (usual, getattr(made, field.name)) and usual not in ("", []):
            wrong[field.name] = (usual, ours)
    assert wrong == {}
    assert TRAINING_ARGUMENTS.keys() == {field.name for field in dataclasses.fields(TrainingArguments)}
    assert all(not (field.key and field.why) for field in TRAINING_ARGUMENTS.values())
    assert set(KEY_OF_FIELD.values()) <= leaf_fields().keys()


NON_DEFAULT = {
    "max_steps": 10,
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "optim": "sgd",
    "optim_args": "momentum=0.9",
    "optim_target_modules": ["q_proj"],
    "activation_checkpointing_kwargs": {"use_reentrant": True},
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "torch_compile_backend": "eager",
    "torch_compile_mode": "max-autotune",
    "liger_kernel_config": {"rope": True},
    "logging_strategy": "epoch",
    "include_num_input_tokens_seen": "all",
    "log_level": "info",
    "log_level_replica": "info",
    "report_to": ["wandb", "comet_ml"],
    "eval_strategy": "epoch",
    "include_for_metrics": ["inputs"],
    "save_strategy": "no",
    "hub_strategy": "end",
    "hub_token": "secret",
    "metric_for_best_model": "accuracy",
    "accelerator_config": {"split_batches": True},
    "parallelism_config": {"dp_replicate_size": 2},
    "label_names": ["labels"],
    "train_sampling_strategy": "group_by_length",
    "length_column_name": "n",
    "ddp_backend": "gloo",
    "fsdp_config": {"version": 2},
    "deepspeed": {"zero_optimization": {"stage": 3}},
    "debug": "underflow_overflow",
    "fsdp": True,
    "dataloader_multiprocessing_context": "spawn",
    "output_dir": "elsewhere",
    "run_name": "name",
    "project": "name",
    "resume_from_checkpoint": "checkpoint-10",
    "trackio_space_id": "space",
    "trackio_bucket_id": "bucket",
    "trackio_static_space_id": "space",
    "hub_model_id": "me/model",
    "hub_revision": "main",
}


def other_than(name):
    default = TRAINING_ARGUMENTS[name].default
    if name in NON_DEFAULT:
        return NON_DEFAULT[name]
    return not default if default is None or isinstance(default, bool) else default + 1


@table("name", TRAINING_ARGUMENTS)
def test_a_field_that_is_not_at_its_default_has_one_line_that_is_no_default(name):
    found, _ = imported(**{name: other_than(name)})
    lines = [line for line in found.lines if line.key.partition(".")[0] == name and line.value is not None]
    assert len(lines) == 1 or name == "fsdp_config", lines
    assert all(line.note for line in lines if line.outcome != "carried" or not line.ours)
    assert "secret" not in report(found)


def test_every_line_that_carries_leads_to_keys_that_exist():
    for name in TRAINING_ARGUMENTS:
        found, flat = imported(**{name: other_than(name)})
        assert {key for line in found.lines for key in line.ours} <= leaf_fields().keys() | {"native.deepspeed"}
        assert flat.keys() <= leaf_fields().keys()


@pytest.mark.parametrize(("name", "meant"), [("learning_rat", "learning_rate"), ("zzz", None)])
def test_an_unknown_field_is_reported_with_the_nearest_one(name, meant):
    found, _ = imported(**{name: 1.0})
    (line,) = lines_of(found, name)
    assert line.outcome == "dropped" and line.note.startswith("unknown: ")
    assert line.note.endswith(f"; did you mean {meant}?" if meant else "has no such field")


def test_a_file_has_one_line_for_each_of_its_keys_with_its_own_value():
    file = {name: field.default for name, field in TRAINING_ARGUMENTS.items() if field.default is not None}
    file |= {"fsdp": "shard_grad_op", "fsdp_config": {"fsdp_activation_checkpointing": False, "min_num_params": 0}}
    file |= {"warmup_ratio": 0.0, "lr_scheduler_kwargs": {}}
    for more in ({}, {"max_steps": 5}, {"optim": "sgd", "eval_strategy": "epoch"}):
        found = from_hf(file | more)
        written = {line.key: line.value for line in found.lines if line.value is not None}
        section = {f"fsdp_config.{name}": item for name, item in file["fsdp_config"].items()}
        assert written == {name: item for name, item in (file | more).items() if name != "fsdp_config"} | section
        assert len(written) == sum(line.value is not None for line in found.lines)
        load_config(found.tree)
    assert {line.key for line in found.lines if line.value is None} == {
        "save_total_limit",
        "fsdp_config.version",
        "fsdp_config.reshard_after_forward",
        "fsdp_config.auto_wrap_policy",
    }


def test_what_a_file_says_at_its_default_means_what_is_left_out_means():
    said = {name: field.default for name, field in TRAINING_ARGUMENTS.items()}
    assert load_config(from_hf(said).tree)[0] == load_config(from_hf({}).tree)[0]


EPOCHS = {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"}
EVERY = ("evaluation.every_steps", "checkpoint.every_steps", "logging.every_steps")


def test_once_per_epoch_is_a_number_of_steps_where_the_data_is_known():
    found = from_hf(EPOCHS | {"load_best_model_at_end": True, "num_train_epochs": 2.5}, steps_per_epoch=7)
    flat = flatten(found.tree)
    assert [flat[key] for key in EVERY] == [7, 7, 7]
    assert flat["evaluation.at_end"] and flat["checkpoint.load_best_model_at_end"]
    assert (flat["run.max_steps"], flat.get("run.epochs")) == (18, None)
    assert list(found.of("changed")) == []


def test_a_share_of_all_steps_is_a_number_where_the_data_is_known():
    found = from_hf({"eval_strategy": "steps", "eval_steps": 0.3, "num_train_epochs": 2}, steps_per_epoch=7)
    assert flatten(found.tree)["evaluation.every_steps"] == 5


def test_once_per_epoch_is_told_with_its_formula_where_the_data_is_not_known():
    found, flat = imported(**EPOCHS, load_best_model_at_end=True, gradient_accumulation_steps=4)
    for name, key in zip(EPOCHS, EVERY, strict=True):
        (line,) = lines_of(found, name)
        assert line.outcome == "changed"
        assert f"set {key} to ceil(samples / (8 x 4 x ranks)); " in line.note
    (best,) = lines_of(found, "load_best_model_at_end")
    assert best.outcome == "changed" and "the only one to choose from" in best.note
    assert flat["evaluation.at_end"] and flat.get("evaluation.every_steps") is None


def test_hints_name_the_fields_that_a_caller_with_training_arguments_can_change():
    note = "known with run.max_steps only: set evaluation.every_steps or data.pin_memory; see zero.stage."
    assert with_field_names(note) == "known with max_steps only: set eval_steps or data.pin_memory; see zero.stage."


@table(
    ("fields", "part"),
    [
        ({"bf16": True, "fp16": True}, "bf16 and fp16 are both true"),
        ({"bf16_full_eval": True, "fp16_full_eval": True}, "bf16_full_eval and fp16_full_eval are both true"),
        ({"deepspeed": 7}, "deepspeed is 7"),
        ({"fsdp": True, "fsdp_config": [1]}, "fsdp_config is [1]"),
        ({"lr_scheduler_kwargs": "a=1"}, "lr_scheduler_kwargs is 'a=1'"),
        ({"learning_rate": "1e-4"}, "YAML 1.0e-4"),
        ({"max_steps": True}, "max_steps is True"),
        ({"bf16": "yes"}, "bf16 is 'yes'"),
        ({"fsdp": "nonsense"}, "with 'nonsense'"),
        ({"fsdp": 7}, "with 7"),
        ({"fsdp": ["full_shard", "nonsense"]}, "with 'nonsense'"),
        ({"fsdp": "hybrid_shard"}, "hybrid_shard is an option of FSDP1 alone"),
        ({"fsdp": "no_shard"}, "no_shard is an option of FSDP1 alone"),
    ],
    ids=str,
)
def test_what_transformers_refuses_is_refused_by_its_name(fields, part):
    with pytest.raises(ConfigError) as caught:
        from_hf(fields)
    assert part in str(caught.value)


def test_all_wrong_types_are_told_together():
    with pytest.raises(ConfigErrors) as caught:
        from_hf({"learning_rate": "fast", "bf16": 1, "deepspeed": 7})
    assert len(caught.value.errors) == 3


def test_hybrid_shard_of_fsdp1_asks_for_the_number_of_machines():
    hybrid = {"fsdp": "hybrid_shard", "fsdp_config": {"version": 1}}
    found, flat = imported(**hybrid)
    (line,) = [line for line in found.lines if line.ours[:1] == ("fsdp.reshard_after_forward",)]
    assert (line.outcome, flat["parallel.dp_replicate"]) == ("changed", 1)
    assert "parallelism_config.dp_replicate_size" in line.note
    assert imported(**hybrid, parallelism_config={"dp_replicate_size": 2})[1]["parallel.dp_replicate"] == 2


def test_a_parallelism_config_object_is_read_too(arguments):
    args = arguments(parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2), fsdp=True)
    config, origins = config_of_arguments(args)
    assert (config.parallel.dp_replicate, config.parallel.dp_shard) == (2, 2)
    assert origins["parallel.dp_shard"] == "TrainingArguments.parallelism_config.dp_shard_size"


def test_a_file_that_a_field_names_is_looked_for_beside_the_arguments_first(tmp_path, monkeypatch, capsys):
    beside, here = tmp_path / "beside", tmp_path / "here"
    for stage, folder in ((1, beside), (2, here)):
        folder.mkdir()
        (folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    monkeypatch.chdir(here)
    assert flatten(from_hf({"deepspeed": "ds.json"}, folder=beside).tree)["zero.stage"] == 1
    assert flatten(from_hf({"deepspeed": "ds.json"}, folder=tmp_path).tree)["zero.stage"] == 2
    (beside / "args.json").write_text(json.dumps({"output_dir": "out", "deepspeed": "ds.json"}))
    assert main(["config", "import", str(beside / "args.json")]) == 0
    assert json.loads(capsys.readouterr().out)["zero"]["stage"] == 1


def test_what_is_left_out_keeps_the_meaning_that_transformers_gives_it():
    found, flat = imported()
    assert flat == {
        "run.output_dir": "trainer_output",
        "run.epochs": 3,
        "batch.micro_size": 8,
        "batch.accumulation": 1,
        "evaluation.batch_size": 8,
        "evaluation.at_end": False,
        "optimizer.lr": 5e-5,
        "schedule.name": "linear",
        "precision.dtype": "fp32",
        "logging.every_steps": 500,
        "logging.project_name": "huggingface",
        "checkpoint.every_steps": 500,
        "checkpoint.keep_last": 10**9,
        "parallel.engine": "ddp",
    }
    assert all(line.value is None and line.note for line in found.lines)
    load_config(found.tree)


@table(
    ("theirs", "ours"),
    [
        ({"max_steps": 10, "num_train_epochs": 7}, {"run.max_steps": 10, "run.epochs": None}),
        ({"max_steps": 0, "num_train_epochs": 1.5}, {"run.max_steps": None, "run.epochs": 2}),
        ({"warmup_steps": 0.1}, {"schedule.warmup_ratio": 0.1, "schedule.warmup_steps": None}),
        ({"warmup_ratio": 0.1, "no_cuda": True}, {"schedule.warmup_ratio": 0.1, "run.device": "cpu"}),
        ({"warmup_ratio": 0.0, "warmup_steps": 7}, {"schedule.warmup_steps": 7}),
        ({"lr_scheduler_type": "constant", "warmup_steps": 5}, {"schedule.warmup_steps": None}),
        ({"eval_strategy": "steps"}, {"evaluation.every_steps": 500, "evaluation.at_end": False}),
        ({"eval_strategy": "epoch"}, {"evaluation.every_steps": None, "evaluation.at_end": True}),
        ({"eval_strategy": "steps", "eval_steps": 0.1, "max_steps": 25}, {"evaluation.every_steps": 3}),
        ({"save_strategy": "no"}, {"checkpoint.every_steps": 0}),
        ({"save_total_limit": 3, "load_best_model_at_end": True}, {"checkpoint.keep_last": 2}),
        ({"metric_for_best_model": "acc", "greater_is_better": False}, {"evaluation.greater_is_better": False}),
        ({"bf16": True, "optim": "adamw_torch"}, {"precision.dtype": "bf16", "optimizer.fused": False}),
        ({"optim": "sgd", "adam_beta1": 0.5}, {"optimizer.name": "sgd", "optimizer.betas": None}),
        ({"adam_beta2": 0.95}, {"optimizer.betas": [0.9, 0.95]}),
        ({"report_to": ["wandb", "comet_ml"]}, {"logging.report_to": ["wandb"]}),
        ({"group_by_length": False, "train_sampling_strategy": "sequential"}, {"data.shuffle": False}),
        ({"fsdp": "shard_grad_op offload"}, {"fsdp.reshard_after_forward": False, "fsdp.cpu_offload": True}),
        ({"fsdp": "no_shard", "fsdp_config": {"version": 1}}, {"parallel.engine": "ddp"}),
        (
            {"fsdp": True, "bf16": True, "fsdp_config": {"fsdp_reshard_after_forward": False}},
            {"parallel.engine": "fsdp2", "fsdp.reshard_after_forward": False, "precision.grad_dtype": "bf16"},
        ),
    ],
)
def test_fields_that_depend_on_others_are_read_together(theirs, ours):
    _, flat = imported(**theirs)
    assert {key: flat.get(key) for key in ours} == ours


DEEPSPEED_AUTO = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}},
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}


@pytest.mark.parametrize("as_file", [False, True])
def test_auto_in_a_deepspeed_json_is_what_the_fields_say(tmp_path, as_file):
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED_AUTO))
    found, flat = imported(
        deepspeed=str(tmp_path / "ds.json") if as_file else DEEPSPEED_AUTO,
        bf16=True,
        learning_rate=1e-3,
        warmup_steps=5,
        max_steps=50,
        adam_beta2=0.95,
        max_grad_norm=0.5,
        gradient_accumulation_steps=4,
    )
    expected = {
        "parallel.engine": "deepspeed",
        "zero.stage": 2,
        "precision.dtype": "bf16",
        "optimizer.lr": 1e-3,
        "optimizer.betas": [0.9, 0.95],
        "optimizer.max_grad_norm": 0.5,
        "schedule.name": "linear",
        "schedule.warmup_steps": 5,
        "run.max_steps": 50,
        "batch.micro_size": 8,
        "batch.accumulation": 4,
    }
    assert {key: flat.get(key) for key in expected} == expected
    assert "zero.reduce_bucket_size" not in flat and "batch.global_size" not in flat
    (line,) = lines_of(found, "deepspeed: gradient_clipping")
    assert (line.value, line.ours) == ("auto", ("optimizer.max_grad_norm",))
    load_config(found.tree)


def test_a_deepspeed_json_that_says_something_else_is_refused_as_transformers_does():
    native = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4, "gradient_clipping": 0.3}
    with pytest.raises(ConfigErrors) as caught:
        from_hf({"deepspeed": native, "gradient_accumulation_steps": 2})
    text = str(caught.value)
    assert "gradient_accumulation_steps is 2, and gradient_accumulation_steps of the DeepSpeed JSON is 4" in text


def test_every_key_of_a_run_has_an_argument_or_a_reason():
    assert set(TRANSLATED) | {key for key in UNTRANSLATED if "." in key} <= leaf_fields().keys()
    assert not TRANSLATED & UNTRANSLATED.keys()
    for key in leaf_fields():
        said = key in TRANSLATED or (key.partition(".")[0] in ENGINES and key not in UNTRANSLATED)
        assert (reason(key) is None) == said
        assert said or reason(key) in UNTRANSLATED


@table("name", WHOLE_MODELS)
def test_a_shipped_config_survives_the_way_there_and_back(arguments, name):
    ranks = int(next(row[1] for row in TABLE if row[0].startswith(f"[{name}]")))
    machine, on_gpus = MACHINES[Path(name).parent.name](ranks), []
    if backend(load_config(FOLDER / name)[0]) == "fsdp2":  # accelerate runs it nowhere else.
        machine, on_gpus = replace(GPU, world=ranks), ["run.device=cuda"]
    there = resolve(*load_config(FOLDER / name, ["run.max_steps=100", *on_gpus]), machine)
    told = to_hf(there)
    parsed = arguments(**told.arguments)
    assert all(getattr(parsed, key) == told.arguments[key] for key in KEY_OF_FIELD if key in told.arguments)
    found = from_hf(told.arguments | ({"deepspeed": told.deepspeed} if told.deepspeed else {}))
    back = leaf_values(resolve(*load_config(found.tree), machine).config)
    lost = {key for key in leaf_fields() if reason(key) is not None}
    lost |= {"$schema", "run.epochs", "model.path", "model.attn_implementation"}
    if there.config.parallel.engine == "accelerate":
        lost |= {"parallel.engine", "accelerate.backend"}
    config = there.config
    if config.model.gradient_checkpointing == "selective":
        lost.add("model.gradient_checkpointing")
    if config.ddp.comm_hook is not None:
        lost.add("precision.communication_data_type")
    if "fsdp2" in (config.parallel.engine, config.accelerate.backend):
        # Of ZeRO's words FSDP2's are left; accelerate reduces in the format of the pass.
        lost |= {key for key in leaf_fields() if key.startswith("zero.")} | {
            "fsdp.auto_wrap_policy",
            "parallel.dp_shard",
        }
        lost |= {"precision.grad_dtype", "precision.communication_data_type"}
    differ = {
        key: (item, back[key]) for key, item in leaf_values(config).items() if key not in lost and item != back[key]
    }
    assert differ == {}


SCHEDULES = [
    {"name": "constant"},
    {"name": "constant", "warmup_steps": 3},
    {"name": "linear", "warmup_ratio": 0.25},
    {"name": "linear", "warmup_steps": 3, "min_lr_ratio": 0.1},
    {"name": "linear", "min_lr_ratio": 1.0},
    {"name": "cosine", "warmup_steps": 3},
    {"name": "cosine", "warmup_ratio": 0.1, "min_lr_ratio": 0.1},
    {"name": "wsd", "warmup_steps": 3, "decay_ratio": 0.3},
    {"name": "wsd", "decay_ratio": 0.5, "min_lr_ratio": 0.2},
    {"name": "wsd", "warmup_steps": 18, "decay_ratio": 0.5},
]


@table("schedule", SCHEDULES, ids=str)
def test_the_learning_rate_is_ours_at_every_step(arguments, schedule):
    steps = 20
    there = run(schedule=schedule, run={"max_steps": steps}, optimizer={"lr": 0.5})
    args = arguments(**to_hf(there).arguments)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    theirs = get_scheduler(
        args.lr_scheduler_type, optimizer, args.get_warmup_steps(steps), steps, args.lr_scheduler_kwargs
    )
    for step in range(steps):
        assert theirs.get_last_lr()[0] == pytest.approx(0.5 * lr_factor(there.config.schedule, step, steps), abs=1e-9)
        optimizer.step()
        theirs.step()
    back = load_config(from_hf(to_hf(there).arguments).tree)[0].schedule
    again = [lr_factor(back, step, steps) for step in range(steps)]
    assert again == pytest.approx([lr_factor(there.config.schedule, step, steps) for step in range(steps)], abs=1e-9)


def test_a_schedule_that_needs_the_number_of_steps_is_refused_without_it():
    with pytest.raises(ConfigErrors, match=r"set run\.max_steps"):
        to_hf(run(schedule={"name": "wsd"}))


@pytest.mark.parametrize(
    ("optimizer", "kind", "values"),
    [
        ({"name": "adamw", "betas": [0.8, 0.9], "eps": 1e-6}, "AdamW", {"betas": (0.8, 0.9), "eps": 1e-6}),
        ({"name": "adamw", "fused": False}, "AdamW", {"fused": None}),
        ({"name": "sgd", "momentum": 0.9}, "SGD", {"momentum": 0.9}),
    ],
)
def test_the_optimizer_that_transformers_makes_is_ours(arguments, optimizer, kind, values):
    args = arguments(**to_hf(run(optimizer=optimizer | {"lr": 0.5, "weight_decay": 0.1}, zero={"stage": 2})).arguments)
    made, options = Trainer.get_optimizer_cls_and_kwargs(args)
    assert (made.__name__, options["lr"]) == (kind, 0.5)
    assert {name: options.get(name) for name in values} == values


def test_group_by_length_has_the_line_of_its_successor():
    old, new = imported(group_by_length=True)[0], imported(train_sampling_strategy="group_by_length")[0]
    (line,) = lines_of(old, "group_by_length")
    assert (line.value, line.outcome) == (True, "dropped")
    assert line.note == lines_of(new, "train_sampling_strategy")[0].note


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"parallel": {"engine": "fsdp2"}}, "parallel.engine"),
        ({"zero": {"stage": 1}, "precision": {"dtype": "bf16"}}, "precision.dtype"),
        ({"zero": {"stage": 3}, "precision": {"dtype": "bf16"}}, "precision.dtype"),
    ],
    ids=str,
)
def test_what_transformers_does_not_run_on_a_cpu_is_refused_in_words_and_runs_on_gpus(sections, key):
    with pytest.raises(ConfigErrors) as caught:
        to_hf(run(**sections))
    assert f"set {key}" in caught.value.errors[0].change and "--device cuda" in caught.value.errors[0].change
    to_hf(run(GPU, **sections))


def test_tensor_parallelism_is_refused_since_theirs_is_another():
    with pytest.raises(ConfigErrors, match="parallel.tp is 2, for transformers' Trainer"):
        to_hf(run(GPU, parallel={"tp": 2, "engine": "ddp"}))


@pytest.mark.parametrize("fields", [{"tp_size": 2}, {"parallelism_config": {"tp_size": 2}}], ids=str)
def test_a_tensor_parallel_size_is_carried(fields):
    found, flat = imported(**fields)
    assert flat["parallel.tp"] == 2 and [line.outcome for line in found.lines if "parallel.tp" in line.ours] == [
        "carried"
    ]
    assert "parallel.tp" not in imported(tp_size=1)[1]


def test_bf16_on_a_cpu_is_for_ddp(arguments):
    told = to_hf(run(parallel={"engine": "ddp"}, precision={"dtype": "bf16"})).arguments
    assert arguments(**told).bf16 and told["use_cpu"]


@pytest.mark.parametrize("stage", [2, 3])
def test_zero3_gathers_the_weights_that_transformers_and_accelerate_save(stage):
    there = run(zero={"stage": stage})
    key = "stage3_gather_16bit_weights_on_model_save"
    assert (to_hf(there).deepspeed["zero_optimization"].get(key) is True) == (stage == 3)
    assert (key in hf_snippet(there)) == (key in accelerate_snippet(there)) == (stage == 3)
    assert key not in to_deepspeed(there)["zero_optimization"], "our own engine refuses it"


def test_use_cpu_is_asked_of_ddp_only_since_it_turns_everything_else_off():
    assert to_hf(run(parallel={"engine": "ddp"})).arguments["use_cpu"] is True
    told = to_hf(run())
    assert told.arguments["use_cpu"] is False
    assert any("use_cpu=True would run DDP" in note for note in told.notes)


def test_what_transformers_cannot_be_told_is_in_the_notes():
    told = to_hf(
        run(
            GPU,
            model={"gradient_checkpointing": "selective"},
            optimizer={"name": "adam", "weight_decay": 0.1, "decay_norms_and_biases": True},
            loss={"chunk_tokens": 8},
            run={"epochs": 1, "max_steps": 5},
            checkpoint={"load_best_model_at_end": True},
        )
    )
    for part in ("selective", "AdamW only", "decay_norms_and_biases", "chunk_tokens = 8", "run.epochs", "load_best"):
        assert any(part in note for note in told.notes), part


def test_a_plug_in_engine_is_refused(monkeypatch):
    monkeypatch.setattr("ds_trainer.interop.hf.exporter.backend", lambda config: "toy")
    with pytest.raises(ConfigErrors, match="it runs on deepspeed, fsdp2 and ddp"):
        to_hf(run())


@pytest.mark.parametrize("patience", [None, 3])
def test_the_snippet_runs(tmp_path, arguments, patience):
    from tests.helpers.tiny import tiny_llama

    tiny_llama().save_pretrained(tmp_path)
    evaluation = {"every_steps": 5, "early_stopping_patience": patience}
    text = hf_snippet(
        run(parallel={"engine": "ddp"}, model={"path": str(tmp_path)}, run={"max_steps": 7}, evaluation=evaluation)
    )
    made: dict = {}
    exec(text, made)
    trainer = made["make_trainer"](eval_dataset=[{"input_ids": [1], "labels": [1]}])
    assert made["arguments"].max_steps == 7
    assert trainer.model.dtype == torch.float32
    stops = [c for c in trainer.callback_handler.callbacks if type(c).__name__ == "EarlyStoppingCallback"]
    assert [c.early_stopping_patience for c in stops] == ([patience] if patience else [])
