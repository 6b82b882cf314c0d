"""Writes the model of a run as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch

from ds_trainer.checkpoint.export import export_model
from ds_trainer.distributed.consensus import agree, consensus
from ds_trainer.log import get_logger
from ds_trainer.models.load_weights import persistent_buffers
from ds_trainer.models.meta_model import written_class
from ds_trainer.run_folder import MODEL
from ds_trainer.trainer.run import Run


def save_model(run: Run, output_dir: str | Path | None) -> Path:
    """See `Trainer.save_model`.

    Args:
        run: The run.
        output_dir: Folder; None: `<run.output_dir>/model`.
    """
    config = run.resolved.config
    folder = Path(output_dir or Path(config.run.output_dir) / MODEL)
    agree(run.mesh, "save_model()")
    with consensus(run.mesh, "the export"):
        export_model(
            run.engine.full_parameters(),
            run.model,
            run.tokenizer,
            str(folder),
            dtype=run.export_dtype,
            max_shard_size=config.checkpoint.max_shard_size,
            is_writer=run.mesh.grid.rank == 0,
            buffers=_buffers(run),
        )
    get_logger().info("model: %s", folder)
    get_logger().info("in Python: %s", line_that_loads(run, folder))
    return folder


def line_that_loads(run: Run, folder: Path) -> str:
    """The line of Python that loads an exported model."""
    config, written = run.resolved.config.model, written_class(run.model)
    if config.path is not None:
        module, name = "transformers", config.auto_class
    else:
        module, name = written.__module__, written.__name__
        module = "transformers" if module.startswith("transformers.models.") else module
    trust = ", trust_remote_code=True" if config.path is not None and config.trust_remote_code else ""
    return f"from {module} import {name}; model = {name}.from_pretrained({str(folder)!r}{trust})"


def _buffers(run: Run) -> dict[str, torch.Tensor]:
    """Those of every stage of the pipeline. Comm: one gather of them over it; none without one."""
    local = dict(persistent_buffers(run.model))
    if run.mesh.grid.pp_size == 1:
        return local
    by_stage = run.mesh.gather_over_pp({name: buffer.cpu() for name, buffer in local.items()})
    return {name: buffer for stage in by_stage for name, buffer in stage.items()}
