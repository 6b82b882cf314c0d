"""Which keys DeepSpeed reads, the unified keys that correspond to them, and errors for the others. Pure.

`make deepspeed-keys` writes `deepspeed_keys.json`, now of DeepSpeed 0.19.8; a test compares it with the installed one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ds_trainer.config.deepspeed.native_types import Kind, admits, wrong_value
from ds_trainer.config.keys import NO_COMMENTS, flatten, is_comment, leaf_fields
from ds_trainer.errors import ConfigError

SECTIONS: dict[str, dict[str, Kind]] = json.loads(Path(__file__).with_name("deepspeed_keys.json").read_text())
"""Section -> key that DeepSpeed reads in it -> its type."""

TOP_LEVEL = SECTIONS.pop("")
"""Top-level key that DeepSpeed reads -> its type."""

_OWN_LOADER = "ds_trainer's own loader feeds the run"
_OWN_CHECKPOINTS = "ds_trainer writes its own checkpoints"
_LAYOUT = "ds_trainer lays out the ranks itself"

REFUSED = {
    "optimizer": ("ds_trainer builds the optimizer", "set optimizer.name, optimizer.lr and their like"),
    "scheduler": ("ds_trainer sets the learning rate", "set schedule.name, schedule.warmup_steps and their like"),
    "activation_checkpointing": (
        "DeepSpeed reads it for models that call its own checkpoint function; Hugging Face models do not",
        "set model.gradient_checkpointing",
    ),
    "bfloat16": ("it is the old name of bf16", "set precision.dtype"),
    "dataloader_drop_last": (_OWN_LOADER, "remove it; the last window of an epoch may be short"),
    "data_efficiency": (_OWN_LOADER, "remove it"),
    "checkpoint": (_OWN_CHECKPOINTS, "remove it"),
    "datastates_ckpt": (_OWN_CHECKPOINTS, "remove it"),
    "pipeline": ("ds_trainer runs its own pipeline, on every engine", "set parallel.pp"),
    "tensor_parallel": ("ds_trainer shards the layers itself, on every engine", "set parallel.tp"),
    "expert_parallel": (_LAYOUT, "remove it"),
    "use_data_before_expert_parallelism": (_LAYOUT, "remove it"),
    "autotuning": ("it belongs to the `deepspeed --autotuning` launcher", "remove it"),
    "hybrid_engine": ("it belongs to DeepSpeed-Chat", "remove it"),
    "compile": ("it acts when engine.compile() is called, which ds_trainer does not do", "remove it"),
    "weight_quantization": ("it belongs to inference", "remove it"),
    "managed_gradient_accumulation": ("ds_trainer marks the micro-batches itself", "remove it"),
    "gradient_allreduce_op": ("the loss is divided by the step's label tokens, on an average over ranks", "remove it"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (
        "it is for DeepSpeed's save_16bit_model; ds_trainer's export always writes full weights",
        "remove it; checkpoint.export and checkpoint.export_dtype govern what is written",
    ),
    "zero_optimization.cpu_offload": ("it is deprecated", "set zero.offload_optimizer.device"),
    "zero_optimization.cpu_offload_param": ("it is deprecated", "set zero.offload_param.device"),
    "zero_optimization.cpu_offload_use_pin_memory": ("it is deprecated", "set zero.offload_optimizer.pin_memory"),
}
"""Native key -> why it is refused, and what to do instead."""
for _name in ("gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"):
    REFUSED[f"zero_optimization.{_name}"] = REFUSED["zero_optimization.stage3_gather_16bit_weights_on_model_save"]


GONE = {
    "amp": "Apex's AMP; precision.dtype has bf16 and fp16",
    "compression_training": "its compression library",
    "curriculum_learning": "curriculum learning at the top level, and ds_trainer's own loader feeds the run",
    "eigenvalue": "mixture-of-quantization",
    "elasticity": "elastic training",
    "graph_harvesting": "graph harvesting",
    "nebula": "Nebula's checkpoints, and ds_trainer writes its own",
    "progressive_layer_drop": "progressive layer dropping",
    "quantize_training": "mixture-of-quantization",
    "sparse_attention": "sparse attention",
    "sparse_gradients": "sparse reduction of the gradients of dense embeddings",
    "zero_optimization.mics_shard_size": "MiCS; zero.zero_hpz_partition_size keeps a copy of the parameters per node",
    "zero_optimization.mics_hierarchical_params_gather": "MiCS",
    "zero_optimization.zeropp_loco_param": "LoCo's error feedback; zero.zero_quantized_gradients works without it",
}
"""Native key of a feature that DeepSpeed has removed -> the feature."""


def unified_keys() -> dict[str, str]:
    """Native dotted key -> the unified key that corresponds to it."""
    table = {
        "train_batch_size": "batch.global_size",
        "train_micro_batch_size_per_gpu": "batch.micro_size",
        "gradient_accumulation_steps": "batch.accumulation",
        "gradient_clipping": "optimizer.max_grad_norm",
        "communication_data_type": "precision.communication_data_type",
        "data_types.grad_accum_dtype": "precision.grad_dtype",
        "bf16.enabled": "precision.dtype",
        "fp16.enabled": "precision.dtype",
        "torch_autocast.enabled": "precision.dtype",
        "torch_autocast.dtype": "precision.dtype",
    }
    for key in leaf_fields():
        section, _, name = key.rpartition(".")
        if section == "zero.aio":
            table[f"aio.{name}"] = key
        elif section == "precision.loss_scale":
            table[f"fp16.{name}"] = key
        elif key.startswith("zero."):
            native = key.replace("zero.", "zero_optimization.", 1)
            table[native] = table[native.replace("stage3_", "", 1)] = key
    return table


def check_native(native: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Faults of a DeepSpeed block by itself: keys that DeepSpeed never reads, or that ds_trainer refuses."""
    flat = flatten(native)
    prefixes = {".".join(key.split(".")[:end]) for key in flat for end in range(1, len(key.split(".")) + 1)}
    for key in sorted(prefixes):
        section, _, name = key.rpartition(".")
        if key in REFUSED:
            why, change = REFUSED[key]
            yield ConfigError(f"native.deepspeed.{key} is set", why, change)
        elif key in GONE:
            yield ConfigError(f"native.deepspeed.{key} is set", f"DeepSpeed no longer has {GONE[key]}", "remove it")
        elif section in ("", *SECTIONS) and name not in (SECTIONS[section] if section else TOP_LEVEL):
            yield ConfigError(
                f"native.deepspeed.{key} is no key of DeepSpeed{f' in {section}' if section else ' at the top level'}",
                "DeepSpeed would not read it, or stop at it",
                _nearest_native(key),
            )
        elif (kind := _kind(key)) and (item := flat.get(key, {})) != "auto" and not admits(kind, item):
            yield wrong_value(key, item, kind)
    for key, item in flat.items():
        if item == "auto" and not ((kind := _kind(key)) and admits(kind, item)):
            meant = unified_keys().get(key)
            yield ConfigError(
                f'native.deepspeed.{key} is "auto"',
                "ds_trainer derives keys that are left out; no value is spelt auto",
                f"remove it{f'; it follows {meant}' if meant else ''}",
            )


def _kind(key: str) -> Kind | None:
    section, _, name = key.rpartition(".")
    return (SECTIONS.get(section, {}) if section else TOP_LEVEL).get(name)


def _nearest_native(key: str) -> str:
    name = key.rpartition(".")[2]
    if is_comment(name):
        return NO_COMMENTS
    for section, names in SECTIONS.items():
        if name in names:
            if refused := REFUSED.get(f"{section}.{name}"):
                return refused[1]
            meant = unified_keys().get(f"{section}.{name}")
            return f"it belongs inside {section}{f'; set {meant}' if meant else ''}"
    section = key.rpartition(".")[0]
    if section in SECTIONS:  # by its name alone: all keys of a section are alike in the section
        close = [f"{section}.{meant}" for meant in get_close_matches(name, SECTIONS[section], n=1)]
    else:
        paths = [*TOP_LEVEL, *(f"{section}.{name}" for section, names in SECTIONS.items() for name in names)]
        close = get_close_matches(key, [path for path in paths if not key.startswith(f"{path}.")], n=1)
    close = close or get_close_matches(name, TOP_LEVEL.keys() - {section}, n=1)
    return f"did you mean {close[0]}?" if close else "remove it"


class ReadRecorder(dict):
    """A DeepSpeed config that records which top-level keys are read, across shallow copies of itself.

    DeepSpeed reads with `get`, `[]`, `in` and `in config.keys()`.
    """

    def __init__(self, native: Mapping[str, Any]) -> None:
        super().__init__(native)
        self.reads: dict[str, Any] = {}
        """Key that was read -> the default that it was read with, if any."""

    def get(self, key: str, default: Any = None) -> Any:
        """As in a dict."""
        if self.reads.setdefault(key) is None:
            self.reads[key] = default
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.reads.setdefault(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.reads.setdefault(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        """Itself, so that `key in config.keys()` is recorded too."""
        return self

    def unread(self) -> list[str]:
        """Keys that are set and were not read."""
        return sorted(set(self) - self.reads.keys())
