"""Every field of transformers' `TrainingArguments`: its default, and our key for it or why there is none. Pure.

The only table of this kind: callbacks read it (`ds_trainer.callbacks.hf_arguments`), `to_hf` writes by it and
`from_hf` reads by it. Recorded on transformers 5.24; a test holds it against the installed version.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Field:
    """A field of `TrainingArguments`; with neither `key` nor `why` it is translated together with others.

    Args:
        default: Its default.
        key: Our key that means the same.
        why: Why no key does.
        anyway: Whether the field asks for what `why` says, so that nothing is lost.
    """

    default: Any = None
    key: str = ""
    why: str = ""
    anyway: bool = False


_HUB = "the Hub is left to `hf upload`, which takes the exported folder"
_TRACKIO = "trackio reads it from its own settings"
_SCRIPT = "scripts read it, trainers do not"
_LOG_LEVEL = "ds_trainer logs by Python's logging: set the level there"
_LENGTHS = "batches are not grouped by length"
_PREDICTIONS = "compute_metrics gets the predictions of the whole evaluation, as one array"
_BITS = "evaluation runs in precision.dtype"

TRAINING_ARGUMENTS: dict[str, Field] = {
    "output_dir": Field("trainer_output", "run.output_dir"),
    "per_device_train_batch_size": Field(8, "batch.micro_size"),
    "num_train_epochs": Field(3.0),
    "max_steps": Field(-1),
    "learning_rate": Field(5e-5, "optimizer.lr"),
    "lr_scheduler_type": Field("linear"),
    "lr_scheduler_kwargs": Field(),
    "warmup_steps": Field(0),
    "optim": Field("adamw_torch_fused"),
    "optim_args": Field(),
    "weight_decay": Field(0.0, "optimizer.weight_decay"),
    "adam_beta1": Field(0.9),
    "adam_beta2": Field(0.999),
    "adam_epsilon": Field(1e-8),
    "optim_target_modules": Field(why="there are no optimizers that treat some modules differently"),
    "gradient_accumulation_steps": Field(1, "batch.accumulation"),
    "average_tokens_across_devices": Field(True, why="the loss is divided by the label tokens of all ranks, always"),
    "max_grad_norm": Field(1.0, "optimizer.max_grad_norm"),
    "label_smoothing_factor": Field(0.0, "loss.label_smoothing"),
    "bf16": Field(False),
    "fp16": Field(False),
    "bf16_full_eval": Field(False, why=_BITS),
    "fp16_full_eval": Field(False, why=_BITS),
    "tf32": Field(why="it is torch's switch: set torch.backends.cuda.matmul.fp32_precision"),
    "activation_checkpointing": Field(False, key="model.gradient_checkpointing"),
    "activation_checkpointing_kwargs": Field(),
    "gradient_checkpointing": Field(False, key="model.gradient_checkpointing"),
    "gradient_checkpointing_kwargs": Field(),
    "torch_compile": Field(False),
    "torch_compile_backend": Field(),
    "torch_compile_mode": Field(why="torch.compile runs in its default mode"),
    "use_liger_kernel": Field(False, why="kernels are torch's own; loss.chunk_tokens spares the memory of the logits"),
    "liger_kernel_config": Field(why="kernels are torch's own"),
    "use_cache": Field(False, why="training fills no key-value cache"),
    "neftune_noise_alpha": Field(why="no noise is added to embeddings"),
    "torch_empty_cache_steps": Field(why="the allocator keeps its cache; PYTORCH_CUDA_ALLOC_CONF tunes it"),
    "auto_find_batch_size": Field(False, why="a batch size that depends on memory would change the run: set batch"),
    "logging_strategy": Field("steps"),
    "logging_steps": Field(500, "logging.every_steps"),
    "logging_first_step": Field(False, why="steps are logged at multiples of logging.every_steps, and the last one"),
    "log_on_each_node": Field(True, why="rank 0 alone writes metrics", anyway=True),
    "logging_nan_inf_filter": Field(True, why="a loss that is not finite is shown, and stops the run", anyway=True),
    "include_num_input_tokens_seen": Field("no", why="tokens are in every line of metrics.jsonl", anyway=True),
    "log_level": Field("passive", why=_LOG_LEVEL),
    "log_level_replica": Field("warning", why=_LOG_LEVEL),
    "disable_tqdm": Field(),
    "report_to": Field("none"),
    "run_name": Field(key="logging.run_name"),
    "project": Field("huggingface", "logging.project_name"),
    "trackio_space_id": Field(why=_TRACKIO),
    "trackio_bucket_id": Field(why=_TRACKIO),
    "trackio_static_space_id": Field(why=_TRACKIO),
    "eval_strategy": Field("no"),
    "eval_steps": Field(key="evaluation.every_steps"),
    "eval_delay": Field(0, why="evaluations begin at the first multiple of evaluation.every_steps"),
    "per_device_eval_batch_size": Field(8, "evaluation.batch_size"),
    "prediction_loss_only": Field(False, why="predictions are kept for compute_metrics only", anyway=True),
    "eval_on_start": Field(False, "evaluation.at_start"),
    "eval_do_concat_batches": Field(True, why=_PREDICTIONS),
    "eval_use_gather_object": Field(False, why=_PREDICTIONS),
    "eval_accumulation_steps": Field(why="predictions move to the host after each batch"),
    "include_for_metrics": Field(why=_PREDICTIONS),
    "batch_eval_metrics": Field(False, why=_PREDICTIONS),
    "save_only_model": Field(False, why="a checkpoint holds all that a resumed run needs"),
    "save_strategy": Field("steps"),
    "save_steps": Field(500, "checkpoint.every_steps"),
    "save_on_each_node": Field(False, why="run.output_dir is a folder that all nodes share"),
    "save_total_limit": Field(key="checkpoint.keep_last"),
    "enable_jit_checkpoint": Field(False, why="a signal always ends a run with a checkpoint", anyway=True),
    "push_to_hub": Field(False, why=_HUB),
    "hub_token": Field(why=_HUB),
    "hub_private_repo": Field(why=_HUB),
    "hub_model_id": Field(why=_HUB),
    "hub_strategy": Field("every_save", why=_HUB),
    "hub_always_push": Field(False, why=_HUB),
    "hub_revision": Field(why=_HUB),
    "load_best_model_at_end": Field(False, "checkpoint.load_best_model_at_end"),
    "metric_for_best_model": Field(key="evaluation.metric_for_best_model"),
    "greater_is_better": Field(key="evaluation.greater_is_better"),
    "ignore_data_skip": Field(False, why="a resumed run goes on at the next sample"),
    "restore_callback_states_from_checkpoint": Field(False, why="callbacks' states are always restored", anyway=True),
    "full_determinism": Field(False, why="it is torch's switch: call torch.use_deterministic_algorithms"),
    "seed": Field(42, "run.seed"),
    "data_seed": Field(),
    "use_cpu": Field(False),
    "accelerator_config": Field(),
    "parallelism_config": Field(),
    "dataloader_drop_last": Field(False, why="no sample is left out: the last window of an epoch may be short"),
    "dataloader_num_workers": Field(0, "data.num_workers"),
    "dataloader_pin_memory": Field(True),
    "dataloader_persistent_workers": Field(False, why="workers live as long as the run", anyway=True),
    "dataloader_prefetch_factor": Field(key="data.prefetch_factor"),
    "dataloader_multiprocessing_context": Field(why="workers are forked"),
    "dataloader_in_order": Field(True, why="batches come in order, so that a run can be repeated"),
    "remove_unused_columns": Field(True, why="data sets are handed to the collator as they are", anyway=True),
    "label_names": Field(why="labels are called labels"),
    "train_sampling_strategy": Field("random"),
    "length_column_name": Field("length", why=_LENGTHS),
    "ddp_find_unused_parameters": Field(key="ddp.find_unused_parameters"),
    "ddp_bucket_cap_mb": Field(key="ddp.bucket_cap_mb"),
    "ddp_broadcast_buffers": Field(why="buffers are the same on every rank from the start"),
    "ddp_static_graph": Field(key="ddp.static_graph"),
    "ddp_backend": Field(why="the device decides: nccl with GPUs, gloo without"),
    "ddp_timeout": Field(1800, "run.collective_timeout_s"),
    "fsdp": Field(),
    "fsdp_config": Field(),
    "deepspeed": Field(),
    "debug": Field(why="a step that is not finite stops the run and is named"),
    "skip_memory_metrics": Field(True, why="peak memory is in every line of metrics.jsonl", anyway=True),
    "do_train": Field(False, why=_SCRIPT, anyway=True),
    "do_eval": Field(False, why=_SCRIPT, anyway=True),
    "do_predict": Field(False, why=_SCRIPT, anyway=True),
    "resume_from_checkpoint": Field(key="checkpoint.resume"),
    "local_rank": Field(-1, why="the launcher sets it", anyway=True),
}
"""Field -> its default and meaning."""

RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "warmup_ratio": "warmup_steps",
    "group_by_length": "train_sampling_strategy",
}
"""Names of transformers 4 -> field; false and null are ignored."""

SWITCHES = {"group_by_length": "group_by_length", "no_cuda": True}
"""Name of transformers 4 that is true or false -> what its field holds when it is true."""

KEY_OF_FIELD = {name: field.key for name, field in TRAINING_ARGUMENTS.items() if field.key}
"""Field -> key that means the same."""

_FIELD_OF = {key: name for name, key in reversed(KEY_OF_FIELD.items())} | {
    "run.max_steps": "max_steps",
    "run.epochs": "num_train_epochs",
    "optimizer.name": "optim",
    "schedule.name": "lr_scheduler_type",
}


def with_field_names(note: str) -> str:
    """A text with our keys replaced by the names of the corresponding `TrainingArguments` fields."""
    return re.sub(r"\b[a-z]+\.[a-z_]+", lambda match: _FIELD_OF.get(match[0], match[0]), note)
