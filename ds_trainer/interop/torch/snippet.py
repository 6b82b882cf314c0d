"""A resolved config as a Python file for a user's own training loop on torch's FSDP2 or DDP. Pure.

It has `wrap(model)`, for a transformers model. Comments say what the loop must do to give the same losses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.config.schema import RunConfig
from ds_trainer.config.torch.arguments import ddp_arguments, fsdp2_arguments

_DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
_LOOP = """
# A step: {steps}
# Its loss: the sum of the token losses divided by the label tokens of all ranks and micro-batches; {reduction}.
# Before the update: clip the global norm to {clip}."""


def fsdp2_snippet(resolved: ResolvedConfig) -> str:
    """A file whose `wrap(model)` shards as the fsdp2 engine does."""
    config, arguments = resolved.config, fsdp2_arguments(resolved)
    axes = _model_axes(config, arguments.mesh)
    mesh = _mesh(config, axes)
    data_axes = f"[{_tuple(arguments.mesh)}]" if axes != arguments.mesh else ""
    policy = f"param_dtype={_dtype(arguments.param_dtype)}, reduce_dtype={_dtype(arguments.reduce_dtype)}"
    offload = f"CPUOffloadPolicy(pin_memory={arguments.pin_memory})" if arguments.cpu_offload else "OffloadPolicy()"
    reshard = arguments.reshard_after_forward
    lines = [
        "import torch",
        "from torch.distributed.device_mesh import init_device_mesh",
        "from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard",
        "",
        *_model_parallel_comments(config),
        "",
        "def wrap(model):",
        '    """Shards a model with fp32 parameters, block by block, then the rest."""',
        f"    mesh = {mesh}{data_axes}",
        "    options = {",
        '        "mesh": mesh,',
        f'        "mp_policy": MixedPrecisionPolicy({policy}),',
        f'        "offload_policy": {offload},',
        "    }",
        *_sharded(config.fsdp, reshard),
        *_buffers(arguments.buffer_dtype),
        "    return model",
        "",
        *_scaler(resolved),
        _loop(resolved, "it adds up over ranks"),
        "# model.set_requires_gradient_sync(is_last_microbatch) before each forward.",
    ]
    return "\n".join(lines) + "\n"


def ddp_snippet(resolved: ResolvedConfig) -> str:
    """A file whose `wrap(model)` replicates as the ddp engine does."""
    config = resolved.config
    options = ", ".join(f"{name}={value!r}" for name, value in ddp_arguments(resolved).items())
    data, group = {"dp": resolved.dp_size}, []
    if (axes := _model_axes(config, data)) != data:
        mesh = _mesh(config, axes)
        group, options = [f'    group = {mesh}["dp"].get_group()'], f"{options}, process_group=group"
    lines = [
        "import torch",
        "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook",
        *(["from torch.distributed.device_mesh import init_device_mesh"] if group else []),
        "from torch.nn.parallel import DistributedDataParallel",
        "",
        *_model_parallel_comments(config),
        "",
        "def wrap(model):",
        '    """Replicates a model with fp32 parameters that is on its device."""',
        *group,
        f"    model = DistributedDataParallel(model, {options})",
        *_comm_hook(config.ddp),
        "    return model",
        "",
        *_scaler(resolved),
    ]
    if config.precision.dtype != "fp32":
        autocast = f"torch.autocast({config.run.device!r}, {_dtype(config.precision.dtype)})"
        lines.append(f"# Forward passes run under {autocast}.")
    lines += [
        _loop(resolved, "times the ranks, over which DDP averages"),
        "# All micro-batches but the last run under model.no_sync().",
    ]
    return "\n".join(lines) + "\n"


def _mesh(config: RunConfig, axes: Mapping[str, int]) -> str:
    """Source of a mesh with these axes, outermost first."""
    return f'init_device_mesh("{config.run.device}", {tuple(axes.values())}, mesh_dim_names={_tuple(axes)})'


def _tuple(names: Iterable[str]) -> str:
    return f"({', '.join(map(json.dumps, names))},)"


def _model_axes(config: RunConfig, data: Mapping[str, int]) -> dict[str, int]:
    """The data-parallel axes between those of pipeline and tensor parallelism."""
    pp, tp = config.parallel.pp, config.parallel.tp
    return ({"pp": pp} if pp > 1 else {}) | dict(data) | ({"tp": tp} if tp > 1 else {})


def _model_parallel_comments(config: RunConfig) -> list[str]:
    """Comments on tensor and pipeline parallelism, for which torch has no counterpart on a transformers model."""
    pp, tp = config.parallel.pp, config.parallel.tp
    lines = []
    if tp > 1:
        lines += [
            f"# Tensor parallelism is ds_trainer's own: pass a model whose layers are sharded over {tp} ranks, and",
            "# count each shard of a parameter once in the norm; tensor-parallel ranks get the same samples.",
        ]
    if pp > 1:
        lines += [
            f"# The pipeline is ds_trainer's own: pass a model that is one of {pp} stages, run the micro-batches",
            f"# through them in the order {config.parallel.schedule}, and take the norm over all of them.",
        ]
    return [*lines, ""] if lines else []


def _dtype(name: str | None) -> str:
    return "None" if name is None else _DTYPES[name]


def _sharded(fsdp: Any, reshard: bool | int) -> list[str]:
    """The calls of `fully_shard`, and what is set on each part of the model that has one."""
    has_parts = fsdp.auto_wrap_policy != "no_wrap"
    but_head = " if part is not model.get_output_embeddings() else False" if reshard else ""
    of_parts = [
        *_parts(fsdp),
        "    for part in reversed(parts):  # Inner ones first.",
        "        # The backward pass begins with the head, and needs the indices of the embeddings only.",
        f"        fully_shard(part, reshard_after_forward={reshard}{but_head}, **options)",
        "        if part is model.get_input_embeddings():",
        "            part.set_unshard_in_backward(False)",
        "    # The rest is needed first in the backward pass.",
    ]
    root = f"False if parts else {reshard}" if has_parts and reshard else f"{reshard}"
    return [
        *(of_parts if has_parts else []),
        f"    fully_shard(model, reshard_after_forward={root}, **options)",
        "    # Gradients are summed over the ranks; gloo has no scaled sum.",
        f"    for part in (model{', *parts' if has_parts else ','}):",
        "        part.set_force_sum_reduction_for_comms(True)",
        "        part.set_gradient_divide_factor(1.0)",
        *(_prefetch(fsdp.prefetch_depth) if has_parts else []),
    ]


def _parts(fsdp: Any) -> list[str]:
    match fsdp.auto_wrap_policy:
        case "size_based_wrap":
            size = fsdp.min_num_params or "min(100_000_000, -(-sum(p.numel() for p in model.parameters()) // 8))"
            return [
                f"    size = {size}",
                "    # Modules with so many elements outside the modules that are chosen within them.",
                "    # Modules that share a parameter with another one stay in the root module's group.",
                "    users = {}",
                "    for module in model.modules():",
                "        for parameter in module.parameters(recurse=False):",
                "            users.setdefault(parameter, []).append(module)",
                "    shared = {module for modules in users.values() if len(modules) > 1 for module in modules}",
                "    parts = []",
                "    for module in reversed(list(model.modules())[1:]):",
                "        inside = set(module.modules())",
                "        taken = {p for part in parts if part in inside for p in part.parameters()}",
                "        left = sum(p.numel() for p in module.parameters() if p not in taken)",
                "        runs = type(module).forward is not torch.nn.Module.forward",
                "        if runs and left >= size and not shared & inside:",
                "            parts.insert(0, module)",
            ]
        case _:
            classes = fsdp.transformer_layer_cls_to_wrap
            names = f"{{{', '.join(json.dumps(name) for name in classes)}}}" if classes else "model._no_split_modules"
            return [
                "    ends = [model.get_input_embeddings(), model.get_output_embeddings()]",
                "    tied = None in ends or ends[0].weight is ends[1].weight  # A shared parameter is in one part.",
                f"    classes = {names}{'' if classes else '  # Where there are none: size_based_wrap.'}",
                "    parts = [m for m in model.modules() if type(m).__name__ in classes or (m in ends and not tied)]",
            ]


def _prefetch(depth: int | None) -> list[str]:
    if depth is None:
        return []
    return [
        "    for i, part in enumerate(parts):",
        f"        part.set_modules_to_forward_prefetch(parts[i + 1 : i + 1 + {depth}])",
        f"        part.set_modules_to_backward_prefetch(parts[max(0, i - {depth}) : i][::-1])",
    ]


def _buffers(name: str | None) -> list[str]:
    if name is None:
        return []
    return [
        "    for buffer in model.buffers():",
        "        if buffer.is_floating_point():",
        f"            buffer.data = buffer.to({_dtype(name)})",
    ]


def _comm_hook(ddp: Any) -> list[str]:
    match ddp.comm_hook:
        case None:
            return []
        case "powersgd":
            rank = ddp.powersgd_rank
            return [
                "    state = powerSGD_hook.PowerSGDState("
                f"None, matrix_approximation_rank={rank}, start_powerSGD_iter=2)",
                "    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)",
            ]
        case name:
            return [f"    model.register_comm_hook(None, default_hooks.{name}_compress_hook)"]


def _scaler(resolved: ResolvedConfig) -> list[str]:
    config = resolved.config
    if config.precision.dtype != "fp16":
        return []
    scale = config.precision.loss_scale
    options = f"init_scale=2.0**{scale.initial_scale_power}, growth_interval={scale.loss_scale_window}"
    return ["", f"scaler = torch.amp.GradScaler({config.run.device!r}, {options})"]


def _loop(resolved: ResolvedConfig, reduction: str) -> str:
    config, ranks = resolved.config, resolved.dp_size
    batch = config.batch
    clip = f"{config.optimizer.max_grad_norm:g} ({config.optimizer.norm_type})"
    steps = f"{batch.accumulation} micro-batches of {batch.micro_size} samples on each of {ranks} data-parallel ranks."
    return _LOOP.format(reduction=reduction, clip=clip, steps=steps)
