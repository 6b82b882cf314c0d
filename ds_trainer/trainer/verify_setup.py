"""Checks after set-up that what exists is what the config says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_trainer.config.backend import backend
from ds_trainer.config.keys import value
from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.engines.base import Engine, EngineFacts
from ds_trainer.errors import EngineError
from ds_trainer.log import get_logger, warn_once
from ds_trainer.trainer.parameter_groups import BuiltOptimizer, check_groups, describe_groups, rates_of

NVME_MINIMUM = "DeepSpeed leaves sub-groups and partitions under 1 MiB per rank in memory"


def verify_setup(resolved: ResolvedConfig, engine: Engine, optimizer: BuiltOptimizer, mesh: Mesh) -> EngineFacts:
    """Measures the engine on every rank, compares it with the config, and prints a few lines.

    Comm: one gather of each rank's facts.

    Raises:
        EngineError: The setup differs from the config on any rank, or ranks start from different parameters.
    """
    facts = engine.facts()
    rates = [rates_of(group) for group in engine.param_groups()]
    gathered = mesh.gather_over_world((facts, engine.parameter_hash(), optimizer.groups, rates))
    for rank, (other, _, groups, live) in enumerate(gathered):
        _compare(resolved, other, rank)
        check_groups(groups, live, rank)
    hashes = [value for _, value, *_ in gathered]
    _check_same_start(hashes, mesh.grid.dp_ranks)
    shards = [hashes[rank] for rank in mesh.grid.model_ranks[0]]
    _log_setup(resolved, [other for other, *_ in gathered], optimizer, "/".join(filter(None, shards)) or None)
    get_logger().info("groups: %s", describe_groups(gathered[rank][2] for rank in mesh.grid.pp_ranks[0]))
    return facts


def _compare(resolved: ResolvedConfig, facts: EngineFacts, rank: int) -> None:
    config = resolved.config
    expected: dict[str, tuple[Any, Any]] = {
        "data-parallel ranks": (resolved.dp_size, facts.group_size),
        "precision.dtype": (config.precision.dtype, facts.compute_dtype),
    }
    expected |= {key: (value(config, key), got) for key, got in facts.settings.items()}
    if backend(config) == "deepspeed":
        expected["zero.stage"] = (config.zero.stage, facts.stage)
        for key, got in (("offload_optimizer", facts.optimizer_device), ("offload_param", facts.param_device)):
            want = getattr(config.zero, key).device
            if want == "nvme" and got != "nvme":
                warn_once(f"zero.{key}.device is nvme and nothing is on NVMe: {NVME_MINIMUM}")
            elif want != "none":
                expected[f"zero.{key}.device"] = (want, got)
    if resolved.optimizer_implementation == "deepspeed_cpu":
        expected["optimizer on the host"] = (True, facts.optimizer.startswith("DeepSpeedCPU"))
    for key, (wanted, found) in expected.items():
        if wanted != found:
            raise EngineError(
                f"rank {rank}: the config says {key} = {wanted!r} and {facts.engine} set up {found!r}",
                "a run is set up as its config says",
                f"change {key}, or the native key that overrides it",
            )


def _check_same_start(hashes: list[str | None], dp_ranks: list[list[int]]) -> None:
    """Checks that data-parallel ranks of the same shard hold equal parameters."""
    different = {rank: ranks[0] for ranks in dp_ranks for rank in ranks if hashes[rank] != hashes[ranks[0]]}
    if different:
        raise EngineError(
            f"ranks {sorted(different)} start with other parameters than rank {different[min(different)]}",
            "data-parallel ranks hold the same parameters before the first step",
            "load the same checkpoint on every rank (model.path), or seed the model's construction",
        )


def _log_setup(
    resolved: ResolvedConfig, ranks: list[EngineFacts], optimizer: BuiltOptimizer, same_hash: str | None
) -> None:
    first, log = ranks[0], get_logger()
    stage = "" if first.stage is None else f", ZeRO stage {first.stage}"
    through = " through accelerate" if resolved.config.parallel.engine == "accelerate" else ""
    batch = resolved.config.batch
    log.info(
        "engine: %s%s%s, %d data rank(s)%s, compute in %s",
        first.engine,
        through,
        stage,
        first.group_size,
        _model_axes(first.settings) + _sharding(first.settings),
        first.compute_dtype,
    )
    log.info(
        "parameters: %s on %s; optimizer: %s, %s on %s%s",
        _per_rank([f.param_bytes for f in ranks]),
        first.param_device,
        first.optimizer,
        _optimizer_bytes(ranks, optimizer.num_moments),
        first.optimizer_device,
        f"; swap files: {_per_rank([f.nvme_bytes for f in ranks])}" if any(f.nvme_bytes for f in ranks) else "",
    )
    several = max(first.settings.get(f"parallel.{axis}", 1) for axis in ("dp_replicate", "tp", "pp")) > 1
    who = "all replicas" if several else "all ranks"
    how = "each parameter exists once" if same_hash is None else f"{who} start from hash {same_hash}"
    log.info(
        "batch: %s samples per step = micro %s x accumulation %s x data ranks %d; %s",
        batch.global_size,
        batch.micro_size,
        batch.accumulation,
        resolved.dp_size,
        how,
    )


def _model_axes(settings: Mapping[str, Any]) -> str:
    """Over how many ranks a replica of the model is split along each axis; empty where it is not."""
    axes = {"tensor": settings.get("parallel.tp", 1), "pipeline": settings.get("parallel.pp", 1)}
    axes_text = " x ".join(f"{ranks} {axis} ranks" for axis, ranks in axes.items() if ranks > 1)
    return f" of {axes_text}" if axes_text else ""


def _sharding(settings: Mapping[str, Any]) -> str:
    """How FSDP2 shards the model, by its process groups; empty on other engines."""
    if "parallel.dp_shard" not in settings:
        return ""
    replicas, shards = settings["parallel.dp_replicate"], settings["parallel.dp_shard"]
    reshard = settings["fsdp.reshard_after_forward"]
    kept = {True: "freed", False: "kept gathered"}.get(reshard, f"sharded over {reshard} ranks")
    layout = f"{replicas} replicas of {shards} shards" if replicas > 1 else f"{shards} shard(s)"
    return f", {layout}, parameters {kept} after forward{', on the host' if settings['fsdp.cpu_offload'] else ''}"


def _optimizer_bytes(ranks: list[EngineFacts], num_moments: int | None) -> str:
    """What the optimizer keeps of masters and moments once it has taken a step."""
    if num_moments is None and any(facts.stateless_bytes for facts in ranks):
        masters = f"{_per_rank([facts.optimizer_bytes for facts in ranks])} and " if ranks[0].optimizer_bytes else ""
        return f"{masters}its states, made in step 1,"
    made = [(num_moments or 0) * facts.stateless_bytes for facts in ranks]
    total = _per_rank([facts.optimizer_bytes + more for facts, more in zip(ranks, made, strict=True)])
    return f"{total} ({_megabytes(made)} of it made in step 1)" if any(made) else total


def _per_rank(sizes: list[int]) -> str:
    return f"{_megabytes(sizes)} per rank"


def _megabytes(sizes: list[int]) -> str:
    low, high = min(sizes) / 1e6, max(sizes) / 1e6
    return f"{high:,.1f} MB" if high - low < 0.05 else f"{low:,.1f} to {high:,.1f} MB"
