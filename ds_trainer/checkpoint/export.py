"""Writes a model as a plain Hugging Face folder: streamed, written aside, checked, then renamed into place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import chain
from pathlib import Path

import torch
from accelerate.utils import convert_file_size_to_int
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save

from ds_trainer.errors import MachineError, ModelError
from ds_trainer.files import partial_path, sync
from ds_trainer.host.free_space import space_fault
from ds_trainer.models.checkpoint_weights import CheckpointWeights
from ds_trainer.models.conversions import Conversion, export_conversions, tied_groups
from ds_trainer.models.load_weights import persistent_buffers
from ds_trainer.models.pretrained import set_use_cache
from ds_trainer.models.skeleton import meta_copy, written_class

_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")


def export_model(
    parameters: Iterator[tuple[str, torch.Tensor]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: str,
    *,
    dtype: torch.dtype,
    max_shard_size: str,
    is_writer: bool,
    buffers: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Writes a folder that `from_pretrained` loads with no missing and no unexpected key.

    An earlier export at `folder` is replaced only when the new one is whole and checked; other files in it are kept.
    The host holds one shard at a time.

    Args:
        parameters: Every parameter, whole, a tied one once; taking the next one is a collective, so every rank drains
            it, even the one that fails to write.
        model: The model; its class, config and generation config are used, not its parameters.
        tokenizer: Written beside the model, with its chat template.
        folder: Where to.
        dtype: Format of floating-point parameters.
        max_shard_size: Largest safetensors file, such as `5GB`.
        is_writer: Whether this rank writes.
        buffers: Every persistent buffer; None: the model's own.

    Raises:
        MachineError: On the writer: the disk is full or the folder not writable.
        ModelError: On the writer: a value is not finite, or what was written is not what the class expects.
    """
    try:
        if is_writer:
            kept = dict(persistent_buffers(model)) if buffers is None else buffers
            tensors = chain(parameters, ((name, buffer.cpu()) for name, buffer in kept.items()))
            _write(tensors, model, tokenizer, Path(folder), dtype, convert_file_size_to_int(max_shard_size))
    finally:
        for _ in parameters:
            pass


def _write(
    tensors: Iterable[tuple[str, torch.Tensor]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    dtype: torch.dtype,
    shard_bytes: int,
) -> None:
    aside = partial_path(folder)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        meta_model = meta_copy(model, dtype)
        _require_space(aside, meta_model)
        writer = _ShardWriter(aside, shard_bytes)
        for name, tensor in _to_checkpoint_form(tensors, model, meta_model):
            writer.add(name, tensor)
        writer.finish()
        write_config_and_tokenizer(model, tokenizer, aside, dtype)
        _check(aside, meta_model)
        for path in [*aside.iterdir(), aside]:
            sync(path)
        _publish(aside, folder)
    except (OSError, SafetensorError) as error:
        raise MachineError(
            f"the model cannot be written to {folder}: {error}",
            "an export needs a writable folder with room for the whole model; what was there before is untouched",
            "free space, or set run.output_dir to another drive",
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _to_checkpoint_form(
    tensors: Iterable[tuple[str, torch.Tensor]], model: PreTrainedModel, meta_model: PreTrainedModel
) -> Iterator[tuple[str, torch.Tensor]]:
    """Reverts what transformers did on load; holds only tensors whose partners are still to come."""
    kept = _kept_names(meta_model)
    dtypes = {name: tensor.dtype for name, tensor in meta_model.state_dict().items()}
    conversions = _conversions(model, meta_model)
    by_source = {name: conversion for conversion in conversions for _, name in conversion.sources}
    waiting: dict[str, torch.Tensor] = {}
    for given, tensor in tensors:
        name = kept.get(given, given)
        if name not in by_source:  # The class says not to save it.
            continue
        waiting[name] = tensor.to(dtypes[name])
        conversion = by_source[name]
        if all(source in waiting for _, source in conversion.sources):
            made = conversion.run(waiting.pop, meta_model)
            yield from made.items()


def _conversions(model: PreTrainedModel, meta_model: PreTrainedModel) -> list[Conversion]:
    """Conversions for everything that the class saves, a tied parameter once."""
    kept, ignored = _kept_names(meta_model), set(model._keys_to_ignore_on_save or ())
    names = [name for name in meta_model.state_dict() if kept.get(name, name) == name and name not in ignored]
    return export_conversions(model, names)


def _kept_names(meta_model: PreTrainedModel) -> dict[str, str]:
    """Parameter name -> the name under which transformers writes it, which differs for the copies of a tied one."""
    kept = {name: name for name, _ in meta_model.named_parameters(remove_duplicate=False)}
    copies = meta_model.get_expanded_tied_weights_keys(all_submodels=True)
    for names in tied_groups(meta_model):
        main = next((name for name in names if name not in copies), names[0])
        kept |= dict.fromkeys(names, main)
    return kept


class _ShardWriter:
    """Fills safetensors files of at most `shard_bytes` in the order of arrival, under Hugging Face's names."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._shard: dict[str, torch.Tensor] = {}
        self._filled = 0
        self._files: list[list[str]] = []
        self._total_bytes = 0
        self._total_parameters = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes one tensor."""
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ModelError(
                f"{name} holds values that are NaN or infinite",
                "an export holds finite values only; what was there before is untouched",
                "lower optimizer.lr, set optimizer.max_grad_norm, or export in a format with a wider range",
            )
        if self._shard and self._filled + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._shard[name] = tensor.contiguous()
        self._filled += tensor.nbytes
        self._total_bytes += tensor.nbytes
        self._total_parameters += tensor.numel()

    def finish(self) -> None:
        """Writes what is left, and the index where there is more than one file."""
        self._flush()
        count = len(self._files)
        if count == 1:
            self._part(0).rename(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._files):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        metadata = {"total_parameters": self._total_parameters, "total_size": self._total_bytes}
        index = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True)
        (self._folder / "model.safetensors.index.json").write_text(index + "\n")

    def _flush(self) -> None:
        save_file(self._shard, self._part(len(self._files)), metadata={"format": "pt"})
        self._files.append(list(self._shard))
        self._shard, self._filled = {}, 0

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}"


def write_config_and_tokenizer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path, dtype: torch.dtype
) -> None:
    """Writes everything of a Hugging Face folder but the weights: config, generation config, code, tokenizer.

    Args:
        model: The model.
        tokenizer: Its tokenizer, if it has one.
        folder: An existing folder.
        dtype: Format of the weights, named in the config.
    """
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    config = deepcopy(model.config)
    config.architectures = [written_class(model).__name__]
    config.dtype = str(dtype).removeprefix("torch.")
    set_use_cache(config, getattr(model, "source_use_cache", True))
    if model.is_remote_code():
        custom_object_save(meta_copy(model), folder, config=config)  # type: ignore[arg-type]  # Annotated as a dict, used as a config.
    config.save_pretrained(folder)
    if model.can_generate():
        # Not save_pretrained: it refuses settings that real checkpoints ship, such as a temperature without sampling.
        model.generation_config.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])


def _require_space(folder: Path, meta_model: PreTrainedModel) -> None:
    if fault := space_fault(folder, sum(p.nbytes for p in meta_model.parameters())):
        raise OSError(f"it {fault}")


def _check(folder: Path, meta_model: PreTrainedModel) -> None:
    """Opens what was written as a new run would: no tensor may be missing, left over or of another shape."""
    try:
        left_over = CheckpointWeights(str(folder), meta_model).unexpected
        fault = f"it holds tensors without a place: {', '.join(left_over)}" if left_over else None
    except ModelError as error:
        fault = error.found
    if fault:
        raise ModelError(
            f"the export is not what {type(meta_model).__name__} loads: {fault}",
            "an export is published only when its class loads it whole; what was there before is untouched",
            "report this with the model's config.json: its parameters or transformers' conversions do not add up",
        )


def _publish(aside: Path, folder: Path) -> None:
    """Swaps the new folder in; files of the old one that are no weights and that the new one lacks move over."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if not folder.exists():
        aside.rename(folder)
        return
    folder.rename(old)
    try:
        aside.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    for path in old.iterdir():
        if not path.name.endswith(_WEIGHT_SUFFIXES) and not (folder / path.name).exists():
            path.rename(folder / path.name)
    shutil.rmtree(old)
