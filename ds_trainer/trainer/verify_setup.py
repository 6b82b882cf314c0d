"""After set-up: what exists, held against what the config asked for."""

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

NVME_MINIMUM = "DeepSpeed leaves sub-groups and partitions under 1 MiB per rank in memory"


def verify_setup(resolved: ResolvedConfig, engine: Engine, mesh: Mesh) -> EngineFacts:
    """Measures the engine on every rank, compares it with the config, and prints a few lines.

    Comm: one gather of each rank's facts.

    Raises:
        EngineError: Something else was set up than the config says, on any rank, or ranks start from other parameters.
    """
    facts = engine.facts()
    gathered = mesh.gather_over_world((facts, engine.parameter_hash()))
    for rank, (other, _) in enumerate(gathered):
        _compare(resolved, other, rank, mesh)
    hashes = [value for _, value in gathered]
    _same_start(hashes, mesh.grid.dp_ranks)
    parts = [hashes[rank] for rank in mesh.grid.model_ranks[0]]
    _print(resolved, [other for other, _ in gathered], "/".join(filter(None, parts)) or None)
    return facts


def _compare(resolved: ResolvedConfig, facts: EngineFacts, rank: int, mesh: Mesh) -> None:
    config = resolved.config
    asked: dict[str, tuple[Any, Any]] = {
        "data ranks": (resolved.dp_size, facts.group_size),
        "precision.dtype": (config.precision.dtype, facts.compute_dtype),
    }
    asked |= {key: (value(config, key), got) for key, got in facts.settings.items()}
    if backend(config) == "deepspeed":
        asked["zero.stage"] = (config.zero.stage, facts.stage)
        for key, got in (("offload_optimizer", facts.optimizer_device), ("offload_param", facts.param_device)):
            want = getattr(config.zero, key).device
            if want == "nvme" and got != "nvme":
                warn_once(f"zero.{key}.device is nvme and nothing is on NVMe: {NVME_MINIMUM}")
            elif want != "none":
                asked[f"zero.{key}.device"] = (want, got)
    if resolved.optimizer_implementation == "deepspeed_cpu":
        asked["optimizer on the host"] = (True, facts.optimizer.startswith("DeepSpeedCPU"))
    for key, (wanted, found) in asked.items():
        if wanted != found:
            raise EngineError(
                f"rank {rank}: {key} was asked to be {wanted!r} and {facts.engine} set up {found!r}",
                "what was asked for must be what runs",
                f"change {key}, or the native key that overrides it",
            )


def _same_start(hashes: list[str | None], dp_ranks: list[list[int]]) -> None:
    """Checks that the data ranks of each part of the model hold the same."""
    different = {rank: ranks[0] for ranks in dp_ranks for rank in ranks if hashes[rank] != hashes[ranks[0]]}
    if different:
        raise EngineError(
            f"ranks {sorted(different)} start with other parameters than rank {different[min(different)]}",
            "every data rank must hold the same parameters before the first step",
            "load the same checkpoint on every rank (model.path), or seed the model's construction",
        )


def _print(resolved: ResolvedConfig, ranks: list[EngineFacts], same_hash: str | None) -> None:
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
        _split(first.settings) + _cut(first.settings),
        first.compute_dtype,
    )
    log.info(
        "parameters: %s on %s; optimizer: %s, %s on %s%s",
        _per_rank([f.param_bytes for f in ranks]),
        first.param_device,
        first.optimizer,
        _per_rank([f.optimizer_bytes for f in ranks]) if first.optimizer_bytes else "its states, made in step 1,",
        first.optimizer_device,
        f"; swap files: {_per_rank([f.nvme_bytes for f in ranks])}" if any(f.nvme_bytes for f in ranks) else "",
    )
    several = max(first.settings.get(f"parallel.{axis}", 1) for axis in ("dp_replicate", "tp", "pp")) > 1
    who = "all copies" if several else "all ranks"
    how = "each parameter exists once" if same_hash is None else f"{who} start from hash {same_hash}"
    log.info(
        "batch: %s samples per step = micro %s x accumulation %s x data ranks %d; %s",
        batch.global_size,
        batch.micro_size,
        batch.accumulation,
        resolved.dp_size,
        how,
    )


def _split(settings: Mapping[str, Any]) -> str:
    """Over how many ranks a copy of the model is split along each axis; nothing where it is not."""
    axes = {"tensor": settings.get("parallel.tp", 1), "pipeline": settings.get("parallel.pp", 1)}
    words = " x ".join(f"{ranks} {axis} ranks" for axis, ranks in axes.items() if ranks > 1)
    return f" of {words}" if words else ""


def _cut(settings: Mapping[str, Any]) -> str:
    """How FSDP2 cuts the model, as its groups say; nothing on other engines."""
    if "parallel.dp_shard" not in settings:
        return ""
    copies, shards = settings["parallel.dp_replicate"], settings["parallel.dp_shard"]
    reshard = settings["fsdp.reshard_after_forward"]
    kept = {True: "freed", False: "kept gathered"}.get(reshard, f"cut over {reshard} ranks")
    layout = f"{copies} copies of {shards} shards" if copies > 1 else f"{shards} shard(s)"
    return f", {layout}, parameters {kept} after forward{', on the host' if settings['fsdp.cpu_offload'] else ''}"


def _per_rank(sizes: list[int]) -> str:
    low, high = min(sizes) / 1e6, max(sizes) / 1e6
    return f"{high:,.1f} MB per rank" if high - low < 0.05 else f"{low:,.1f} to {high:,.1f} MB per rank"
