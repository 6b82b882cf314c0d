"""Whether the files that a config names exist and can be used. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import ConfigError

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def check_files(config: RunConfig) -> list[ConfigError]:
    """One error for every local path of the config that is missing or cannot be used."""
    return [*_model(config), *_data(config), *_written(config)]


def _model(config: RunConfig) -> Iterator[ConfigError]:
    for key, path in (("model.path", config.model.path), ("model.tokenizer", config.model.tokenizer)):
        if path and not Path(path).expanduser().is_dir() and not _HUB_ID.fullmatch(path):
            yield ConfigError(
                f"{key} is {path}: there is no folder {os.path.abspath(Path(path).expanduser())}",
                "it is a folder, relative to the working directory, or a hub id",
                f"set {key}",
            )


def _data(config: RunConfig) -> Iterator[ConfigError]:
    named = {
        "data.train": config.data.train,
        "data.eval": config.data.eval,
        "data.chat_template": config.data.chat_template,
    }
    for key, paths in named.items():
        for path in (paths,) if isinstance(paths, str) else paths or ():
            if not Path(path).is_file():
                yield ConfigError(
                    f"{key} names {path}: there is no file {os.path.abspath(path)}",
                    "data is read from files, relative to the working directory",
                    f"set {key}",
                )


def _written(config: RunConfig) -> Iterator[ConfigError]:
    named = {
        "run.output_dir": config.run.output_dir,
        "data.cache_dir": config.data.cache_dir,
        "zero.offload_optimizer.nvme_path": config.zero.offload_optimizer.nvme_path,
        "zero.offload_param.nvme_path": config.zero.offload_param.nvme_path,
    }
    for key, path in named.items():
        if path and not (os.access(place := _existing(Path(path)), os.W_OK) and place.is_dir()):
            yield ConfigError(
                f"{key} is {path}, which cannot be written",
                "the run writes files below that folder",
                f"set {key} to a folder that can be written",
            )


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(place for place in (path, *path.parents) if place.exists())
