"""Writes a model as a plain Hugging Face folder: streamed to a temporary folder, checked, then renamed."""

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

from ds_trainer.checkpoint.checkpoint_form import CheckpointNames, to_checkpoint_form
from ds_trainer.checkpoint.source_files import carry_source_files
from ds_trainer.errors import MachineError, ModelError
from ds_trainer.files import apply_umask, partial_path, sync
from ds_trainer.host.free_space import space_fault
from ds_trainer.models.checkpoint_weights import CheckpointWeights
from ds_trainer.models.load_weights import persistent_buffers
from ds_trainer.models.meta_model import meta_copy, written_class
from ds_trainer.models.pretrained import set_use_cache

_CLASSES_RAISE = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, ImportError)
"""What classes of transformers and of users raise where they do not fit what they are to write."""
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

    An earlier export at `folder` is replaced only once the new one is complete and checked; its other files are kept.
    The host holds one shard at a time.

    Args:
        parameters: Every parameter in full, a tied one once. Taking the next one is a collective, so every rank
            consumes all of them, even a writer that fails.
        model: The model; its class, config and generation config are used, not its parameters.
        tokenizer: Written beside the model, with its chat template.
        folder: The folder to write.
        dtype: Dtype of floating-point parameters.
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
    partial = partial_path(folder)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        meta_model = meta_copy(model, dtype)
        _require_space(partial, meta_model)
        writer = _WeightFiles(partial, shard_bytes)
        for name, tensor in to_checkpoint_form(tensors, model, meta_model):
            writer.add(name, tensor)
        writer.finish()
        write_config_and_tokenizer(model, tokenizer, partial, dtype)
        _check(partial, meta_model)
        for path in [*partial.iterdir(), partial]:
            sync(path)
        _publish(partial, folder)
    except (OSError, SafetensorError) as error:
        raise MachineError(
            f"the model cannot be written to {folder}: {error}",
            "an export needs a writable folder with free space for the full model; an earlier export is untouched",
            "free space, or set run.output_dir to another drive",
        ) from error
    except _CLASSES_RAISE as error:  # On all ranks, which can then save what has been trained.
        raise ModelError(
            f"{written_class(model).__name__} cannot be exported: {type(error).__name__}: {error}",
            "conversions, config and tokenizer are those of the model's own classes; an earlier export is untouched",
            "report this with the traceback that --debug shows",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class _WeightFiles:
    """Fills safetensors files of at most `shard_bytes` in the order of `add`, under Hugging Face's names."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._shard: dict[str, torch.Tensor] = {}
        self._filled = 0
        self._files: list[list[str]] = []
        self._total_bytes = 0
        self._total_parameters = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor; writes the current file first where it would become too large.

        Raises:
            ModelError: A value is not finite.
        """
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ModelError(
                f"{name} holds values that are NaN or infinite",
                "an export holds finite values only; an earlier export is untouched",
                "lower optimizer.lr, set optimizer.max_grad_norm, or export in a dtype with a wider range",
            )
        if self._shard and self._filled + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._shard[name] = tensor.contiguous()
        self._filled += tensor.nbytes
        self._total_bytes += tensor.nbytes
        self._total_parameters += tensor.numel()

    def finish(self) -> None:
        """Writes the last file, and the index where there are several."""
        self._flush()
        count = len(self._files)
        if count == 1:
            self._numbered(0).rename(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._files):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._numbered(number).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        metadata = {"total_parameters": self._total_parameters, "total_size": self._total_bytes}
        index = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True)
        (self._folder / "model.safetensors.index.json").write_text(index + "\n")

    def _flush(self) -> None:
        path = self._numbered(len(self._files))
        save_file(self._shard, path, metadata={"format": "pt"})
        apply_umask(path)
        self._files.append(list(self._shard))
        self._shard, self._filled = {}, 0

    def _numbered(self, number: int) -> Path:
        return self._folder / f"part-{number}"


def write_config_and_tokenizer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path, dtype: torch.dtype
) -> None:
    """Writes a Hugging Face folder without its weights: config, generation config, code, tokenizer, processors.

    Args:
        model: The model.
        tokenizer: Its tokenizer, if it has one.
        folder: An existing folder.
        dtype: Dtype of the weights, named in the config.
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
    carry_source_files(model, folder)


def _require_space(folder: Path, meta_model: PreTrainedModel) -> None:
    if fault := space_fault(folder, sum(p.nbytes for p in meta_model.parameters())):
        raise OSError(f"it {fault}")


def _check(folder: Path, meta_model: PreTrainedModel) -> None:
    """Opens the written folder as a new run would: no tensor may be missing, unexpected or of another shape."""
    if fault := _load_fault(str(folder), meta_model):
        raise ModelError(
            f"the export is not what {type(meta_model).__name__} loads: {fault}",
            "an export is published only if its class loads it completely; an earlier export is untouched",
            "report this with the model's config.json: its parameters or transformers' conversions do not add up",
        )


def _load_fault(
    folder: str, meta_model: PreTrainedModel, tensors: Mapping[str, torch.Tensor] | None = None
) -> str | None:
    """What the model's class lacks or has too much in a checkpoint, as text; None: it loads it completely."""
    try:
        unexpected = CheckpointWeights(folder, meta_model, tensors=tensors).unexpected
    except ModelError as error:
        return error.found
    return f"it holds unexpected tensors: {', '.join(unexpected)}" if unexpected else None


def prove_export(model: PreTrainedModel) -> None:
    """Makes the export of a model by names and shapes alone, so that it does not fail after the training.

    Args:
        model: The full model, with or without values.

    Raises:
        ModelError: A folder of it would not be what its class loads.
    """
    with torch.random.fork_rng(devices=[]):  # Some constructors draw values.
        meta_model = _from_config_alone(model)
    names = CheckpointNames(meta_model)
    by_name: dict[str, list[str]] = {}
    for given, _ in model.named_parameters():
        by_name.setdefault(names.of(given), []).append(given)
    if strangers := [given[0] for name, given in by_name.items() if name not in names.known]:
        raise _not_exportable(model, f"has {len(strangers)} parameters that its class lacks: {_some(strangers)}")
    if twice := [" and ".join(given) for given in by_name.values() if len(given) > 1]:
        raise _not_exportable(model, f"has values of their own for what its config ties: {_some(twice)}")
    tensors = chain(model.named_parameters(), persistent_buffers(model))
    made = dict(to_checkpoint_form(((name, tensor.detach().to("meta")) for name, tensor in tensors), model, meta_model))
    if fault := _load_fault("its export", meta_model, made):
        raise _not_exportable(model, f"would be exported as what its class does not load: {fault}")


def _from_config_alone(model: PreTrainedModel) -> PreTrainedModel:
    try:
        return meta_copy(model)
    except TypeError as error:
        raise _not_exportable(model, f"cannot be built from its config alone: {error}") from error


def _not_exportable(model: PreTrainedModel, what: str) -> ModelError:
    return ModelError(
        f"the model {what}",
        f"the export is a folder that {written_class(model).__name__}.from_pretrained loads with no tensor missing",
        "set checkpoint.export to false and save the model yourself, or train a model that its class and config build",
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _publish(partial: Path, folder: Path) -> None:
    """Replaces the old folder by the new one, which takes over files other than weights that it lacks."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if not folder.exists():
        partial.rename(folder)
        return
    folder.rename(old)
    try:
        partial.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    for path in old.iterdir():
        if not path.name.endswith(_WEIGHT_SUFFIXES) and not (folder / path.name).exists():
            path.rename(folder / path.name)
    shutil.rmtree(old)
