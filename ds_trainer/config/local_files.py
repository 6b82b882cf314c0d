"""Whether the files that a config names are there. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import ConfigError

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check_files(config: RunConfig) -> list[ConfigError]:
    """One error for every local path of the config that is missing or cannot be used."""
    return [*_model(config), *_data(config), *_drives(config)]


def _model(config: RunConfig) -> Iterator[ConfigError]:
    for key, path in (("model.path", config.model.path), ("model.tokenizer", config.model.tokenizer)):
        if path and not Path(path).expanduser().is_dir() and not _HUB_ID.fullmatch(path):
            yield ConfigError(f"{key} is {path}, which does not exist", "it is a folder or a hub id", f"set {key}")


def _data(config: RunConfig) -> Iterator[ConfigError]:
    named = {
        "data.train": config.data.train,
        "data.eval": config.data.eval,
        "data.chat_template": config.data.chat_template,
    }
    for key, paths in named.items():
        for path in (paths,) if isinstance(paths, str) else paths or ():
            if not Path(path).is_file():
                yield ConfigError(f"{key} names {path}, which is no file", "data is read from files", f"set {key}")


def _drives(config: RunConfig) -> Iterator[ConfigError]:
    for section in ("offload_optimizer", "offload_param"):
        path = getattr(config.zero, section).nvme_path
        if path and not os.access(_existing(Path(path)), os.W_OK):
            yield ConfigError(
                f"zero.{section}.nvme_path is {path}, which cannot be written",
                "each rank writes its swap files there",
                f"set zero.{section}.nvme_path to a folder that can be written",
            )


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(place for place in (path, *path.parents) if place.exists())
