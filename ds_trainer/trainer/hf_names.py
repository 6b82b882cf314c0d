"""Names of transformers' `Trainer` that this one does not have, each with the reason and with what to use instead.

A method that a subclass overrides and that nothing calls would be ignored without a word, so the subclass is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from ds_trainer.errors import ConfigError

_LOSS = "the engine runs forward and backward passes, and a loss is a sum divided once by the label tokens of the step"
_DATA = "a loader knows the order of all global batches, so that a run resumes bit for bit on every layout"
_OPTIMIZER = "each engine builds the optimizer on its own shards of the parameters"
_LOOP = "the loop is the same on every engine and has no such part"
_CHECKPOINT = "a checkpoint holds each element once, whatever the layout, and one module writes it"
_HUB = "nothing is uploaded by a training"
_INPUTS = "the loader moves micro-batches to the device, and model and engine get them as the collator made them"
_EVALUATION = "every rank runs the same number of forward passes in an evaluation, whatever its samples"

_GROUPS: tuple[tuple[str, str, str], ...] = (
    (
        "compute_loss training_step loss_is_scaled_for_ga",
        _LOSS,
        "pass Trainer(compute_loss_func=f(outputs, labels, num_items_in_batch)), or a model instance whose forward "
        "returns its own loss",
    ),
    (
        "compute_loss_context_manager autocast_smart_context_manager",
        _LOSS,
        "set precision.dtype, or enter the context in the model's own forward",
    ),
    (
        "get_train_dataloader get_eval_dataloader get_test_dataloader num_examples _get_dataloader _get_train_sampler "
        "_get_eval_sampler get_batch_samples _get_num_items_in_batch _remove_unused_columns "
        "_set_signature_columns_if_needed _get_collator_with_removed_columns",
        _DATA,
        "pass Trainer(train_dataset=..., eval_dataset=..., data_collator=...), and set the data and batch sections",
    ),
    (
        "_prepare_input _prepare_inputs _prepare_context_parallel_inputs",
        _INPUTS,
        "pass Trainer(data_collator=...), or change inputs in the model's own forward",
    ),
    (
        "create_optimizer create_optimizer_and_scheduler get_optimizer_cls_and_kwargs get_decay_parameter_names "
        "get_optimizer_group",
        _OPTIMIZER,
        "pass Trainer(model=instance, optimizers=(optimizer, scheduler)), or set the optimizer section",
    ),
    (
        "create_scheduler get_learning_rates _get_learning_rate",
        _OPTIMIZER,
        "pass Trainer(optimizers=(optimizer, scheduler)), or set the schedule section; rates are in "
        "trainer.engine.param_groups()",
    ),
    (
        "prediction_step evaluation_loop _evaluate",
        _EVALUATION,
        "pass Trainer(compute_metrics=...), override evaluate(), or use a callback's on_prediction_step",
    ),
    (
        "log metrics_format _maybe_log_save_evaluate _report_to_hp_search",
        "lines are logged as StepMetrics and EvalMetrics, to the terminal, the metrics file and trackers alike",
        "pass a callback with on_log(trainer, metrics)",
    ),
    (
        "_clip_grad_norm _get_grad_norm _mixed_mesh_grad_norm _has_mixed_mesh_grads",
        "each engine clips by the norm over all shards",
        "set optimizer.max_grad_norm; the norm is trainer.state.grad_norm",
    ),
    (
        "_inner_training_loop _run_epoch _init_training_state _prepare_for_training _finalize_training end "
        "set_initial_training_values _track_num_input_tokens _update_auto_batch_size store_flos floating_point_ops",
        _LOOP,
        "pass a callback: on_step_begin, on_pre_optimizer_step, on_step_end and the others of ds_trainer.Callback",
    ),
    (
        "_wrap_model _move_model_to_device _defer_fsdp_gradient_reduction _sync_replicated_trainable_parameters "
        "_build_accelerator_args create_accelerator_and_postprocess _validate_args",
        "parallel.engine says what wraps the model, in an order that set-up states once",
        "set the parallel, zero and fsdp sections, or write an engine plug-in: docs/architecture.md",
    ),
    (
        "get_total_train_batch_size get_sp_size get_cp_size get_tp_size get_num_trainable_parameters",
        "the resolved config holds the sizes of a run",
        "read trainer.config.batch, trainer.config.parallel and trainer.run.num_trained",
    ),
    (
        "_save _save_checkpoint _save_rng_state _save_optimizer_and_scheduler _save_scaler _get_output_dir",
        _CHECKPOINT,
        "call save_checkpoint(), override save_model(), or pass a callback with on_save(trainer, folder)",
    ),
    (
        "_load_from_checkpoint _load_rng_state _load_optimizer_and_scheduler _load_scaler _load_callback_state "
        "_issue_warnings_after_load",
        _CHECKPOINT,
        "set checkpoint.resume to auto or to a checkpoint's folder",
    ),
    (
        "_load_best_model _determine_best_metric",
        "the best checkpoint is found by one metric that every evaluation has",
        "set checkpoint.load_best_model_at_end and evaluation.metric_for_best_model",
    ),
    (
        "init_hf_repo create_model_card push_to_hub _push_from_checkpoint _finish_current_push",
        _HUB,
        "upload the folder of save_model() with huggingface_hub's upload_folder",
    ),
    (
        "hyperparameter_search call_model_init _hp_search_setup _tune_save_checkpoint",
        "a Trainer is one run by one config",
        "make a Trainer for each trial, with the trial's values in its config",
    ),
)

REFUSED: Mapping[str, tuple[str, str]] = {
    name: (rule, change) for names, rule, change in _GROUPS for name in names.split()
}
"""Method or class attribute of transformers' `Trainer` -> why it is not here, and what to use."""

REFUSED_ARGUMENTS: Mapping[str, tuple[str, str]] = {
    "model_init": ("a Trainer is one run on one model", "pass Trainer(model=model_init())"),
    "optimizer_cls_and_kwargs": (
        _OPTIMIZER,
        "set optimizer.name and its keys, or pass Trainer(model=instance, optimizers=(optimizer, scheduler))",
    ),
    "preprocess_logits_for_metrics": (
        "compute_metrics gets the logits of an evaluation as they are",
        "take what the metric needs from prediction.predictions in compute_metrics",
    ),
    "tokenizer": ("the tokenizer's argument is processing_class, as in transformers 5", "pass processing_class=..."),
}
"""Argument of transformers' `Trainer`, of this version or an earlier one -> why it is not here, and what to use."""


class AbsentNameError(ConfigError, AttributeError):
    """A name of transformers' `Trainer` was used that does not exist here."""


def refuse_overrides(cls: type, base: type) -> None:
    """Refuses a subclass of the Trainer that defines what would never be called.

    Args:
        cls: The subclass.
        base: The Trainer, whose own private methods may have a name of transformers'.

    Raises:
        ConfigError: It defines methods of transformers' Trainer that do not exist here; all are named.
    """
    found = [name for name in REFUSED if getattr(cls, name, None) is not getattr(base, name, None)]
    if not found:
        return
    rules = dict.fromkeys(REFUSED[name][0] for name in found)
    changes = dict.fromkeys(REFUSED[name][1] for name in found)
    raise ConfigError(
        f"class {cls.__name__} overrides {', '.join(found)} of transformers' Trainer, which would never be called",
        "; ".join(rules),
        "; ".join(changes),
    )


def raise_absent(trainer: Any, name: str) -> NoReturn:
    """The Trainer's `__getattr__`: refuses an attribute that does not exist; a name of transformers' says what to use.

    Raises:
        AttributeError: Always.
    """
    owner = type(trainer).__name__
    if name not in REFUSED:
        raise AttributeError(f"{owner!r} object has no attribute {name!r}")
    rule, change = REFUSED[name]
    raise AbsentNameError(f"{owner}.{name} is used, which transformers' Trainer has", rule, change)


def refuse_arguments(given: Mapping[str, Any]) -> None:
    """Refuses arguments of transformers' Trainer that this one does not have.

    Args:
        given: Arguments by name that are no parameters of the Trainer.

    Raises:
        ConfigError: An argument is transformers'.
        TypeError: An argument is nobody's.
    """
    for name in given:
        if name not in REFUSED_ARGUMENTS:
            raise TypeError(f"Trainer() has no argument {name!r}")
        rule, change = REFUSED_ARGUMENTS[name]
        raise ConfigError(f"Trainer({name}=...) is an argument of transformers' Trainer", rule, change)
