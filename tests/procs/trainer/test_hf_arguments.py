"""`Trainer(args=TrainingArguments(...))`: the run that a config of the same meaning would be, on real ranks."""

import logging

import pytest
from transformers import TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from ds_trainer.errors import ConfigError, ConfigErrors
from ds_trainer.host.deepspeed_ops import disable_shm_comm
from ds_trainer.log import get_logger
from ds_trainer.trainer.trainer import Trainer
from tests.helpers.runs import D8, collate, make_trainer
from tests.helpers.tiny import tiny_llama

KEY_OF_FIELD = {
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.01,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 1,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "max_grad_norm": 0.5,
    "train_sampling_strategy": "sequential",
    "logging_steps": 1,
    "disable_tqdm": True,
    "save_strategy": "no",
}


def hf_trainer(out, model=None, **more):
    arguments = TrainingArguments(output_dir=str(out), **KEY_OF_FIELD | more)
    return Trainer(model=model or tiny_llama(), args=arguments, train_dataset=D8, data_collator=collate)


def losses(trainer):
    return [(line.loss, line.grad_norm, line.lr) for line in trainer.train().log_history]


def by_config(out, engine):
    return losses(
        make_trainer(
            engine,
            out,
            optimizer={
                "name": "adamw",
                "lr": 0.01,
                "betas": [0.9, 0.95],
                "weight_decay": 0.1,
                "max_grad_norm": 0.5,
            },
            schedule={"name": "cosine", "warmup_steps": 1},
            batch={"global_size": None, "micro_size": 2, "accumulation": 2},
            run={"max_steps": 3},
        )
    )


def by_arguments(out):
    trainer = hf_trainer(out, use_cpu=True)
    reasons = trainer.run.resolved.reasons
    return losses(trainer), type(trainer.engine).__name__, reasons["optimizer.lr"], reasons["batch.micro_size"]


def test_arguments_train_as_the_config_that_means_the_same(world, tmp_path):
    expected = world(by_config, 2, tmp_path / "config", "ddp")[0]
    for log, engine, lr, micro in world(by_arguments, 2, tmp_path / "args"):
        assert log == expected
        assert engine == "DDPEngine"
        assert (lr, micro) == ("TrainingArguments.learning_rate", "TrainingArguments.per_device_train_batch_size")


ZERO3 = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


def by_zero3_arguments(checkpoint, out):
    disable_shm_comm()
    arguments = TrainingArguments(output_dir=str(out), deepspeed=ZERO3, **KEY_OF_FIELD)
    assert is_deepspeed_zero3_enabled(), "transformers must be about to build models in pieces, or nothing is proved"
    trainer = Trainer(model=checkpoint, args=arguments, train_dataset=D8, data_collator=collate)
    assert not is_deepspeed_zero3_enabled()
    shards = {p.ds_tensor.numel() for p in trainer.engine.module.parameters()}
    return losses(trainer), trainer.run.resolved.reasons["zero.stage"], min(shards) > 0


def test_arguments_with_a_deepspeed_json_train_with_its_zero_stage(world, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "checkpoint")
    expected = world(by_config, 2, tmp_path / "config", "zero3")[0]
    for log, stage, is_cut in world(by_zero3_arguments, 2, str(tmp_path / "checkpoint"), tmp_path / "args"):
        assert log == expected
        assert stage == "TrainingArguments.deepspeed: zero_optimization.stage"
        assert is_cut


def test_what_changes_or_is_lost_is_logged_and_what_cannot_be_is_refused_by_its_field(world, tmp_path):
    logged, errors = world(refuse_all, 1, tmp_path)[0]
    assert any("TrainingArguments.neftune_noise_alpha is dropped: no noise" in line for line in logged)
    assert any("TrainingArguments.torch_compile is changed -> model.compile: each block" in line for line in logged)
    both, no_arguments, betas, in_pieces, positional = errors
    assert "holds a config and TrainingArguments" in both
    assert "Trainer(args=...) holds dict" in no_arguments
    assert "optimizer.betas is [1.5, 0.999] (TrainingArguments.adam_beta1)" in betas
    assert "was built in pieces" in in_pieces
    assert "holds TrainingArguments as its config" in positional and "pass Trainer(model=..., args=...," in positional


def refuse_all(out):
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    get_logger().addHandler(handler)
    odd = {"torch_compile": True, "neftune_noise_alpha": 5.0}
    hf_trainer(out, use_cpu=True, **odd)
    errors = []
    arguments = TrainingArguments(output_dir=str(out), use_cpu=True, adam_beta1=1.5)
    in_pieces = tiny_llama()
    in_pieces.lm_head.weight.ds_id = 0
    plain = TrainingArguments(output_dir=str(out), use_cpu=True)
    for given in (
        {"config": {}, "args": plain},
        {"args": {"learning_rate": 1.0}},
        {"args": arguments},
        {"args": plain, "model": in_pieces},
        {"config": plain},
    ):
        with pytest.raises((ConfigError, ConfigErrors)) as caught:
            Trainer(**{"model": tiny_llama()} | given, train_dataset=D8, data_collator=collate)
        errors.append(str(caught.value))
    return logged, errors


def per_epoch(out):
    """Two and a half passes over 8 samples at 4 per step and rank."""
    arguments = TrainingArguments(
        output_dir=str(out),
        use_cpu=True,
        **KEY_OF_FIELD
        | {"max_steps": -1, "num_train_epochs": 2.5, "gradient_accumulation_steps": 1}
        | {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"}
        | {"load_best_model_at_end": True},
    )
    trainer = Trainer(model=tiny_llama(), args=arguments, train_dataset=D8, eval_dataset=D8[:2], data_collator=collate)
    log = trainer.train().log_history
    saved = sorted(int(path.name.partition("-")[2]) for path in out.glob("checkpoint-*"))
    return [line.step for line in log if hasattr(line, "eval_loss")], trainer.state.global_step, saved


def test_once_per_epoch_is_after_each_pass_over_the_data_set_and_at_the_end(world, tmp_path):
    evaluated, steps, saved = world(per_epoch, 2, tmp_path)[0]
    assert (evaluated, steps, saved) == ([2, 4, 5], 5, [2, 4, 5])
