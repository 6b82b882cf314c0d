"""The tokenizer of a run: the one that the config names, or the checkpoint's."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ds_trainer.config.input_sections import ModelConfig
from ds_trainer.errors import ModelError
from ds_trainer.models.hub import resolve_folder
from ds_trainer.models.text_files import without_byte_order_marks

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def find_tokenizer(config: ModelConfig, folder: str | None, required: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer of the run; None where the data needs none and the checkpoint has none.

    Args:
        config: The config's model section.
        folder: The checkpoint; None: the model is an instance of the user's.
        required: Whether the data needs one; the checkpoint must have it then, if there is one.

    Raises:
        ModelError: Transformers cannot read a tokenizer there.
    """
    if config.tokenizer is not None:
        return load_tokenizer(config, config.tokenizer)
    if folder is not None and (required or any(Path(folder, name).is_file() for name in _FILES)):
        return load_tokenizer(config, folder)
    return None


def load_tokenizer(model_config: ModelConfig, folder: str) -> PreTrainedTokenizerBase:
    """The tokenizer of the run: `model.tokenizer`, or the checkpoint's.

    Raises:
        ModelError: Transformers cannot read a tokenizer there.
    """
    source = folder if model_config.tokenizer is None else resolve_folder(model_config.tokenizer)
    try:
        with without_byte_order_marks(source) as readable:
            tokenizer = AutoTokenizer.from_pretrained(readable, trust_remote_code=model_config.trust_remote_code)
        tokenizer.name_or_path = source
        return tokenizer
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(
            f"{source} holds no tokenizer that transformers can read: {str(error).strip().splitlines()[0]}",
            "text is tokenised by the checkpoint's tokenizer, or by the one that model.tokenizer names",
            "set model.tokenizer to a folder or hub id with a tokenizer",
        ) from error
