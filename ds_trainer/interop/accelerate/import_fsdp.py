"""The `fsdp_config` and `parallelism_config` of an accelerate YAML, FSDP1 and FSDP2, in unified keys. Pure.

Source: accelerate 1.15, commands/to_fsdp2.py and `FullyShardedDataParallelPlugin` in utils/dataclasses.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_trainer.config.keys import flatten
from ds_trainer.interop.accelerate.enums import STRATEGIES, check_fsdp_enum_values
from ds_trainer.interop.import_result import Imported

_KEEPS_GATHERED = ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
_HYBRID = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")

_ONLY_FSDP2 = "FSDP2 takes the place of FSDP1, and shards the same"
_GONE = {
    "backward_prefetch": "FSDP2 gathers the next block ahead by itself; see fsdp.prefetch_depth",
    "use_orig_params": "FSDP2 always keeps the model's own parameters; there is nothing to do",
    "sync_module_states": "each rank reads its own slices, so that there is nothing to send; there is nothing to do",
    "state_dict_type": "ds_trainer writes sharded checkpoints, and full weights at the end: checkpoint.export",
    "ignored_modules": "fsdp2 shards every parameter; there is no key for it",
}
"""Key -> why no key here corresponds to it."""


def fsdp_engine(native: Mapping[str, Any]) -> str:
    """What runs an FSDP config: FSDP1's NO_SHARD is DDP.

    Raises:
        ConfigErrors: It has values that FSDP does not accept.
    """
    check_fsdp_enum_values(_section(native), is_fsdp2=_version(_section(native)) == 2)
    return "ddp" if _strategy(_section(native)) == "NO_SHARD" else "fsdp2"


def carry_fsdp(found: Imported, native: Mapping[str, Any], key: str, item: Any) -> None:
    """Adds the line of a key of `fsdp_config`.

    Args:
        found: The import.
        native: The whole YAML.
        key: The dotted key.
        item: Its value.
    """
    section, name = _section(native), _short(key)
    if name == "activation_checkpointing":
        found.carry(key, item, {"model.gradient_checkpointing": item})
    elif name in ("sharding_strategy", "reshard_after_forward"):
        _carry_strategy(found, native, key, item)
    elif _strategy(section) == "NO_SHARD":
        found.drop(key, item, "NO_SHARD is ddp, which shards nothing: nothing is lost")
    elif name == "version":
        is_fsdp2 = _version(section) == 2
        found.carry(key, item, {}, "fsdp2 is FSDP2" if is_fsdp2 else _ONLY_FSDP2, changed=not is_fsdp2)
    elif name == "offload_params":
        found.carry(key, item, {"fsdp.cpu_offload": item})
    elif name == "cpu_ram_efficient_loading":
        found.carry(key, item, {}, "each rank always reads only its own slices", changed=item is False)
    elif name in _GONE:
        found.drop(key, item, _GONE[name])
    elif name in ("forward_prefetch", "activation_checkpointing_offload"):
        _carry_switch(found, section, key, item)
    else:
        _carry_wrapping(found, section, key, item)


def carry_parallelism(found: Imported, key: str, item: Any) -> None:
    """Adds the line of a key of `parallelism_config`; arguments as in `carry_fsdp`."""
    name = key.rpartition(".")[2].removeprefix("parallelism_config_")
    ours = {"dp_replicate_size": "parallel.dp_replicate", "dp_shard_size": "parallel.dp_shard"}
    if name in ours:
        found.carry(key, item, {ours[name]: item})
    elif name.endswith("_size") and item == 1:
        found.carry(key, item, {}, "there is none here either")
    elif name == "tp_size":
        found.carry(key, item, {"parallel.tp": item}, "ds_trainer shards the layers, on the engine itself")
    else:
        found.drop(key, item, "sequences are not sharded over ranks here; add these ranks to parallel.dp_shard")


def keep_fsdp_defaults(found: Imported, native: Mapping[str, Any]) -> None:
    """Sets accelerate's defaults of what the section leaves out, where ours differ."""
    if "version" not in _section(native):
        found.keep("fsdp_config.fsdp_version", {}, f"accelerate's default: 1; {_ONLY_FSDP2}", changed=True)
    if "auto_wrap_policy" not in _section(native):
        note = "accelerate's default; remove it to gather block by block"
        found.keep("fsdp_config.fsdp_auto_wrap_policy", {"fsdp.auto_wrap_policy": "no_wrap"}, note)
    dtype = flatten(found.tree)["precision.dtype"]
    if dtype != "fp32":
        note = f"accelerate reduces gradients in {dtype} too; remove precision.grad_dtype for fp32"
        found.keep("mixed_precision (gradients)", {"precision.grad_dtype": dtype}, note)


def _section(native: Mapping[str, Any]) -> dict[str, Any]:
    return {_short(name): item for name, item in (native.get("fsdp_config") or {}).items() if item is not None}


def _short(key: str) -> str:
    return key.rpartition(".")[2].removeprefix("fsdp_")


def _version(section: Mapping[str, Any]) -> int:
    return 2 if str(section.get("version")) == "2" else 1


def _strategy(section: Mapping[str, Any]) -> str | None:
    """FSDP1's sharding strategy; None for an FSDP2 section, which has a switch instead."""
    if _version(section) == 2:
        return None
    strategy = str(section.get("sharding_strategy", section.get("reshard_after_forward", "FULL_SHARD"))).upper()
    return dict(zip("12345", STRATEGIES, strict=True)).get(strategy, strategy)


def _carry_strategy(found: Imported, native: Mapping[str, Any], key: str, item: Any) -> None:
    section = _section(native)
    strategy, machines = _strategy(section), native.get("num_machines") or 1
    if _short(key) == ("sharding_strategy" if strategy is None else "reshard_after_forward") and (
        strategy is None or "sharding_strategy" in section
    ):
        found.drop(key, item, f"FSDP{_version(section)} does not read it: nothing is lost")
    elif strategy is None:
        found.carry(key, item, {"fsdp.reshard_after_forward": item})
    elif strategy == "NO_SHARD":
        note = "DDP, whose mixed precision is torch.autocast over fp32 parameters"
        found.carry(key, item, {"parallel.engine": "ddp"}, note, changed=True)
    else:
        ours: dict[str, Any] = {"fsdp.reshard_after_forward": strategy not in _KEEPS_GATHERED}
        note = ""
        if strategy in _HYBRID:
            ours["parallel.dp_replicate"] = machines
            note = f"one replica of the model on each machine: num_machines is {machines}"
        found.carry(key, item, ours, note)


def _carry_switch(found: Imported, section: Mapping[str, Any], key: str, item: Any) -> None:
    if not item:
        found.carry(key, item, {}, "off here too")
    elif _short(key) == "forward_prefetch" and _policy(section) != "no_wrap":
        found.carry(
            key, item, {"fsdp.prefetch_depth": 1}, "gathers one block ahead in the backward pass too", changed=True
        )
    elif _short(key) == "forward_prefetch":
        found.drop(key, item, "nothing is gathered ahead where all is gathered at once: nothing is lost")
    else:
        found.drop(key, item, "activations are recomputed, and not moved to the host; there is no key for it")


def _policy(section: Mapping[str, Any]) -> str:
    return str(section.get("auto_wrap_policy", "NO_WRAP")).lower()


def _carry_wrapping(found: Imported, section: Mapping[str, Any], key: str, item: Any) -> None:
    name, policy = _short(key), _policy(section)
    readers = {"transformer_layer_cls_to_wrap": "transformer_based_wrap", "min_num_params": "size_based_wrap"}
    if name == "auto_wrap_policy":
        found.carry(key, item, {"fsdp.auto_wrap_policy": policy})
    elif name not in readers:
        found.drop(key, item, "ds_trainer has no key for it; there is nothing to set")
    elif policy != readers[name]:
        found.drop(key, item, f"accelerate does not read it with {policy.upper()}: nothing is lost")
    elif name == "transformer_layer_cls_to_wrap":
        classes = [name.strip() for name in item.split(",")] if isinstance(item, str) else item
        found.carry(key, item, {"fsdp.transformer_layer_cls_to_wrap": classes})
    else:
        found.carry(key, item, {"fsdp.min_num_params": int(item) if str(item).isdecimal() else item})
