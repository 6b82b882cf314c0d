"""Tokenises files or a data set once, checks the samples, and caches them on disk for all processes and later runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HOME
from tqdm import tqdm

from ds_trainer.config.input_sections import DataConfig
from ds_trainer.data.build_once import StopCheck, build_once
from ds_trainer.data.encode import Encoded, encode
from ds_trainer.data.readers import Origin, Source, open_source
from ds_trainer.data.tokenized import DataStats, TokenizedDataset, write
from ds_trainer.errors import DataError, MachineError
from ds_trainer.loss import IGNORE_INDEX

FORMAT = 2
"""Part of the cache key: increase it when the same records would give other tokens or another file."""
NO_LIMIT = 10**9
"""Tokenizers without a limit give an astronomical one."""


def prepare(
    source: Any,
    tokenizer: Any,
    data_config: DataConfig,
    *,
    max_positions: int | None,
    vocab_size: int | None,
    what: str = "train",
) -> TokenizedDataset:
    """Tokenises a data set, or opens what an earlier call with the same content and settings left in the cache.

    Every process of a run calls this: the first one tokenises and shows a bar, the others wait on a lock file.

    Args:
        source: Paths of json, jsonl or parquet files, or a map-style data set of records (see `encode`).
        tokenizer: A Hugging Face tokenizer; None does for records of `input_ids`.
        data_config: The run's `data` section.
        max_positions: Longest sequence the model takes; None: no limit.
        vocab_size: Rows of the model's embedding; None: unchecked.
        what: `train`, `eval` or `test`, for texts.

    Raises:
        DataError: Missing or broken files, records of a wrong shape, no chat template where one is needed, ids beyond
            the embedding, no samples, nothing to learn, or too many samples truncated, dropped or left without labels.
        MachineError: The cache cannot be written.
        StopRequested: A signal has asked one of the processes to stop.
    """
    opened = open_source(source, what)
    template = read_chat_template(data_config.chat_template) if data_config.chat_template else None
    limit = _limit(tokenizer, data_config, max_positions)
    policy = (data_config.on_too_long, data_config.max_affected_fraction)
    key = _key(opened, _tokenizer_state(tokenizer), template, limit, vocab_size, policy)
    target = Path(data_config.cache_dir or Path(HF_HOME, "ds_trainer")) / key

    def build(folder: Path, check_stop: StopCheck) -> None:
        stats = DataStats()
        samples = _samples(opened, tokenizer, template, limit, data_config, vocab_size, what, stats, check_stop)
        write(folder, samples, stats)
        _check(stats, limit, data_config, _name(source, what))

    try:
        build_once(target, build)
    except OSError as error:
        raise MachineError(
            f"tokenising data.{what} into {target.parent} failed: {error}",
            "the tokenised data is kept on disk, at 8 bytes per token",
            "set data.cache_dir to a writable folder with enough free space",
        ) from error
    return TokenizedDataset(target)


def read_chat_template(path: str) -> str:
    """The Jinja text in a file.

    Raises:
        DataError: The file cannot be read.
    """
    try:
        return Path(path).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise DataError(
            f"data.chat_template: {path}: {reason}",
            "the chat template is a Jinja file in UTF-8",
            "correct the path in data.chat_template",
        ) from error


def _limit(tokenizer: Any, data_config: DataConfig, max_positions: int | None) -> int | None:
    """Longest sample in tokens: what the config says, else what model and tokenizer allow."""
    max_length = data_config.max_length
    if max_length and max_positions and max_length > max_positions:
        raise DataError(
            f"data.max_length is {max_length}, the model has {max_positions} positions",
            "a sample may not be longer than the model's positions",
            f"set data.max_length to at most {max_positions}",
        )
    bounds = [n for n in (max_positions, getattr(tokenizer, "model_max_length", None)) if n and n < NO_LIMIT]
    return max_length or min(bounds, default=None)


def _samples(
    source: Source,
    tokenizer: Any,
    template: str | None,
    limit: int | None,
    data_config: DataConfig,
    vocab_size: int | None,
    what: str,
    stats: DataStats,
    check_stop: StopCheck,
) -> Iterator[Encoded]:
    """Encodes, checks and shortens record by record, and counts what happens to each."""
    bar = tqdm(source.records(), desc=f"tokenising {what}", total=source.total, unit=" records", mininterval=0.5)
    for record, origin in bar:
        check_stop()
        stats.records += 1
        sample = encode(record, tokenizer, template, origin)
        if not sample.input_ids:
            stats.empty += 1
            continue
        _check_ids(sample, vocab_size, origin)
        if limit and len(sample.input_ids) > limit:
            if data_config.on_too_long == "error":
                raise DataError(
                    f"{origin} has {len(sample.input_ids)} tokens",
                    f"a sample has at most {limit} tokens, and data.on_too_long is 'error'",
                    "shorten the record, raise data.max_length, or set data.on_too_long to 'truncate' or 'drop'",
                )
            if data_config.on_too_long == "drop":
                stats.dropped += 1
                continue
            sample = Encoded(sample.input_ids[:limit], sample.labels[:limit])
            stats.add_truncated(sample)
        stats.add(sample, getattr(tokenizer, "eos_token_id", None))
        yield sample


def _check_ids(sample: Encoded, vocab_size: int | None, origin: Origin) -> None:
    used = [*sample.input_ids, *(label for label in sample.labels if label != IGNORE_INDEX)]
    if min(used) < 0:
        raise DataError(
            f"{origin}: token id {min(used)}",
            f"ids are 0 or more; a label may also be {IGNORE_INDEX}",
            f"fix the record: a token that is not learned has the label {IGNORE_INDEX}, and padding an attention_mask",
        )
    if vocab_size is not None and max(used) >= vocab_size:
        raise DataError(
            f"{origin}: token id {max(used)}, the model's embedding has {vocab_size} rows",
            f"ids lie between 0 and the number of rows less one; a label may also be {IGNORE_INDEX}",
            "set model.resize_embeddings to true, or model.tokenizer to the one that belongs to the checkpoint",
        )


def _name(source: Any, what: str) -> str:
    """Name of a data set in error texts: its key and, where it is read from files, their paths."""
    paths = [source] if isinstance(source, str | Path) else source
    if isinstance(paths, list | tuple) and paths and all(isinstance(path, str | Path) for path in paths):
        return f"data.{what} ({', '.join(map(str, paths))})"
    return f"data.{what}"


def _check(stats: DataStats, limit: int | None, data_config: DataConfig, name: str) -> None:
    """Refuses a data set that is empty, has nothing to learn, or lost too many records or tokens."""
    if stats.records == 0:
        raise DataError(f"{name} has no records", "a data set has at least one record", f"give {name} records")
    if stats.label_tokens == 0:
        reason, change = _why_nothing_is_learned(stats, limit)
        raise DataError(
            f"{name}: 0 of {stats.records} samples have supervised tokens: {reason}",
            "at least one token must be learned",
            change,
        )
    if stats.affected > data_config.max_affected_fraction * stats.records:
        raise DataError(
            f"{name}: {stats.affected} of {stats.records} records were truncated, left out or have no label ({stats}; "
            f"the maximum length is {limit})",
            f"at most data.max_affected_fraction = {data_config.max_affected_fraction} of them may be",
            "raise data.max_length, fix the records, or raise data.max_affected_fraction",
        )


def _why_nothing_is_learned(stats: DataStats, limit: int | None) -> tuple[str, str]:
    """The likely reason and what to change."""
    if stats.dropped or stats.truncated:
        lost = f"{stats.truncated} were truncated and {stats.dropped} dropped at {limit} tokens"
        return lost, "raise data.max_length, or shorten the prompts"
    if stats.empty == stats.records:
        return "all of them are empty", "give records with text"
    return (
        "the labels are all -100, no turn is the assistant's, or the chat template marks none",
        "check the records' labels and roles (a pad token equal to eos must not be masked by its id), "
        "and the {% generation %} markers of the chat template",
    )


def _tokenizer_state(tokenizer: Any) -> list[str]:
    """Everything that the tokens of a text depend on."""
    if tokenizer is None:
        return []
    if getattr(tokenizer, "is_fast", False):
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state = {
            name: part for name, part in state.items() if name not in ("truncation", "padding")
        }  # set by each call
    else:
        state = {"vocab": tokenizer.get_vocab(), "init": tokenizer.init_kwargs}
    chat_template, special = getattr(tokenizer, "chat_template", None), tokenizer.special_tokens_map
    return [json.dumps(part, sort_keys=True, default=str) for part in (state, chat_template, special)]


def _key(source: Source, *settings: Any) -> str:
    """Name of the cache folder."""
    text = json.dumps([FORMAT, source.fingerprint, *settings], default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
