"""Checks whether a run can continue from a checkpoint: what must be equal, what may differ, what is logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_trainer.callbacks.trainer_state import TrainerState
from ds_trainer.checkpoint.folder import LAYOUT, RUN, checkpoints
from ds_trainer.checkpoint.verified import VerifiedCheckpoint, open_checkpoint, open_newest
from ds_trainer.config.backend import backend
from ds_trainer.config.engine_sections import ParallelConfig
from ds_trainer.config.keys import flatten
from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.config.schema import RunConfig
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.engines.state_handles import MASTER
from ds_trainer.errors import CheckpointError, ConfigError
from ds_trainer.layout import ParameterSlice
from ds_trainer.log import get_logger

_SEQUENCES = "sequence parallelism"
_ANY = ("$schema", "run.output_dir", "checkpoint", "logging", "data.cache_dir", "data.preview_samples", "run.device")
"""Keys that may change without a log line."""
_SAME = ("run.seed", "data.shuffle", "optimizer.name")
"""Keys that decide the order of the samples or what a state means."""
_WEIGHTS_ONLY = "set checkpoint.resume_weights_only to true to begin a new run from its weights"


def find_checkpoint(resolved: ResolvedConfig, mesh: Mesh, trains: bool) -> VerifiedCheckpoint | None:
    """The checkpoint from which this run continues; None: it starts anew. A collective.

    Args:
        resolved: The run's config.
        mesh: Process groups.
        trains: Whether the run has training data.

    Raises:
        CheckpointError: On every rank: it is damaged or missing, or there is one and `checkpoint.resume` is not set.
    """
    config = resolved.config
    output_dir, wanted = Path(config.run.output_dir), config.checkpoint.resume
    if wanted is None:
        found = mesh.gather_over_world(checkpoints(output_dir))[0] if trains else []
        if found:
            raise _error_on_all_ranks(
                f"{output_dir} holds {found[0].name} of an earlier run",
                "a run that starts anew does not mix its checkpoints with another's",
                "set checkpoint.resume to auto to go on from there, or run.output_dir to another folder",
            )
        return None
    if wanted != "auto":
        return open_checkpoint(Path(wanted), mesh)
    checkpoint = open_newest(output_dir, mesh)
    there = mesh.gather_over_world(checkpoints(output_dir))[0]
    if checkpoint is None and there:
        raise _error_on_all_ranks(
            f"{output_dir} holds {', '.join(path.name for path in there)}, and none of them is complete (see above)",
            "a new run would replace checkpoints that can perhaps still be repaired",
            "move these folders away to start anew, or set run.output_dir to another folder",
        )
    if checkpoint is None:
        get_logger().info("checkpoint.resume is auto and %s holds no complete checkpoint: starting anew", output_dir)
    return checkpoint


def describe_layout(resolved: ResolvedConfig, layouts: list[list[ParameterSlice]]) -> dict[str, Any]:
    """A layout as JSON: a description, and the slices of each rank.

    Checkpoints hold its keys and its description, which are compared with those of a run: they do not change.
    """
    return {
        "engine": resolved.config.parallel.engine,
        "description": _description(resolved),
        "world": len(layouts),
        "tp": resolved.config.parallel.tp,
        "pp": resolved.config.parallel.pp,
        "ranks": [[_slice_as_json(piece) for piece in of_rank] for of_rank in layouts],
    }


def _slice_as_json(piece: ParameterSlice) -> dict[str, Any]:
    """A slice as it reads back from JSON; of its sharding only the ranges of this rank."""
    cut = piece.sharding and {"dim": piece.sharding.dim, "ranges": [list(r) for r in piece.sharding.ranges[piece.rank]]}
    return {"name": piece.name, "shape": list(piece.shape), "flat": list(piece.flat), "cut": cut}


def _description(resolved: ResolvedConfig) -> str:
    config = resolved.config
    axes = [*_pipeline_description(config.parallel), *_tensor_description(config.parallel)]
    items = [*axes, f"{resolved.dp_size} data ranks", config.parallel.engine]
    if backend(config) != config.parallel.engine:
        items.append(backend(config))
    if backend(config) == "deepspeed":
        items.append(f"ZeRO stage {config.zero.stage}")
        items += [
            f"{what} on {section.device}"
            for what, section in (
                ("optimizer", config.zero.offload_optimizer),
                ("parameters", config.zero.offload_param),
            )
            if section.device != "none"
        ]
    if backend(config) == "fsdp2":
        items.append(f"{config.parallel.dp_replicate} copies" if config.parallel.dp_replicate > 1 else "one copy")
        items.append(f"reshard_after_forward {config.fsdp.reshard_after_forward}")
        items += ["on the host"] if config.fsdp.cpu_offload else []
    return ", ".join([*items, str(config.precision.dtype)])


def _pipeline_description(config: ParallelConfig) -> list[str]:
    if config.pp == 1:
        return []
    chunks = config.virtual_stages or 1
    return [f"pp {config.pp}" + (f" with {chunks} stages on each rank" if chunks > 1 else "")]


def _tensor_description(config: ParallelConfig) -> list[str]:
    if config.tp == 1:
        return []
    more = [_SEQUENCES] if config.sequence_parallel else []
    more += ["parallel.tp_plan"] if config.tp_plan else []
    return [" with ".join([f"tp {config.tp}", *([" and ".join(more)] if more else [])])]


def check_world(checkpoint: VerifiedCheckpoint, resolved: ResolvedConfig, world: int) -> None:
    """Checks the numbers of ranks along the mesh axes, before anything is loaded.

    Raises:
        CheckpointError: Other numbers of ranks saved it.
    """
    saved, parallel = checkpoint.json(LAYOUT), resolved.config.parallel
    if (saved["world"], saved["tp"], saved.get("pp", 1)) != (world, parallel.tp, parallel.pp):
        raise _other_layout(checkpoint, saved["description"], resolved)


def check_layout(
    checkpoint: VerifiedCheckpoint, resolved: ResolvedConfig, layout: list[ParameterSlice], rank: int
) -> None:
    """Checks that this rank owns what the same rank owned when the checkpoint was saved.

    Raises:
        CheckpointError: It owns other slices.
    """
    saved, now = checkpoint.json(LAYOUT), _description(resolved)
    if [_slice_as_json(piece) for piece in layout] != saved["ranks"][rank] or saved[
        "engine"
    ] != resolved.config.parallel.engine:
        raise _other_layout(checkpoint, saved["description"], resolved)
    if saved["description"] != now:
        before = saved["description"]
        masks = ", and the masks of dropout do" if (_SEQUENCES in before) != (_SEQUENCES in now) else ""
        get_logger().warning(
            "warning: %s was saved by %s and goes on with %s: the last bits of sums may differ%s",
            checkpoint.folder,
            before,
            now,
            masks,
        )


def check_model(checkpoint: VerifiedCheckpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Checks that the checkpoint holds masters of this model.

    Args:
        checkpoint: The checkpoint.
        shapes: Full shapes of the trained parameters by name.

    Raises:
        CheckpointError: It holds those of another model, or of other parameters.
    """
    held = {
        fqn.partition("/")[2]: tuple(t.size)
        for fqn, t in checkpoint.shards().tensors.items()
        if fqn.startswith(f"{MASTER}/")
    }
    wrong = sorted(name for name in held.keys() | shapes.keys() if held.get(name) != shapes.get(name))
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{checkpoint.folder} holds {name} as {held.get(name, 'nothing')}, the model trains it as "
            f"{shapes.get(name, 'nothing')}, and so for {len(wrong)} parameters",
            "a run continues with the model that it began with, and trains the same parameters",
            "set model.path as it was, or checkpoint.resume to a checkpoint of this model",
        )


def check_run(
    checkpoint: VerifiedCheckpoint,
    resolved: ResolvedConfig,
    state: Mapping[str, Any],
    num_samples: int,
    probes: Sequence[str | None] | None,
) -> None:
    """Checks that the run is the one that was saved, and names what has changed in its config.

    Raises:
        CheckpointError: The data would come in another order, or a state would mean something else.
    """
    config = resolved.config
    before, after = (_compared_keys(tree) for tree in (checkpoint.json(RUN), _dumped(config)))
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    for key in _SAME:
        if key in changed:
            raise _error_on_all_ranks(
                f"{key} is {after[key]!r}, and {before[key]!r} in {checkpoint.folder}",
                "it decides the order of the samples or what the optimizer's state means",
                f"set {key} to {before[key]!r}, or {_WEIGHTS_ONLY}",
            )
    if num_samples != state["data"]["num_samples"]:
        raise _error_on_all_ranks(
            f"the training data has {num_samples} samples, and had {state['data']['num_samples']} in "
            f"{checkpoint.folder}",
            "a run continues at the sample after the last one that it has seen",
            f"give it the data that it began with, or {_WEIGHTS_ONLY}",
        )
    saved_probes = state["data"]["probes"]
    if probes is not None and saved_probes is not None and list(probes) != saved_probes:
        raise _error_on_all_ranks(
            f"the first, the middle or the last training sample is not the one of {checkpoint.folder}",
            "a run continues with the data that it began with",
            f"set data.train as it was, or {_WEIGHTS_ONLY}",
        )
    size, saved_size = config.batch.global_size, state["data"]["global_size"]
    if size != saved_size and not config.checkpoint.allow_global_size_change:
        raise _error_on_all_ranks(
            f"batch.global_size is {size}, and {saved_size} in {checkpoint.folder}",
            "another global batch is another optimization: learning rate and schedule were chosen for the first",
            f"set batch.global_size to {saved_size}, or checkpoint.allow_global_size_change to true",
        )
    for key in sorted(changed):
        get_logger().info("since %s: %s %r -> %r", checkpoint.folder.name, key, before.get(key), after.get(key))


def check_length(checkpoint: VerifiedCheckpoint, state: TrainerState) -> None:
    """Checks that the run is not shorter than its checkpoint.

    Raises:
        CheckpointError: It is.
    """
    if state.global_step > state.max_steps:
        raise _error_on_all_ranks(
            f"{checkpoint.folder} is at step {state.global_step}, and this run has {state.max_steps} steps",
            "a run continues from a step before its end",
            "raise run.max_steps or run.epochs, or set checkpoint.resume to an earlier checkpoint",
        )


def check_train_call(has_trained: bool, checkpoint: VerifiedCheckpoint | None, asked: str | Path | bool | None) -> None:
    """Refuses a `train()` that could not do what it says.

    Args:
        has_trained: Whether the Trainer has trained to its end already.
        checkpoint: What the run was set up from.
        asked: `train(resume_from_checkpoint=...)`.

    Raises:
        ConfigError: It is the second training, or it is to resume from what the run was not set up from.
    """
    if has_trained:
        raise ConfigError(
            "train() is called again on a Trainer that has trained to its end",
            "a Trainer is one run, with one schedule, one order of data and one output folder",
            "make another Trainer; checkpoint.resume and resume_weights_only begin it from these weights",
        )
    same = checkpoint is not None and (asked is True or Path(str(asked)).resolve() == checkpoint.folder.resolve())
    if asked and not same:
        begun = "without a checkpoint" if checkpoint is None else f"from {checkpoint.folder}"
        raise ConfigError(
            f"train(resume_from_checkpoint={asked!r}) is called, and the Trainer was set up {begun}",
            "a checkpoint is read when the Trainer is made: its weights go straight to the ranks that keep them",
            "set checkpoint.resume to auto or to the folder, or TrainingArguments(resume_from_checkpoint=...)",
        )


def log_resumed(checkpoint: VerifiedCheckpoint, state: TrainerState) -> None:
    """Logs where the run goes on, and whether there is anything left to train."""
    if state.global_step >= state.max_steps:
        text = "%s is the end of a finished run of %d steps: nothing is left to train"
        get_logger().info(text, checkpoint.folder, state.max_steps)
    else:
        done, total = state.global_step, state.max_steps
        get_logger().info("resumed from %s: %d of %d steps are done", checkpoint.folder, done, total)


def _dumped(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", by_alias=True)


def _compared_keys(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in flatten(tree).items() if not key.startswith(_ANY)}


def _other_layout(checkpoint: VerifiedCheckpoint, saved: str, resolved: ResolvedConfig) -> CheckpointError:
    now = _description(resolved)
    splits = flatten(checkpoint.json(RUN)).get("parallel.pp_split"), _dumped(resolved.config)["parallel"]["pp_split"]
    if saved == now and splits[0] != splits[1]:
        saved, now = (f"{now} with parallel.pp_split {split}" for split in splits)
    return _error_on_all_ranks(
        f"{checkpoint.folder} was saved by {saved}; this run is {now}",
        "optimizer states are sharded by the layout, and a run continues in the one that it was saved in",
        f"start it in that layout, or {_WEIGHTS_ONLY} in this one",
    )


def _error_on_all_ranks(found: str, rule: str, change: str) -> CheckpointError:
    """An error that every rank raises."""
    error = CheckpointError(found, rule, change)
    error.on_all_ranks = True
    return error
