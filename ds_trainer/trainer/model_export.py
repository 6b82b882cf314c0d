"""Writes the model of a run as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from ds_trainer.callbacks.trainer_state import TrainerState
from ds_trainer.checkpoint.export import export_model
from ds_trainer.checkpoint.verified import open_checkpoint
from ds_trainer.distributed.consensus import agree, consensus
from ds_trainer.log import get_logger
from ds_trainer.models.load_weights import persistent_buffers
from ds_trainer.run_folder import MODEL
from ds_trainer.trainer.checkpoint_io import best_parameters
from ds_trainer.trainer.run import Run


def save_model(run: Run, state: TrainerState, output_dir: str | Path | None) -> Path:
    """See `Trainer.save_model`.

    Args:
        run: The run.
        state: Names the checkpoint of the best model, which is exported where the config asks for it.
        output_dir: Folder; None: `<run.output_dir>/model`.
    """
    config = run.resolved.config
    folder = Path(output_dir or Path(config.run.output_dir) / MODEL)
    agree(run.mesh, "save_model()")
    with consensus(run.mesh, "the export"):
        export_model(
            _parameters(run, state),
            run.model,
            run.tokenizer,
            str(folder),
            dtype=run.export_dtype,
            max_shard_size=config.checkpoint.max_shard_size,
            is_writer=run.mesh.grid.rank == 0,
            buffers=_buffers(run),
        )
    get_logger().info("model: %s", folder)
    return folder


def _parameters(run: Run, state: TrainerState) -> Iterator[tuple[str, torch.Tensor]]:
    best = state.best_model_checkpoint
    if best is None or not run.resolved.config.checkpoint.load_best_model_at_end:
        return run.engine.full_parameters()
    get_logger().info("the export is the best model, of step %d", state.best_global_step)
    return best_parameters(run.engine, open_checkpoint(Path(best), run.mesh).shards())


def _buffers(run: Run) -> dict[str, torch.Tensor]:
    """Those of every stage of the pipeline. Comm: one gather of them over it; none without one."""
    local = dict(persistent_buffers(run.model))
    if run.mesh.grid.pp_size == 1:
        return local
    by_stage = run.mesh.gather_over_pp({name: buffer.cpu() for name, buffer in local.items()})
    return {name: buffer for stage in by_stage for name, buffer in stage.items()}
