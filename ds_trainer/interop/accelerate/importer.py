"""The unified JSON that an accelerate YAML means. Pure.

An FSDP1 section is carried to FSDP2, key by key as `accelerate to-fsdp2` does. What the YAML leaves out keeps
accelerate's meaning, not ours.

Source: accelerate 1.15, commands/launch.py, commands/config/config_args.py and utils/dataclasses.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_trainer.config.foreign_files import load_foreign_config
from ds_trainer.config.keys import assign, flatten
from ds_trainer.errors import ConfigError
from ds_trainer.interop.accelerate.enums import check_enum_values
from ds_trainer.interop.accelerate.import_fsdp import (
    carry_fsdp,
    carry_parallelism,
    fsdp_engine,
    keep_fsdp_defaults,
)
from ds_trainer.interop.deepspeed.importer import keep_defaults, read_deepspeed
from ds_trainer.interop.import_result import LAUNCHERS, Imported, ImportLine

_TPU = "for TPUs and clouds, on which ds_trainer does not run; there is nothing to do"
_LAUNCH_KEYS = {
    **dict.fromkeys(
        (
            "enable_cpu_affinity",
            "gpu_ids",
            "machine_rank",
            "main_process_ip",
            "main_process_port",
            "num_machines",
            "num_processes",
            "rdzv_backend",
            "same_network",
            "deepspeed_exclusion_filter",
            "deepspeed_hostfile",
            "deepspeed_inclusion_filter",
            "deepspeed_multinode_launcher",
        ),
        LAUNCHERS,
    ),
    **dict.fromkeys(
        (
            "command_file",
            "commands",
            "downcast_bf16",
            "tpu_cluster",
            "tpu_env",
            "tpu_name",
            "tpu_use_cluster",
            "tpu_use_sudo",
            "tpu_vm",
            "tpu_zone",
        ),
        _TPU,
    ),
}
"""Key by its last part -> why it has no place in a run's JSON."""

_OWN = {
    "compute_environment": ("LOCAL_MACHINE", "accelerate's own; ds_trainer runs where it is started"),
    "debug": (False, "accelerate's own, a check of what ranks send; there is nothing to set"),
    "main_training_function": ("main", "accelerate's own, for notebooks; ds-trainer train or Trainer.train runs"),
}
"""Key -> the value without effect, and what the key is about."""

_NOT_HERE = {
    "fp8_config": "there is no fp8 here; precision.dtype is bf16 at the least",
    "ipex_config": "ds_trainer runs on a CPU with torch alone",
    "mpirun_config": LAUNCHERS,
}
"""Section -> why it is dropped."""

_ENGINES = {"DEEPSPEED": "deepspeed", "FSDP": "fsdp2", "MULTI_CPU": "ddp", "MULTI_GPU": "ddp", "NO": "ddp"}
_SECTION_OF = {
    "deepspeed_config": "DEEPSPEED",
    "fsdp_config": "FSDP",
    "megatron_lm_config": "MEGATRON_LM",
    "parallelism_config": "FSDP",
}
"""Section -> the distributed_type that reads it."""

_INLINE = {
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
}
"""Key of `deepspeed_config` -> DeepSpeed's own."""


def from_accelerate(native: Mapping[str, Any], path: Path) -> Imported:
    """The unified JSON of an accelerate YAML, with a line for each of its keys.

    Args:
        native: The YAML's content.
        path: The YAML: `deepspeed_config_file` is looked for beside it, then in the working directory.

    Raises:
        ConfigError: It has no `distributed_type`, a value that accelerate does not accept, or a `deepspeed_config_file`
            that cannot be read.
    """
    native = _switches(native)
    _check_sections(native)
    check_enum_values(native)
    kind, found = _kind(native), Imported()
    if engine := _engine(native, kind):
        assign(found.tree, "parallel.engine", engine)
    flat = flatten(native)
    if kind == "DEEPSPEED":
        # Its file decides the dtype first: accelerate fills in only what that file leaves open.
        _carry_deepspeed(found, flatten(native.get("deepspeed_config") or {}), path)
        flat = {key: item for key, item in flat.items() if not key.startswith("deepspeed_config.")}
    for key, item in flat.items():
        _carry(found, native, kind, key, item)
    if engine == "deepspeed":
        keep_defaults(found)
    elif "precision.dtype" not in flatten(found.tree):
        found.keep("mixed_precision", {"precision.dtype": "fp32"}, "accelerate's default: no")
    if engine == "fsdp2":
        keep_fsdp_defaults(found, native)
    return found


def _check_sections(native: Mapping[str, Any]) -> None:
    for name, item in native.items():
        if name.endswith("_config") and item is not None and not isinstance(item, Mapping):
            raise ConfigError(f"{name} is {item!r}", f"{name} is a section of keys", f"write the keys below {name}")


def _kind(native: Mapping[str, Any]) -> str:
    if "distributed_type" not in native:
        raise ConfigError(
            "an accelerate config without distributed_type",
            "accelerate needs it to know what runs the step",
            f"set distributed_type to one of {', '.join(_ENGINES)}",
        )
    return _text(native["distributed_type"]).upper()


def _engine(native: Mapping[str, Any], kind: str) -> str | None:
    if kind == "FSDP":
        return fsdp_engine(native)
    return _ENGINES.get(kind, "ddp" if kind.startswith("MULTI_") else None)


def _text(item: Any) -> str:
    """The text of the file: YAML reads an unquoted `NO` as false."""
    return "no" if item is False else str(item)


def _switches(node: Any) -> Any:
    """The tree with quoted booleans as booleans, as accelerate reads them."""
    if isinstance(node, Mapping):
        return {str(name): _switches(item) for name, item in node.items()}
    return {"true": True, "false": False}.get(node.lower(), node) if isinstance(node, str) else node


def _carry(found: Imported, native: Mapping[str, Any], kind: str, key: str, item: Any) -> None:
    """Adds the one line of a key outside `deepspeed_config`."""
    section, _, name = key.partition(".")
    if item in (None, {}, []):
        found.carry(key, item, {}, "says nothing")
    elif section in _SECTION_OF and kind != _SECTION_OF[section]:
        found.drop(key, item, f"accelerate does not read it with distributed_type {kind}: nothing is lost")
    elif section in _LAUNCH_KEYS and _LAUNCH_KEYS[section] == _TPU and item in (False, "no"):
        found.carry(key, item, {}, "off; for TPUs and clouds")
    elif section in _NOT_HERE or section in _LAUNCH_KEYS:
        found.drop(key, item, _NOT_HERE.get(section) or _LAUNCH_KEYS[section])
    elif section == "fsdp_config":
        carry_fsdp(found, native, key, item)
    elif section == "parallelism_config":
        carry_parallelism(found, key, item)
    elif section == "megatron_lm_config":
        _carry_megatron(found, native, key, item)
    elif section in ("dynamo_config", "dynamo_backend"):
        _carry_dynamo(found, native, key, item)
    else:
        _carry_top(found, kind, key, item)


def _carry_top(found: Imported, kind: str, key: str, item: Any) -> None:
    match key:
        case "distributed_type":
            _carry_kind(found, kind, item)
        case "mixed_precision":
            _carry_mixed_precision(found, item)
        case "fp16":
            _carry_mixed_precision(found, "fp16" if item else "no", key)
        case "use_cpu":
            found.carry(
                key,
                item,
                {"run.device": "cpu"} if item else {},
                "" if item else "run.device is the GPU wherever there is one",
            )
        case "gradient_accumulation_steps":
            found.carry(key, item, {"batch.accumulation": item})
        case "gradient_clipping":
            found.carry(key, item, {"optimizer.max_grad_norm": item})
        case "compute_environment" | "debug" | "main_training_function":
            usual, note = _OWN[key]
            if item == usual:
                found.carry(key, item, {}, note)
            else:
                found.drop(key, item, note)
        case _:
            found.drop(key, item, "ds_trainer has no key for it; there is nothing to set")


def _carry_kind(found: Imported, kind: str, item: Any) -> None:
    key = "distributed_type"
    if kind == "MULTI_CPU":
        found.carry(key, item, {"parallel.engine": "ddp", "run.device": "cpu"})
    elif kind in _ENGINES:
        engine = found.tree["parallel"]["engine"]
        found.carry(
            key, item, {"parallel.engine": engine}, "runs without accelerate; parallel.engine accelerate keeps it"
        )
    elif kind.startswith("MULTI_"):
        found.carry(key, item, {"parallel.engine": "ddp"}, "ds_trainer runs on CPU and CUDA devices", changed=True)
    else:
        found.drop(
            key, item, "no engine of ds_trainer corresponds to it; set parallel.engine, which is deepspeed until you do"
        )


def _carry_megatron(found: Imported, native: Mapping[str, Any], key: str, item: Any) -> None:
    """Adds the line of a Megatron-LM setting; some exist on the engines here as well."""
    section = native["megatron_lm_config"]
    is_sharded = section.get("megatron_lm_tp_degree", 1) != 1
    has_stages = section.get("megatron_lm_pp_degree", 1) != 1
    match key.rpartition(".")[2].removeprefix("megatron_lm_"):
        case "tp_degree":
            found.carry(key, item, {"parallel.tp": item}, "ds_trainer shards the layers, on the engine itself")
        case "sequence_parallelism":
            note = "" if is_sharded else "there is nothing to shard at megatron_lm_tp_degree 1"
            found.carry(key, item, {"parallel.sequence_parallel": item} if is_sharded else {}, note)
        case "pp_degree":
            note = "ds_trainer runs the stages, on the engine itself" if has_stages else "there is none here either"
            found.carry(key, item, {"parallel.pp": item} if has_stages else {}, note)
        case "num_micro_batches":
            found.carry(key, item, {"batch.accumulation": item})
        case "num_layers_per_virtual_pipeline_stage":
            stages = "the number of layers / (this number x parallel.pp)"
            found.drop(key, item, f"set parallel.schedule to interleaved_1f1b and parallel.virtual_stages to {stages}")
        case "decoder_last_pipeline_num_layers":
            found.drop(key, item, "stages are balanced by what their layers cost; parallel.pp_split assigns them")
        case _:
            found.drop(key, item, "Megatron-LM is no engine of ds_trainer; set parallel.engine")


def _carry_mixed_precision(found: Imported, item: Any, key: str = "mixed_precision") -> None:
    text = _text(item).lower()
    if text == "no":
        is_set = any("precision.dtype" in line.ours for line in found.lines)
        note = "the DeepSpeed JSON sets the dtype" if is_set else ""
        found.carry(key, item, {} if is_set else {"precision.dtype": "fp32"}, note)
    elif text == "fp8":
        found.carry(key, item, {"precision.dtype": "bf16"}, "there is no fp8 here: bf16 is used", changed=True)
    else:
        found.carry(key, item, {"precision.dtype": text})


def _carry_dynamo(found: Imported, native: Mapping[str, Any], key: str, item: Any) -> None:
    section = {name.removeprefix("dynamo_"): value for name, value in (native.get("dynamo_config") or {}).items()}
    backend = _text(section.get("backend", native.get("dynamo_backend", False))).upper()
    name = key.rpartition(".")[2].removeprefix("dynamo_")
    if backend == "NO":
        found.carry(key, item, {}, "nothing is compiled")
    elif name == "backend":
        note = "" if backend == "INDUCTOR" else "torch.compile's own backend, inductor, is used"
        found.carry(key, item, {"model.compile": True}, note, changed=bool(note))
    elif name == "use_regional_compilation":
        found.carry(key, item, {}, "each block is compiled by itself", changed=not item)
    elif name == "mode" and item == "default" or name in ("use_fullgraph", "use_dynamic") and not item:
        found.carry(key, item, {}, "as torch.compile does by itself")
    else:
        found.drop(key, item, "blocks are compiled with torch.compile's own settings; there is no key for it")


def _carry_deepspeed(found: Imported, section: Mapping[str, Any], path: Path) -> None:
    """Lines of `deepspeed_config`, by the tables of a DeepSpeed JSON."""
    inline = {_INLINE[name]: item for name, item in section.items() if name in _INLINE and item is not None}
    file, stage = section.get("deepspeed_config_file"), _INLINE["zero_stage"]
    native: dict[str, Any] = {}
    for key, item in inline.items():
        assign(native, key, item)
    if file is None and stage not in inline:
        assign(native, stage, 2)
    names = {native_key: f"deepspeed_config.{name}" for name, native_key in _INLINE.items()}
    for line in _take(found, read_deepspeed(native)):
        if line.key not in inline:
            line = replace(line, value=None, note="accelerate's default: 2")
        found.lines.append(replace(line, key=names[line.key]))
    for name, item in section.items():
        if _INLINE.get(name) not in inline and not (name == "zero_stage" and file is None):
            _carry_deepspeed_other(found, f"deepspeed_config.{name}", name, item)
    if file is not None:
        native_file = _named_file(path, str(file))
        found.lines += _take(found, read_deepspeed(load_foreign_config(native_file), native_file.name))


def _named_file(path: Path, name: str) -> Path:
    """The DeepSpeed JSON that a YAML names."""
    beside = path.parent / name
    if not beside.exists() and not Path(name).exists():
        raise ConfigError(
            f"{path} names {name} as deepspeed_config.deepspeed_config_file, and there is no file {beside.absolute()}",
            "the file that an accelerate config names is looked for beside it, then in the working directory",
            f"correct deepspeed_config_file in {path}, or put the file there",
        )
    return beside if beside.exists() else Path(name)


def _carry_deepspeed_other(found: Imported, key: str, name: str, item: Any) -> None:
    if item is None:
        found.carry(key, item, {}, "says nothing")
    elif name in _LAUNCH_KEYS:
        found.drop(key, item, _LAUNCH_KEYS[name])
    elif name == "deepspeed_config_file":
        found.carry(key, item, {}, "its keys follow")
    elif name == "zero3_init_flag":
        found.carry(key, item, {}, "each rank always loads only what it keeps", changed=not item)
    else:
        found.drop(key, item, "ds_trainer has no key for it; there is nothing to set")


def _take(found: Imported, other: Imported) -> list[ImportLine]:
    """Adds another import's keys to the tree, and returns its lines."""
    for key, item in flatten(other.tree).items():
        assign(found.tree, key, item)
    return other.lines
