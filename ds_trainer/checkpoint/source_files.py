"""What a reader of a checkpoint needs beside weights, config and tokenizer: processors, templates, their code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedModel
from transformers.utils import (
    AUDIO_TOKENIZER_NAME,
    CHAT_TEMPLATE_DIR,
    CHAT_TEMPLATE_FILE,
    CONFIG_NAME,
    FEATURE_EXTRACTOR_NAME,
    LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE,
    PROCESSOR_NAME,
    VIDEO_PROCESSOR_NAME,
)

_PROCESSORS = (FEATURE_EXTRACTOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME, AUDIO_TOKENIZER_NAME)
_TEMPLATES = (CHAT_TEMPLATE_FILE, LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE, CHAT_TEMPLATE_DIR)


def carry_source_files(model: PreTrainedModel, folder: Path) -> None:
    """Copies the files of processors from the checkpoint that a model came from, and their chat templates.

    Nothing is copied for a class that reads a part of the checkpoint only, such as its language model: the processors
    belong to the others. A template that the tokenizer has written stays the only one.

    Args:
        model: The model; an instance that was made of a config has no source.
        folder: The export, with config and tokenizer written.
    """
    source = _source_folder(model)
    if source is None or _json(source / CONFIG_NAME).get("model_type") != model.config.model_type:
        return
    if not any((source / name).is_file() for name in _PROCESSORS):
        return
    has_template = (folder / CHAT_TEMPLATE_FILE).exists()
    for name in _PROCESSORS if has_template else (*_PROCESSORS, *_TEMPLATES):
        _copy(source / name, folder / name)
    if any("auto_map" in _json(folder / name) for name in _PROCESSORS):
        for path in source.glob("*.py"):
            _copy(path, folder / path.name)


def _source_folder(model: PreTrainedModel) -> Path | None:
    """The folder that `from_pretrained` has read the model's config from; of a hub id the one in the cache."""
    name = model.config.name_or_path
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    try:
        cached = try_to_load_from_cache(name, CONFIG_NAME)
    except HFValidationError:  # A folder that is no longer there.
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8-sig")) if path.is_file() else {}


def _copy(source: Path, target: Path) -> None:
    """Copies a file or folder that is there and that the export lacks, with new files' modes."""
    if target.exists():
        return
    if source.is_file():
        shutil.copyfile(source, target)
    elif source.is_dir():
        shutil.copytree(source, target, copy_function=shutil.copyfile)
