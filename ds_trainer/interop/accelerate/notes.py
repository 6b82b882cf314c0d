"""Settings of a run that accelerate cannot express, one line each. Pure.

accelerate's file is about launching and wrapping a model; the rest belongs to the script that it starts.
"""

from __future__ import annotations

from ds_trainer.config.backend import backend
from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.config.torch.arguments import fsdp2_arguments

_ON_CPU = {
    "deepspeed": "on CPU accelerate takes each rank of DeepSpeed for the only one: feed each its own data",
    "fsdp2": "on CPU accelerate ignores its FSDP plugin: use this on GPUs",
    "ddp": "accelerate launch starts one process for MULTI_CPU unless it finds mpirun: start the ranks with torchrun",
}


def accelerate_notes(resolved: ResolvedConfig) -> list[str]:
    """Settings that accelerate's YAML cannot express."""
    return script_notes(resolved) + _file_notes(resolved)


def script_notes(resolved: ResolvedConfig) -> list[str]:
    """Settings that neither the file nor the plugins can express: the script does them, or they are lost."""
    config, on = resolved.config, backend(resolved.config)
    notes = [
        f"batch.micro_size {config.batch.micro_size}, optimizer, schedule, data and seed are the script's",
        "accelerate averages the losses of ranks and micro-batches; ds_trainer divides by all label tokens of a step",
    ]
    if on != "deepspeed" and config.optimizer.max_grad_norm:
        clip = f"optimizer.max_grad_norm {config.optimizer.max_grad_norm:g} ({config.optimizer.norm_type})"
        notes.append(f"{clip}: call accelerator.clip_grad_norm_ in the script")
    if config.model.gradient_checkpointing == "selective":
        notes.append("model.gradient_checkpointing selective: transformers recomputes all of a block")
    elif config.model.gradient_checkpointing:
        notes.append("model.gradient_checkpointing: call model.gradient_checkpointing_enable() in the script")
    if config.loss.chunk_tokens:
        notes.append("loss.chunk_tokens: the script computes all logits at once")
    if on == "fsdp2":
        notes.append("accelerate keeps the final norm and the head gathered, whatever reshard_after_forward says")
        if type(reshard := config.fsdp.reshard_after_forward) is int:
            notes.append(f"fsdp.reshard_after_forward {reshard}: accelerate takes true or false; written as true")
        lost = {name: getattr(config.fsdp, name) for name in ("buffer_dtype", "prefetch_depth")}
        notes += [f"fsdp.{name} {item}: accelerate has nothing like it" for name, item in lost.items() if item]
    if config.run.device == "cpu":
        notes.append(_ON_CPU[on])
    return notes


def python_notes(resolved: ResolvedConfig) -> list[str]:
    """Surprising arguments of the plugins."""
    config, on = resolved.config, backend(resolved.config)
    if on == "deepspeed" and config.precision.dtype != "fp32":
        return [f"mixed_precision is 'no' because DEEPSPEED itself says {config.precision.dtype}"]
    if on == "fsdp2":
        return [
            "cpu_ram_efficient_loading=True, with the model loaded after make_accelerator(), loads on one rank of each "
            "machine alone; else every rank holds all weights in host memory until prepare"
        ]
    return []


def _file_notes(resolved: ResolvedConfig) -> list[str]:
    """Settings that only the plugins in Python can express."""
    config, on = resolved.config, backend(resolved.config)
    launch = (
        f"num_processes {resolved.machine.world} on num_machines 1: num_machines, machine_rank and main_process_ip are "
        "the launcher's; set them in each machine's file, or give them to accelerate launch"
    )
    start = [launch] if resolved.machine.world > 1 else []
    if on == "deepspeed":
        return [
            *start,
            "zero.*, beyond stage and offload devices: use the Python, or write a DeepSpeed JSON (ds-trainer config "
            "translate --to deepspeed) and name it as deepspeed_config_file",
        ]
    accumulation = f"batch.accumulation {config.batch.accumulation}"
    notes = [*start, f"{accumulation}: accelerate launch does not pass it on; use the Python"]
    if on == "ddp":
        notes.append("ddp.*: use the Python, which makes DistributedDataParallelKwargs")
        return notes
    arguments = fsdp2_arguments(resolved)
    if arguments.reduce_dtype != (arguments.param_dtype or "fp32"):
        dtypes = f"{arguments.param_dtype}, and not in {arguments.reduce_dtype}"
        notes.append(f"precision.communication_data_type: the file alone reduces in {dtypes}; use the Python")
    if arguments.cpu_offload and not arguments.pin_memory:
        notes.append("fsdp.pin_memory false: the file alone pins the memory; use the Python")
    return notes
