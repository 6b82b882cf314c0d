"""A resolved config as a Python file that makes accelerate's plugin objects. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pprint import pformat
from textwrap import indent
from typing import Any

from ds_trainer.config.accelerate.arguments import accelerate_arguments
from ds_trainer.config.deepspeed.arguments import gathering_on_save
from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.config.torch.arguments import fsdp2_arguments
from ds_trainer.interop.accelerate.notes import python_notes, script_notes

_TORCH_DTYPES = {None: "None", "fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
_WIDTH = 100


def accelerate_snippet(resolved: ResolvedConfig) -> str:
    """A file whose `make_accelerator()` returns the `Accelerator` of the run."""
    arguments = accelerate_arguments(resolved)
    options = {name: repr(item) for name, item in arguments.accelerator.items()}
    imports, handlers, native = ["from accelerate import Accelerator"], [], ""
    if arguments.deepspeed is not None:
        imports.append("from accelerate.utils import DeepSpeedPlugin")
        saving = gathering_on_save(arguments.deepspeed["hf_ds_config"])
        native = f"DEEPSPEED = {pformat(saving, width=_WIDTH, sort_dicts=False)}\n\n\n"
        plugin = _literals(arguments.deepspeed) | {"hf_ds_config": "DEEPSPEED"}
        options["deepspeed_plugin"] = _call("DeepSpeedPlugin", plugin)
    if arguments.fsdp is not None:
        imports = [
            "import torch",
            *imports,
            "from accelerate.utils import FullyShardedDataParallelPlugin, GradScalerKwargs, ParallelismConfig",
            "from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy",
        ]
        plugin = _literals(arguments.fsdp) | _policies(resolved)
        options["fsdp_plugin"] = _call("FullyShardedDataParallelPlugin", plugin)
    if arguments.parallelism is not None:
        options["parallelism_config"] = _call("ParallelismConfig", _literals(arguments.parallelism))
    if arguments.ddp is not None:
        names = "DDPCommunicationHookType, DistributedDataParallelKwargs, GradScalerKwargs"
        imports.append(f"from accelerate.utils import {names}")
        handlers.append(_call("DistributedDataParallelKwargs", _literals(arguments.ddp) | _comm_hook(arguments.ddp)))
    if arguments.scaler is not None:
        handlers.append(_call("GradScalerKwargs", _literals(arguments.scaler)))
    if handlers:
        options["kwargs_handlers"] = f"[{_lines(handlers)}]"
    made = indent(f"return {_call('Accelerator', options)}", "    ")
    notes = "".join(
        f"# {note}\n"
        for note in ("prepare(model, optimizer), in one call", *python_notes(resolved), *script_notes(resolved))
    )
    return "\n".join(imports) + f"\n\n\n{native}def make_accelerator():\n{made}\n\n\n{notes}"


def _policies(resolved: ResolvedConfig) -> dict[str, str]:
    arguments = fsdp2_arguments(resolved)
    names = {"param_dtype": arguments.param_dtype, "reduce_dtype": arguments.reduce_dtype}
    dtypes = {name: _TORCH_DTYPES[dtype] for name, dtype in names.items()}
    policies = {"mixed_precision_policy": _call("MixedPrecisionPolicy", dtypes)}
    if arguments.cpu_offload:
        policies["cpu_offload"] = _call("CPUOffloadPolicy", {"pin_memory": repr(arguments.pin_memory)})
    return policies


def _comm_hook(ddp: Mapping[str, Any]) -> dict[str, str]:
    """The hook as an enum: accelerate ignores a string."""
    return {"comm_hook": f"DDPCommunicationHookType({ddp['comm_hook']!r})"} if "comm_hook" in ddp else {}


def _literals(options: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(item) for name, item in options.items()}


def _call(name: str, options: Mapping[str, str]) -> str:
    """Source of a call, on one line where it fits."""
    given = [f"{option}={source}" for option, source in options.items()]
    line = f"{name}({', '.join(given)})"
    if len(line) <= _WIDTH and "\n" not in line:
        return line
    return f"{name}({_lines(given)})"


def _lines(sources: list[str]) -> str:
    """Elements of a call or list, each on a line of its own."""
    return "\n" + indent("".join(f"{source},\n" for source in sources), "    ")
