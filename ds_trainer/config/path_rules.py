"""Whether what a config names exists on this machine and can be used: files, folders, trackers. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from ds_trainer.config.data_files import file_fault, first_keys
from ds_trainer.config.schema import RunConfig
from ds_trainer.config.training_sections import LoggingConfig
from ds_trainer.errors import ConfigError

_HUB_ID = re.compile(r"(?!.*(--|\.\.))\w[\w.-]*/\w[\w.-]{0,95}")
_WITHOUT_OWNER = re.compile(
    r"(distil)?(gpt2|bert|roberta)(-[\w.-]+)?|(openai-gpt|albert|camembert|ctrl|t5|transfo-xl|xlm|xlnet)(-[\w.-]+)?"
)
"""Hub ids from the time before they had owners."""

_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates", "tekken.json")
"""Files beside a tokenizer that hold its chat template; a tekken.json's is in its reader."""


def check_files(config: RunConfig) -> list[ConfigError]:
    """One error for every local path of the config that is missing or cannot be used, and for every missing tracker."""
    return [*_model(config), *_data(config), *_template(config), *_written(config), *missing_trackers(config.logging)]


def unknown_hub_ids(config: RunConfig) -> Iterator[str]:
    """A line for each hub id that this machine has no copy of: only the hub can say whether it exists."""
    for key, path in _models(config):
        if not Path(path).expanduser().is_dir() and _is_hub_id(path) and not _is_cached(path):
            yield f"{key} is {path}: no folder here, and no copy in the cache; the run will look for it on the hub"


def missing_trackers(config: LoggingConfig) -> Iterator[ConfigError]:
    """An error if packages of trackers are not installed."""
    if missing := [name for name in config.report_to if find_spec(name) is None]:
        yield ConfigError(
            f"logging.report_to names {', '.join(missing)}, not installed here",
            "each tracker is a separate package",
            f"pip install {' '.join(missing)}, or remove it from logging.report_to",
        )


def _models(config: RunConfig) -> list[tuple[str, str]]:
    named = (("model.path", config.model.path), ("model.tokenizer", config.model.tokenizer))
    return [(key, path) for key, path in named if path]


def _model(config: RunConfig) -> Iterator[ConfigError]:
    for key, path in _models(config):
        place = Path(path).expanduser()
        if place.is_dir() or _is_hub_id(path):
            continue
        what = "it is a file" if place.is_file() else f"there is no folder {os.path.abspath(place)}"
        yield ConfigError(
            f"{key} is {path}: {what}",
            "it is a folder, relative to the working directory, or a hub id, owner/name",
            f"set {key}",
        )


def _is_hub_id(path: str) -> bool:
    return bool(_HUB_ID.fullmatch(path) or _WITHOUT_OWNER.fullmatch(path) or _is_cached(path))


def _is_cached(path: str) -> bool:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    return (cache / f"models--{path.replace('/', '--')}").is_dir()


def _data_files(config: RunConfig) -> list[tuple[str, Path]]:
    named = {"data.train": config.data.train, "data.eval": config.data.eval}
    several = {key: (paths,) if isinstance(paths, str) else paths or () for key, paths in named.items()}
    return [(key, Path(path)) for key, paths in several.items() for path in paths]


def _data(config: RunConfig) -> Iterator[ConfigError]:
    for key, file in _data_files(config):
        if fault := file_fault(key, file):
            yield ConfigError(*fault)
    template = config.data.chat_template
    if template and not Path(template).is_file():
        yield ConfigError(
            f"data.chat_template: no file {template} ({os.path.abspath(template)})",
            "the chat template is a Jinja file, relative to the working directory",
            "correct the path in data.chat_template",
        )


def _template(config: RunConfig) -> Iterator[ConfigError]:
    """Conversations, and a tokenizer whose files have no template to render them by."""
    folder = Path(config.model.tokenizer or config.model.path or "").expanduser()
    settings = folder / "tokenizer_config.json"
    if config.data.chat_template or config.model.trust_remote_code or not settings.is_file():
        return
    if any((folder / name).exists() for name in _TEMPLATE_FILES) or b'"chat_template"' in settings.read_bytes():
        return
    for key, file in _data_files(config):
        if not file_fault(key, file) and "messages" in first_keys(file):
            yield ConfigError(
                f"{key}: {file} holds conversations, and the tokenizer in {folder} has no chat template",
                "records of messages are rendered by a chat template",
                "set data.chat_template to a Jinja file, or model.tokenizer to an instruct model's",
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
