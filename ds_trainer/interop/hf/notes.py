"""Settings of a run that transformers' `Trainer` lacks or handles differently. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ds_trainer.config.backend import backend
from ds_trainer.config.keys import default, leaf_values
from ds_trainer.config.schema import RunConfig
from ds_trainer.interop.hf.fields import KEY_OF_FIELD

_NOTHING = "it has no such setting"
_BY_CALLBACK = "add transformers.EarlyStoppingCallback to its callbacks"
_BY_HOOK = "call register_comm_hook on the wrapped model"
_BY_RESIZE = "call model.resize_token_embeddings"

_TENSOR_PARALLEL = tuple(f"parallel.{name}" for name in ("tp", "tp_plan", "sequence_parallel", "keep_gathered_input"))
_PIPELINE = tuple(f"parallel.{name}" for name in ("pp", "schedule", "virtual_stages", "pp_split"))

UNTRANSLATED = {
    "data": "it takes tokenised data sets and a collator",
    "model.resize_embeddings": _BY_RESIZE,
    "model.pad_embeddings_to_multiple_of": _BY_RESIZE,
    "model.initialize_missing": "from_pretrained initialises whatever is missing",
    "model.allow_pickle": "from_pretrained reads pickled weights without asking",
    "parallel.dp_replicate": "pass TrainingArguments(parallelism_config=...)",
    **dict.fromkeys(_TENSOR_PARALLEL, "its tensor parallelism differs, and cannot save the optimizer's state"),
    **dict.fromkeys(_PIPELINE, "its pipeline parallelism runs forward passes only"),
    "fsdp.buffer_dtype": _NOTHING,
    "fsdp.pin_memory": "accelerate's own choice applies",
    "fsdp.prefetch_depth": _NOTHING,
    "ddp.comm_hook": _BY_HOOK,
    "ddp.powersgd_rank": _BY_HOOK,
    "ddp.gradient_as_bucket_view": "accelerate's own choice applies",
    "loss.chunk_tokens": "it computes all logits at once; use_liger_kernel=True spares them",
    "optimizer.norm_type": "it clips by the L2 norm",
    "optimizer.decay_norms_and_biases": "it never decays parameters that are named as norms and biases",
    "run.on_non_finite": "it goes on from weights that are not finite",
    "run.max_skipped_steps": _NOTHING,
    "run.stuck_timeout_s": _NOTHING,
    "evaluation.at_end": "it evaluates at multiples of eval_steps only",
    "evaluation.generate_samples": _NOTHING,
    "evaluation.max_new_tokens": _NOTHING,
    "evaluation.early_stopping_patience": _BY_CALLBACK,
    "evaluation.early_stopping_threshold": _BY_CALLBACK,
    "checkpoint.resume": "pass one of its own checkpoints to Trainer.train(resume_from_checkpoint=...)",
    "checkpoint.resume_weights_only": _NOTHING,
    "checkpoint.allow_global_size_change": _NOTHING,
    "checkpoint.on_save_error": _NOTHING,
    "checkpoint.export": "call Trainer.save_model",
    "checkpoint.export_dtype": "it saves in the dtype in which the model was loaded",
    "checkpoint.max_shard_size": _NOTHING,
    "logging.plots": _NOTHING,
}
"""Key or section without a corresponding argument -> what happens instead, or what to do."""

TRANSLATED = {
    *(key for key in KEY_OF_FIELD.values() if key != "checkpoint.resume"),
    *("batch.global_size", "run.epochs", "run.max_steps", "run.device", "precision.dtype", "$schema"),
    *("parallel.engine", "parallel.dp_shard", "accelerate.backend"),
    *("optimizer.name", "optimizer.fused", "optimizer.betas", "optimizer.eps", "optimizer.momentum"),
    *("schedule.name", "schedule.warmup_steps", "schedule.warmup_ratio"),
    *("schedule.decay_ratio", "schedule.min_lr_ratio"),
    *("data.shuffle", "data.pin_memory", "logging.progress_bar", "logging.report_to", "model.compile"),
    *("model.path", "model.revision", "model.tokenizer", "model.auto_class"),
    *("model.attn_implementation", "model.trust_remote_code"),
}
"""Keys that have an argument, or that say which model is passed."""

ENGINES = ("zero", "fsdp", "ddp", "precision", "native")
"""Sections that go into the DeepSpeed JSON or `fsdp_config`, but for the keys of `UNTRANSLATED`."""


def reason(key: str) -> str | None:
    """The entry of `UNTRANSLATED` for a key: itself or its section; None where the key has an argument."""
    section = key.partition(".")[0]
    if key in UNTRANSLATED:
        return key
    return None if key in TRANSLATED or section in ENGINES else section


def hf_notes(config: RunConfig) -> tuple[str, ...]:
    """One line for every difference between a run here and there.

    Args:
        config: The run, resolved.
    """
    found = [*_about_loading(config), *_about_steps(config), *_about_engine(config)]
    for key, item in leaf_values(config).items():
        entry, is_set = reason(key), item is True or item not in (default(key), False)
        if entry is not None and is_set and not _belongs_to_another(key, config):
            setting = f"{key} = {json.dumps(item)}" if entry == key else entry
            found.append(f"{setting}: {UNTRANSLATED[entry]}")
    return tuple(dict.fromkeys(found))


def _belongs_to_another(key: str, config: RunConfig) -> bool:
    """Whether a key is read by another engine, or about evaluations where there is nothing to evaluate."""
    section = key.partition(".")[0]
    if section == "evaluation":
        return config.data.eval is None
    return section in ("fsdp", "ddp") and not backend(config).startswith(section)


def _about_loading(config: RunConfig) -> Iterator[str]:
    yield "model: load it with dtype=torch.float32; its master weights have the dtype in which it was loaded"
    order = "draws other permutations from the same seed" if config.data.shuffle else "keeps the order of the samples"
    yield f"data: it {order}, and fills the last step of an epoch up with samples of the first"


def _about_steps(config: RunConfig) -> Iterator[str]:
    run, optimizer, schedule = config.run, config.optimizer, config.schedule
    if run.epochs is not None and run.max_steps is not None:
        yield f"run.epochs = {run.epochs}: max_steps overrides it, and the data is repeated as often as it needs"
    if optimizer.name == "adam" and optimizer.weight_decay:
        yield f"optimizer.name = adam: it has AdamW only, whose weight decay of {optimizer.weight_decay} is decoupled"
    if optimizer.name == "lion":
        yield "optimizer.name = lion: it takes bitsandbytes' Lion, which needs a GPU"
    if optimizer.name == "adafactor":
        yield (
            "optimizer.name = adafactor: its own one, which does not multiply the rate by the RMS of each tensor: at "
            "the same optimizer.lr weights move far more, so lower it"
        )
    if schedule.name == "wsd" and schedule.min_lr_ratio:
        yield "schedule.min_lr_ratio: its warm-up begins there too, and not at zero"
    if config.model.gradient_checkpointing == "selective":
        yield 'model.gradient_checkpointing = "selective": it recomputes whole layers'
    if config.model.compile:
        yield "model.compile: it compiles the whole model"
    if config.checkpoint.load_best_model_at_end and config.evaluation.every_steps is None:
        yield "checkpoint.load_best_model_at_end: it needs evaluations on the way, so evaluation.every_steps"


def _about_engine(config: RunConfig) -> Iterator[str]:
    engine, precision = backend(config), config.precision
    if engine == "deepspeed" and config.run.device == "cpu":
        yield "run.device = cpu: use_cpu=True would run DDP instead of DeepSpeed; see examples/hf_trainer.py"
    if engine == "fsdp2" and type(config.fsdp.reshard_after_forward) is int:
        yield f"fsdp.reshard_after_forward = {config.fsdp.reshard_after_forward}: it knows true and false"
    if engine == "fsdp2" and precision.communication_data_type != precision.dtype:
        yield f"precision.communication_data_type: accelerate reduces gradients in {precision.dtype}"
    if engine != "deepspeed" and precision.loss_scale != type(precision.loss_scale)():
        yield "precision.loss_scale: torch.amp.GradScaler's own values apply"
