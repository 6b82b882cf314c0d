"""The unified JSON that a DeepSpeed JSON means. Pure.

What the file leaves out keeps DeepSpeed's meaning, not ours: where the two differ, DeepSpeed's default is set, and
reported without a value. Names, stages and refusals come from the tables by which a run is translated to DeepSpeed.

Source: deepspeed/runtime/config.py, zero/config.py and zero/offload_config.py of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from ds_trainer.config.deepspeed.native_keys import check_native, unified_keys
from ds_trainer.config.deepspeed.stages_of_keys import OFFLOAD_DEVICES, OFFLOAD_STAGES, STAGES
from ds_trainer.config.keys import assign, default, flatten
from ds_trainer.errors import ConfigError
from ds_trainer.interop.deepspeed.import_optimizer import (
    OPTIMIZER_KEYS,
    carry_optimizer,
    carry_scheduler,
    keep_optimizer_defaults,
)
from ds_trainer.interop.import_result import Imported, ImportLine

Native = Mapping[str, Any]
"""A DeepSpeed JSON as dotted keys, under the names that DeepSpeed has for them today."""

_ZERO = "zero_optimization"
_RENAMED = {
    "allgather_size": f"{_ZERO}.allgather_bucket_size",
    f"{_ZERO}.cpu_offload_use_pin_memory": f"{_ZERO}.offload_optimizer.pin_memory",
    f"{_ZERO}.gather_16bit_weights_on_model_save": f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
    f"{_ZERO}.stage3_gather_fp16_weights_on_model_save": f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
}
"""Key of old files -> the key that took its place."""

_REPLACED: dict[str, tuple[str, dict[bool, Any]]] = {
    _ZERO: (f"{_ZERO}.stage", {True: 1, False: 0}),
    f"{_ZERO}.cpu_offload": (f"{_ZERO}.offload_optimizer.device", {True: "cpu", False: "none"}),
    f"{_ZERO}.cpu_offload_param": (f"{_ZERO}.offload_param.device", {True: "cpu", False: "none"}),
    f"{_ZERO}.cpu_offload_params": (f"{_ZERO}.offload_param.device", {True: "cpu", False: "none"}),
    "fp32_allreduce": ("communication_data_type", {True: "fp32", False: None}),
}
"""Switch of old files -> the key that took its place, and the value for each of its states."""

_NESTED_AIO = f"{_ZERO}.aio."
"""Place of the section in older documentation of Hugging Face."""

_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
}

_ANYWAY = {
    "zero_allow_untested_optimizer": (True, "ds_trainer always sets it"),
    "zero_force_ds_cpu_optimizer": (True, "DeepSpeed's CPU optimizer updates what is offloaded, where it has one"),
    "bf16.check_grad_overflow": (True, "a gradient that is not finite never reaches the weights: run.on_non_finite"),
    "fp16.loss_scale": (0, "the loss scale is dynamic"),
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": (True, "the export writes full weights: checkpoint.export"),
    "fp16.fp16_master_weights_and_grads": (False, "master weights are always fp32"),
    "bf16.bf16_master_weights_and_grads": (False, "master weights are always fp32"),
    "bf16.bf16_optimizer_states": (False, "optimizer states are always fp32"),
}
"""Key -> the value that describes what happens here in any case, and a note."""

_LAYERS = "tensor_parallel."
_BY_PLAN = "the plan of the model's type, or parallel.tp_plan, says which layers are sharded, and how"
_AUTO_TP: dict[str, tuple[Any, str]] = {
    "tp_overlap_comm": (True, "weight gradients are computed while input gradients are summed"),
    "vocab_parallel_lm_head": (True, "head and loss are sharded over the vocabulary wherever the plan shards the head"),
    "vocab_parallel_ce_backend": ("torch", "cross entropy is ds_trainer's own"),
}
"""Key of AutoTP -> the value that describes what happens here in any case, and a note."""

_AUTO_TP_GONE = {
    "dtype": "the dtype is precision.dtype",
    "keep_module_on_host": "each rank reads only its slices of the weights",
    **dict.fromkeys(("partition_config", "preset_model", "injection_policy_tuple"), _BY_PLAN),
    **dict.fromkeys(("tp", "tensor_parallel"), "DeepSpeed does not read it in training: nothing is lost"),
    **dict.fromkeys(("kernel_inject", "replace_with_kernel_inject"), "it belongs to inference"),
}
"""Key of AutoTP, or section in it -> why it is left out."""

_PIPELINE = "pipeline."
_PIPELINE_GONE = {
    "seed_layers": "layers are read from a checkpoint, and not initialised",
    "use_reentrant": "layers are recomputed without re-entering autograd: nothing is lost",
    **dict.fromkeys(
        ("pipe_partitioned", "grad_partitioned"),
        "activations between stages are sharded over the tensor-parallel ranks with parallel.sequence_parallel",
    ),
}
"""Key of DeepSpeed's pipeline -> why it is left out."""

_OURS = unified_keys() | OPTIMIZER_KEYS
_DTYPE_SECTIONS = ("bf16", "fp16", "torch_autocast", "amp")


def from_deepspeed(native: Mapping[str, Any], name: str = "") -> Imported:
    """The unified JSON of a DeepSpeed JSON, with a line for each of its keys.

    Args:
        native: The JSON of the file.
        name: Prefix of its keys in the report; empty where it is the imported file itself.

    Raises:
        ConfigError: It switches on both fp16 and bf16.
    """
    found = read_deepspeed(native, name)
    keep_defaults(found)
    return found


def read_deepspeed(native: Mapping[str, Any], name: str = "") -> Imported:
    """As `from_deepspeed`, without DeepSpeed's defaults: another file may set those keys.

    Raises:
        ConfigError: It switches on both fp16 and bf16.
    """
    found = Imported()
    assign(found.tree, "parallel.engine", "deepspeed")
    written = {key: _as_integer(item) for key, item in flatten(native).items()}
    today = {key: _current(key, item) for key, item in written.items()}
    # DeepSpeed does not read an old form beside the current one.
    today = {key: named if named[0] not in written else (key, written[key]) for key, named in today.items()}
    flat = dict(today.values())
    _check_one_dtype(flat)
    for key, (current_name, item) in today.items():
        _carry(found, flat, current_name, item)
        if current_name != key:
            line = found.lines.pop()
            note = "; ".join(filter(None, (_renaming(key, current_name), line.note)))
            found.lines.append(replace(line, key=key, value=written[key], note=note))
    keep_optimizer_defaults(found, flat)
    if name:
        found.lines = [replace(line, key=f"{name}: {line.key}") for line in found.lines]
    return found


def _check_one_dtype(flat: Native) -> None:
    if flat.get("fp16.enabled") is True and flat.get("bf16.enabled") is True:
        raise ConfigError(
            "fp16.enabled and bf16.enabled are both true",
            "a run has one dtype: DeepSpeed stops here too",
            "set one of them to false",
        )


def _renaming(key: str, current_name: str) -> str:
    if key.startswith(_NESTED_AIO):
        return f"DeepSpeed reads it at the top level only, as {current_name}"
    return f"an old form of {current_name}"


def keep_defaults(found: Imported) -> None:
    """Sets DeepSpeed's defaults for keys without a line, where ours differ; notes a batch that cannot be divided."""
    if (stage := _set(found, "zero.stage")) is None:
        stage = _keep(found, f"{_ZERO}.stage", "zero.stage", 0)
    note = "; before mid-2026 it was 0, no clipping: set optimizer.max_grad_norm to 0 for a file from then"
    _keep(found, "gradient_clipping", "optimizer.max_grad_norm", 1.0, note)
    if _set(found, "batch.global_size") and not _mentioned(found) & {"batch.micro_size", "batch.accumulation"}:
        _keep(found, "gradient_accumulation_steps", "batch.accumulation", 1)
    _keep(found, "bf16.enabled", "precision.dtype", "fp32")
    dtype = _set(found, "precision.dtype")
    if dtype in ("bf16", "fp16") and (stage, dtype) != (0, "bf16"):
        for native, ours in (
            ("data_types.grad_accum_dtype", "precision.grad_dtype"),
            ("communication_data_type", "precision.communication_data_type"),
        ):
            _keep(found, native, ours, dtype, f", the dtype of the pass; remove {ours} for fp32")
    if stage == 3:
        name = "stage3_param_persistence_threshold"
        _keep(found, f"{_ZERO}.{name}", f"zero.{name}", 100_000)
    if _set(found, "zero.offload_param.device") == "nvme":
        _keep(found, f"{_ZERO}.offload_param.max_in_cpu", "zero.offload_param.max_in_cpu", 10**9)
    _note_batch(found)


def _note_batch(found: Imported) -> None:
    """DeepSpeed stops at a batch that its factors do not divide, on any number of ranks, and so will ds_trainer."""
    total = _set(found, "batch.global_size")
    keys = [key for key in ("batch.micro_size", "batch.accumulation") if _set(found, key)]
    factors = [_set(found, key) for key in keys]
    if not all(type(number) is int for number in (total, *factors)) or total % prod(factors) == 0:
        return
    product = " x ".join(f"{key} {factor}" for key, factor in zip(keys, factors, strict=True))
    note = f"fits no number of ranks: it is no multiple of {product}; change one of them"
    found.lines = [replace(line, note=note) if line.ours == ("batch.global_size",) else line for line in found.lines]


def _keep(found: Imported, native: str, ours: str, item: Any, note: str = "") -> Any:
    if ours not in _mentioned(found):
        found.keep(native, {ours: item}, f"DeepSpeed's default: {item}{note}")
    return item


def _mentioned(found: Imported) -> set[str]:
    return {key for line in found.lines for key in line.ours}


def _set(found: Imported, ours: str) -> Any:
    return flatten(found.tree).get(ours)


def _as_integer(item: Any) -> Any:
    """`5e8` is an integer, as DeepSpeed takes it."""
    return int(item) if isinstance(item, float) and item.is_integer() else item


def _current(key: str, item: Any) -> tuple[str, Any]:
    """The name that DeepSpeed has for a key today, and the value under it."""
    if key in _REPLACED and isinstance(item, bool):
        name, values = _REPLACED[key]
        return name, values[item]
    if key.startswith(_NESTED_AIO):
        return key.removeprefix(f"{_ZERO}."), item
    section, dot, rest = key.partition(".")
    return (f"bf16{dot}{rest}" if section == "bfloat16" else _RENAMED.get(key, key)), item


def _carry(found: Imported, flat: Native, key: str, item: Any) -> None:
    """Adds the one line of a key."""
    section = key.partition(".")[0]
    ours = _OURS.get(key, "")
    if item in (None, {}, []):
        found.carry(key, item, {}, "says nothing")
    elif key.startswith(_PIPELINE):
        _carry_pipeline(found, key, item)
    elif item == "auto":
        found.lines.append(ImportLine(key, item, "carried", (ours,) if ours else (), _auto(ours)))
    elif section == "optimizer":
        carry_optimizer(found, flat, key, item)
    elif section == "scheduler":
        carry_scheduler(found, flat, key, item)
    elif section in _DTYPE_SECTIONS and key != section:
        _carry_dtype_section(found, flat, key, item)
    elif key.startswith(_LAYERS):
        _carry_auto_tp(found, key, item)
    elif ours.startswith("zero."):
        _carry_zero(found, flat, key, item)
    elif ours.endswith(("_dtype", "_data_type")):
        found.carry(key, item, {ours: _DTYPES.get(str(item).lower(), item)})
    elif ours:
        found.carry(key, item, {ours: item})
    else:
        _carry_raw(found, key, item)


def _auto(ours: str) -> str:
    if not ours:
        return "Hugging Face fills it in; left out here"
    usual = default(ours)
    if usual is None:
        return f"derived here until you set {ours}"
    return f"Hugging Face fills it in from its arguments; here it is {usual} until you set {ours}"


def _carry_raw(found: Imported, key: str, item: Any) -> None:
    """A key without a unified key: what happens here anyway, a raw key of DeepSpeed, or dropped."""
    if key in _ANYWAY:
        here, note = _ANYWAY[key]
        found.carry(key, item, {}, note, changed=item != here)
        return
    if key == "wall_clock_breakdown" and not item:
        found.carry(key, item, {}, "ds_trainer switches it off too")
        return
    tree: dict[str, Any] = {}
    assign(tree, key, item)
    if error := next(check_native(tree), None):
        found.drop(key, item, f"{error.rule}; {error.change}")
    else:
        found.carry(key, item, {f"native.deepspeed.{key}": item}, "passed to DeepSpeed as it is")


def _carry_auto_tp(found: Imported, key: str, item: Any) -> None:
    name = key.removeprefix(_LAYERS)
    if name == "autotp_size":
        is_off = item in (0, 1)
        found.carry(key, item, {} if is_off else {"parallel.tp": item}, "off here too" if is_off else _BY_PLAN)
    elif name in _AUTO_TP:
        here, note = _AUTO_TP[name]
        found.carry(key, item, {}, note, changed=item != here)
    else:
        found.drop(key, item, _AUTO_TP_GONE.get(name.partition(".")[0], _BY_PLAN))


def _carry_pipeline(found: Imported, key: str, item: Any) -> None:
    match key.removeprefix(_PIPELINE):
        case "stages" if type(item) is int:
            note = "DeepSpeed itself goes by its PipelineModule's num_stages"
            found.carry(key, item, {} if item == 1 else {"parallel.pp": item}, note)
        case "stages":
            found.carry(key, item, {}, "DeepSpeed goes by its PipelineModule's num_stages; set parallel.pp to that")
        case "partition":
            note = "stages are balanced by what their layers cost; parallel.pp_split assigns them otherwise"
            found.carry(key, item, {}, note, changed=item != "best")
        case "activation_checkpoint_interval" if item:
            note = "" if item == 1 else "each layer is recomputed by itself"
            found.carry(key, item, {"model.gradient_checkpointing": True}, note, changed=bool(note))
        case "activation_checkpoint_interval":
            found.carry(key, item, {}, "off here too")
        case name:
            found.drop(key, item, _PIPELINE_GONE.get(name, "DeepSpeed does not read it: nothing is lost"))


def _carry_dtype_section(found: Imported, flat: Native, key: str, item: Any) -> None:
    section, _, name = key.partition(".")
    state = flat.get(f"{section}.enabled", False)
    if not state:
        found.carry(key, item, {}, f"{section} is off")
    elif name == "enabled":
        _carry_enabled(found, flat, key, item)
    elif section == "torch_autocast" and name == "dtype":
        found.carry(key, item, {"precision.dtype": _DTYPES.get(str(item), item)})
    elif section == "torch_autocast" and not _autocasts(flat):
        found.drop(key, item, "there is no autocast in this run; parameters are held in the 16-bit dtype")
    elif section == "amp":
        found.drop(key, item, "DeepSpeed no longer has Apex's AMP; there is nothing to do")
    elif key not in _OURS:
        _carry_raw(found, key, item)
    elif state == "auto" and item != default(_OURS[key]):
        found.drop(key, item, f"whether fp16 is on is open; if it is, set precision.dtype and {_OURS[key]}")
    else:
        is_open = state == "auto"
        found.carry(key, item, {} if is_open else {_OURS[key]: item}, "the default here too" if is_open else "")


def _carry_enabled(found: Imported, flat: Native, key: str, item: Any) -> None:
    section, stage = key.partition(".")[0], _stage(flat)
    note = ""
    if section == "amp":
        note = "DeepSpeed no longer has Apex's AMP; fp16 with fp32 master weights replaces it"
    elif section == "bf16" and stage == 0:
        note = "at stage 0 bf16 runs through torch.autocast over fp32 parameters, which stay fp32"
    elif section == "torch_autocast" and not _autocasts(flat):
        note = f"parameters are held in {_autocast_dtype(flat)}, over fp32 master weights"
    dtypes = {"bf16": "bf16", "torch_autocast": _autocast_dtype(flat)}
    found.carry(key, item, {"precision.dtype": dtypes.get(section, "fp16")}, note, changed=bool(note))


def _autocast_dtype(flat: Native) -> str:
    return _DTYPES.get(str(flat.get("torch_autocast.dtype")), "bf16")


def _autocasts(flat: Native) -> bool:
    """Whether a run here would use torch.autocast too."""
    return (_stage(flat), _autocast_dtype(flat)) == (0, "bf16")


def _carry_zero(found: Imported, flat: Native, key: str, item: Any) -> None:
    """A key of the `zero` section; one that DeepSpeed would not read in this run would be refused, and is left out."""
    ours = _OURS[key]
    section, dot, name = ours.removeprefix("zero.").partition(".")
    stage = _stage(flat)
    if section in STAGES and stage not in STAGES[section]:
        found.drop(key, item, f"DeepSpeed does not read it at stage {stage}: nothing is lost")
    elif section == "aio" and "nvme" not in (_device(flat, "offload_optimizer"), _device(flat, "offload_param")):
        found.drop(key, item, "DeepSpeed does not read it without nvme offload: nothing is lost")
    elif (section, item) == ("sub_group_size", 0):
        found.carry(key, item, {ours: 1}, "each parameter by itself, as 0 is")
    elif name == "device":
        device = _device(flat, section)
        note = "" if device == item else f"at stage {stage} DeepSpeed silently takes {device}"
        found.carry(key, item, {ours: device}, note, changed=bool(note))
    elif dot and section != "aio" and _device(flat, section) not in OFFLOAD_DEVICES[f"{section}.{name}"]:
        found.drop(key, item, f"DeepSpeed does not read it with device {_device(flat, section)}: nothing is lost")
    else:
        found.carry(key, item, {ours: item})


def _stage(flat: Native) -> int:
    stage = flat.get(f"{_ZERO}.stage")
    return stage if type(stage) is int else 0


def _device(flat: Native, section: str) -> str:
    """Where DeepSpeed really offloads to: it silently does less at stages that lack an offload."""
    device, stage = flat.get(f"{_ZERO}.{section}.device", "none"), _stage(flat)
    if device == "nvme" and stage not in OFFLOAD_STAGES[section, "nvme"]:
        device = "cpu"
    return "none" if device == "cpu" and stage not in OFFLOAD_STAGES[section, "cpu"] else device
