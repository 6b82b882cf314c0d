"""A run as arguments of transformers' Trainer, and back: parsed by the real class, and none of its fields forgotten."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments
from transformers.optimization import get_scheduler

from ds_trainer.config.hf.from_hf import from_hf
from ds_trainer.config.hf.hf_keys import FIELDS, SAME
from ds_trainer.config.hf.hf_notes import ENGINES, SAID, UNSAID, reason
from ds_trainer.config.hf.to_hf import hf_snippet, to_hf
from ds_trainer.config.import_report import report
from ds_trainer.config.io import load_config
from ds_trainer.config.keys import flatten, leaf_fields, leaf_values
from ds_trainer.config.resolve import resolve
from ds_trainer.config.resolved import Machine
from ds_trainer.errors import ConfigErrors
from ds_trainer.optim import lr_factor
from tests.test_configs_shipped import FOLDER, MACHINES, SHIPPED, TABLE

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
        ours = FIELDS[field.name].default
        if ours not in (usual, getattr(made, field.name)) and usual not in ("", []):
            wrong[field.name] = (usual, ours)
    assert wrong == {}
    assert FIELDS.keys() == {field.name for field in dataclasses.fields(TrainingArguments)}
    assert all(not (field.key and field.why) for field in FIELDS.values())
    assert set(SAME.values()) <= leaf_fields().keys()


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
    default = FIELDS[name].default
    if name in NON_DEFAULT:
        return NON_DEFAULT[name]
    return not default if default is None or isinstance(default, bool) else default + 1


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_is_not_at_its_default_has_one_line_that_is_no_default(name):
    found, _ = imported(**{name: other_than(name)})
    lines = [line for line in found.lines if line.key.partition(".")[0] == name and line.value is not None]
    assert len(lines) == 1 or name == "fsdp_config", lines
    assert all(line.note for line in lines if line.fate != "carried" or not line.ours)
    assert "secret" not in report(found)


def test_every_line_that_carries_leads_to_keys_that_exist():
    for name in FIELDS:
        found, flat = imported(**{name: other_than(name)})
        assert {key for line in found.lines for key in line.ours} <= leaf_fields().keys() | {"native.deepspeed"}
        assert flat.keys() <= leaf_fields().keys()


def test_an_unknown_field_is_reported():
    found, _ = imported(learning_rat=1.0)
    assert [line.note for line in lines_of(found, "learning_rat")] == [
        "unknown: TrainingArguments of transformers 5.24 has no such field"
    ]


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


@pytest.mark.parametrize(
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
    assert set(SAID) | {key for key in UNSAID if "." in key} <= leaf_fields().keys()
    assert not SAID & UNSAID.keys()
    for key in leaf_fields():
        said = key in SAID or (key.partition(".")[0] in ENGINES and key not in UNSAID)
        assert (reason(key) is None) == said
        assert said or reason(key) in UNSAID


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_survives_the_way_there_and_back(arguments, name):
    ranks = int(next(row[1] for row in TABLE if row[0].startswith(f"[{name}]")))
    machine = MACHINES[Path(name).parent.name](ranks)
    there = resolve(*load_config(FOLDER / name, ["run.max_steps=100"]), machine)
    told = to_hf(there)
    parsed = arguments(**told.arguments)
    assert all(getattr(parsed, key) == told.arguments[key] for key in SAME if key in told.arguments)
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


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
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
    monkeypatch.setattr("ds_trainer.config.hf.to_hf.backend", lambda config: "toy")
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
