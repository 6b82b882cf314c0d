"""Resolves `model.path` to a folder on this machine. Pure."""

from __future__ import annotations

import os
from pathlib import Path

from ds_trainer.errors import ModelError
from ds_trainer.planning.checkpoint_spec import read_spec

_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]


def resolve_folder(path: str, revision: str | None = None, allow_pickle: bool = False) -> str:
    """The folder of a checkpoint: `path` itself where it is one, else the local copy of a hub id.

    A complete copy in the Hugging Face cache is used without a request to the network.

    Args:
        path: Folder or hub id.
        revision: Branch, tag or commit of a hub id.
        allow_pickle: Fetch pickled weights too.

    Raises:
        ModelError: It is neither a folder nor a hub id that the cache or the network has.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return str(local)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*_FILES, "*.bin"] if allow_pickle else _FILES
    try:
        folder = snapshot_download(path, revision=revision, allow_patterns=patterns, local_files_only=True)
        read_spec(folder)
        return folder
    except (LocalEntryNotFoundError, ModelError):
        pass  # The cache has nothing, or only some files, such as the tokenizer.
    except HFValidationError:
        raise _not_found(
            path, f"there is no folder {os.path.abspath(local)}, and it does not have the form of a hub id"
        ) from None
    try:
        return snapshot_download(path, revision=revision, allow_patterns=patterns)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise _not_found(
            path,
            f"there is no folder {os.path.abspath(local)}, the local cache has no such model, "
            f"and the hub says: {lines[0]}",
        ) from error


def _not_found(path: str, why: str) -> ModelError:
    return ModelError(
        f"model.path is {path!r}: {why}",
        "model.path names an existing folder, or a hub id (`owner/name`) that is cached or can be downloaded",
        "set model.path to a checkpoint's folder; for a hub id check model.revision, the network and `hf auth login`",
    )
