"""Saves a run's state to a checkpoint and loads it: what it consists of, and in which order it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ds_trainer.callbacks.trainer_state import TrainerState
from ds_trainer.checkpoint.disk_space import require_checkpoint_space
from ds_trainer.checkpoint.export import write_config_and_tokenizer
from ds_trainer.checkpoint.folder import STATE
from ds_trainer.checkpoint.rng import rng_state
from ds_trainer.checkpoint.save import RankState, SharedState, save
from ds_trainer.checkpoint.shard_reader import ShardReader, read_errors
from ds_trainer.checkpoint.shard_writer import make_shards, state_slice
from ds_trainer.checkpoint.trial_save import trial_save
from ds_trainer.checkpoint.verified import VerifiedCheckpoint, open_checkpoint
from ds_trainer.distributed.consensus import consensus
from ds_trainer.engines.base import Engine
from ds_trainer.engines.state_handles import MASTER
from ds_trainer.errors import CheckpointError, NonFiniteError
from ds_trainer.log import get_logger, rank
from ds_trainer.models.load_weights import persistent_buffers
from ds_trainer.trainer.resume_checks import describe_layout
from ds_trainer.trainer.run import Run

_BUFFER, _ENGINE = "buffer.", "engine."


def save_checkpoint(run: Run, output_dir: Path, step: int, state: Mapping[str, Any]) -> Path:
    """Saves everything that the next step depends on. Every rank must call it.

    Args:
        run: The run.
        output_dir: Its folder.
        step: Optimizer steps taken.
        state: `Trainer.state_dict()`.

    Raises:
        MachineError: On every rank, if one could not write.
    """
    engine = run.engine
    tensors, rng = rng_state()
    tensors |= {_BUFFER + name: buffer for name, buffer in persistent_buffers(run.model)}
    tensors |= {_ENGINE + name: tensor for name, tensor in engine.rank_state().items()}
    rank_state = RankState({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, {"rng": rng})
    layout = engine.parameter_layout()
    layouts = run.mesh.gather_over_world(layout)
    shared = SharedState(
        state={**state, "counters": engine.scalar_state()},
        run=run.resolved.config.model_dump(mode="json", by_alias=True),
        layout=describe_layout(run.resolved, layouts),
        write_config_and_tokenizer=lambda folder: _write_config_and_tokenizer(run, folder),
    )
    return save(output_dir, step, make_shards(engine.state(), layout), rank_state, shared, run.mesh)


def _write_config_and_tokenizer(run: Run, folder: Path) -> None:
    if isinstance(run.model, PreTrainedModel):
        write_config_and_tokenizer(run.model, run.tokenizer, folder, run.export_dtype)


def check_saving(run: Run, state_dict: Callable[[], Mapping[str, Any]], num_saves: int) -> None:
    """Checks on rank 0, before the first step, that checkpoints and the export can be written; a collective.

    Args:
        run: The run.
        state_dict: `Trainer.state_dict`.
        num_saves: Checkpoints that are due in the rest of the run.

    Raises:
        UserError: On every rank: something cannot be saved, or there is not enough disk space.
    """
    with consensus(run.mesh, "the trial save"):
        if run.mesh.grid.rank == 0:
            config = run.resolved.config
            require_checkpoint_space(config, run.num_trained, num_saves)
            trial_save(Path(config.run.output_dir), run.model, run.tokenizer, run.export_dtype, state_dict())


def load_checkpoint(run: Run, checkpoint: VerifiedCheckpoint, state: Mapping[str, Any]) -> RankState:
    """Loads everything but the random numbers. Every rank must call it, before the first step.

    The weights are there already: the run was set up from the checkpoint's masters. An optimizer makes its states in
    its first step, so one is rehearsed, with a gradient and a learning rate of zero. It also lets an engine do what it
    does in its first step only, such as DDP's sorting of its buckets, which changes the order of sums.

    Args:
        run: The run.
        checkpoint: Where from.
        state: What `save_checkpoint` was given, read back.

    Returns:
        This rank's state, whose random numbers are to be set last.

    Raises:
        CheckpointError: On every rank: its optimizer states are not those of this run.
    """
    _rehearse(run)
    with consensus(run.mesh, "the loading of the checkpoint"):
        _write_state(run.engine, checkpoint.shards())
        rank_state = checkpoint.rank_state(run.mesh.grid.rank)
        saved = _below(rank_state.tensors, _BUFFER)
        with read_errors(checkpoint.folder):
            buffers = [(buffer, saved[name]) for name, buffer in persistent_buffers(run.model)]
    run.engine.load_rank_state(_below(rank_state.tensors, _ENGINE))
    run.engine.load_scalar_state(state["counters"])
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    return rank_state


def load_best_model(run: Run, state: TrainerState) -> None:
    """Puts the best model of a training that has ended in memory, with the optimizer's states at its step.

    The masters are overwritten, and the step with a learning rate of zero that every resume begins with makes of them
    what the engine computes with. Every rank must call it.

    Args:
        run: The run.
        state: Names the best model's checkpoint; without one, or where it is of the last step, nothing changes.

    Raises:
        UserError: On every rank: the checkpoint is damaged, or the last step's weights give no finite loss.
    """
    best = state.best_model_checkpoint
    if best is None or state.best_global_step == state.global_step:
        return
    checkpoint = open_checkpoint(Path(best), run.mesh)
    with consensus(run.mesh, "the best model"):
        saved, at_its_step = checkpoint.shards(), checkpoint.json(STATE)
        slices = {piece.name: piece for piece in run.engine.parameter_layout()}
        for name, handles in run.engine.state().items():
            master = handles[MASTER]
            master.write(saved.read(f"{MASTER}/{name}", state_slice(slices[name], master)))
    load_checkpoint(run, checkpoint, at_its_step)
    get_logger().info("the model in memory is the best one, of step %d", state.best_global_step)


def _rehearse(run: Run) -> None:
    """A step with a gradient and a learning rate of zero."""
    assert run.train_loader is not None
    engine = run.engine
    groups = engine.param_groups()
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0
    with consensus(run.mesh, "the rehearsal"):
        batches = run.executor.prepared([run.train_loader.single(0)])
    run.executor.train(batches, step_tokens=1, weight=0.0)
    skipped = engine.optimizer_step().skipped
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    with consensus(run.mesh, "the rehearsed step"):
        if skipped:
            raise NonFiniteError(
                "the model gives no finite loss on the first training sample",
                "a state is loaded around a step with a learning rate of zero, which has to be finite",
                "export the checkpoint with ds-trainer export, and look at its weights",
            )


def _write_state(engine: Engine, saved: ShardReader) -> None:
    slices = {piece.name: piece for piece in engine.parameter_layout()}
    parameters = engine.state().items()
    for name, handles in tqdm(parameters, "loading optimizer states", delay=3, leave=False, disable=rank() != 0):
        keys = saved.keys(name)
        if not set(keys) <= set(handles):
            raise CheckpointError(
                f"{saved.folder} holds {sorted(keys)} for {name}, this run's optimizer {sorted(handles)}",
                "a run continues with the optimizer that it began with",
                "set optimizer.name as it was, or checkpoint.resume_weights_only to true to begin with a new one",
            )
        for key, handle in handles.items():
            if key not in keys:  # It was saved before the optimizer's first step.
                handle.write(torch.zeros(handle.shape, dtype=handle.dtype))
                continue
            value = saved.read(f"{key}/{name}", state_slice(slices[name], handle)).view(handle.shape)
            if key != MASTER:
                handle.write(value)
            elif not torch.equal(handle.read().cpu(), value):
                raise CheckpointError(
                    f"{name} is no longer what the checkpoint holds after a step with learning rate 0",
                    "resuming makes the optimizer's states in such a step, which must leave the weights alone",
                    "use an optimizer whose update is proportional to lr",
                )


def _below(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
