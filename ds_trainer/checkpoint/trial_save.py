"""Writes the small files of a checkpoint and an export before the first step, so that a bad config fails at once."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto import AutoConfig

from ds_trainer.checkpoint.export import write_config_and_tokenizer
from ds_trainer.checkpoint.folder import TRIAL
from ds_trainer.errors import MachineError, ModelError


def trial_save(
    output_dir: Path,
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype,
    state: Mapping[str, Any],
) -> None:
    """Writes config, generation config, tokenizer and the trainer's state into a temporary folder.

    Args:
        output_dir: The run's folder.
        model: The model.
        tokenizer: Its tokenizer, if it has one.
        dtype: Dtype of the export.
        state: The trainer's state, as a checkpoint holds it.

    Raises:
        ModelError: A config, the tokenizer or the state cannot be written as JSON, or the config not read back.
        MachineError: The folder cannot be written to.
    """
    try:
        with tempfile.TemporaryDirectory(dir=output_dir, prefix=TRIAL) as name:
            folder = Path(name)
            (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
            if isinstance(model, PreTrainedModel):
                write_config_and_tokenizer(model, tokenizer, folder, dtype)
                if not model.is_remote_code():
                    AutoConfig.from_pretrained(folder)
    except OSError as error:
        raise MachineError(
            f"{output_dir} cannot be written: {error}",
            "checkpoints and the model are written there",
            "set run.output_dir to a writable folder with free space",
        ) from error
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"the model's config, its tokenizer or the state of a callback or scheduler cannot be saved: {error}",
            "all of them are written once before the first step, so that the run's end does not fail",
            "fix the config, the tokenizer, or the state_dict() of the callback or scheduler",
        ) from error
