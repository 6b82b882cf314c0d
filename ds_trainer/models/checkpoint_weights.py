"""Reads a Hugging Face checkpoint under the model's names: only the requested slices, one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from ds_trainer.errors import ModelError
from ds_trainer.layout import ParameterSlice, TensorSlice, rows_covering
from ds_trainer.log import warn_once
from ds_trainer.models.conversions import Conversion, load_conversions, tied_groups
from ds_trainer.models.lazy_tensor import Fill, LazyTensor, NotRecordedError
from ds_trainer.models.meta_model import meta_copy
from ds_trainer.models.new_weights import NewWeights
from ds_trainer.models.weight_source import WeightSource
from ds_trainer.planning.checkpoint_spec import pickled_files, read_headers, safetensors_files

_COMPARED_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file that is mapped into memory; indexing `data` touches only the pages of those rows."""

    shape: tuple[int, ...]
    data: Any

    @property
    def dtype(self) -> torch.dtype:
        return (self.data[:0] if self.shape else self.full()).dtype

    def full(self) -> torch.Tensor:
        return self.data[...]

    def flat(self, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of the row-major flattened tensor."""
        if not self.shape:
            return self.full().view(1)[start:stop]
        first, last = rows_covering(self.shape, start, stop)
        offset = first * prod(self.shape[1:])
        return self.data[first:last].flatten()[start - offset : stop - offset]

    def read_slice(self, wanted: TensorSlice) -> torch.Tensor:
        return self.data[wanted.index] if self.shape else self.full()

    def lazy(self) -> LazyTensor:
        return LazyTensor(self.shape, self.dtype, lambda out, wanted: out.copy_(self.read_slice(wanted)))


@dataclass(frozen=True)
class _Converted:
    """A tensor that a conversion makes from others on load."""

    lazy: LazyTensor
    operations: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.lazy.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.lazy.dtype

    def full(self) -> torch.Tensor:
        return self.lazy.read_slice(TensorSlice.whole(self.shape))

    def flat(self, start: int, stop: int) -> torch.Tensor:
        self._warn_if_not_sliceable()
        out = torch.empty(stop - start, dtype=self.dtype)
        for part in ParameterSlice.flat_range("", self.shape, start, stop).parts():
            self.lazy.fill(part.of(out), part.slice)
        return out

    def read_slice(self, wanted: TensorSlice) -> torch.Tensor:
        self._warn_if_not_sliceable()
        return self.lazy.read_slice(wanted)

    def _warn_if_not_sliceable(self) -> None:
        if not self.lazy.sliceable:
            warn_once(f"tensors made by {self.operations} on load are read in full by every rank, one at a time")


class CheckpointWeights(WeightSource):
    """A `WeightSource` over a Hugging Face folder.

    Attributes:
        unexpected: Names of tensors that the model does not have.
        ignored: Names of those that its class says it does not need.
        num_stored: Tensors in the folder.

    Args:
        folder: The checkpoint.
        model: Skeleton of the model to load. Its `_weight_conversions` is set, so that an export writes the names of
            this checkpoint.
        allow_pickle: Read `pytorch_model.bin` where there are no safetensors.
        tensors: What the folder would hold, instead of what it holds; on meta where only names and shapes matter.
        new: Which parameters are initialised where the folder lacks them; None: none.

    Raises:
        ModelError: The checkpoint lacks another tensor, holds one of another shape or two different values for a tied
            one, is truncated, or is pickled and `allow_pickle` is off.
    """

    def __init__(
        self,
        folder: str,
        model: PreTrainedModel,
        allow_pickle: bool = False,
        tensors: Mapping[str, torch.Tensor] | None = None,
        new: NewWeights | None = None,
    ) -> None:
        self._folder = folder
        self._meta_model = meta_copy(model)
        if tensors is not None:
            self._files = {name: _Stored(tuple(tensor.shape), tensor) for name, tensor in tensors.items()}
        else:
            self._files = (
                _open_safetensors(folder) if safetensors_files(folder) else _open_pickled(folder, allow_pickle)
            )
        conversions, unexpected, used = load_conversions(self._meta_model, self._files)
        model._weight_conversions = used  # type: ignore[assignment]  # As transformers does on load.
        self._tensors: dict[str, _Stored | _Converted] = {}
        for conversion in conversions:
            if conversion.converter is None:
                self._tensors[conversion.target] = self._files[conversion.sources[0][1]]
            else:
                self._tensors |= self._converted(conversion)
        self._check_shapes()
        self._resolve_ties()
        self._buffers = {n: b for n, b in model.named_buffers() if n in self._meta_model.state_dict()}
        if new is not None:
            self._initialize(new)
        self._check_missing()
        self.unexpected = _not_ignored(unexpected, _unexpected_patterns(self._meta_model))
        self.ignored = [name for name in unexpected if name not in self.unexpected]
        self.num_stored = len(self._files)
        if self.unexpected:
            warn_once(f"{folder} holds tensors that {type(model).__name__} does not have: {_some(self.unexpected)}")

    def view(self, name: str, flat: tuple[int, int] | None = None) -> torch.Tensor:
        """The value of a parameter or persistent buffer, as in `ds_trainer.models.weight_source.WeightSource`.

        With `flat` only the rows that hold the range are read.
        """
        tensor = self._tensors.get(name)
        if tensor is None:  # A buffer that old checkpoints lack, computed from the config.
            value = self._buffers[name]
            return value if flat is None else value.flatten()[flat[0] : flat[1]]
        return tensor.full() if flat is None else tensor.flat(*flat)

    def read_slice(self, name: str, wanted: TensorSlice) -> torch.Tensor:
        """See `WeightSource`."""
        tensor = self._tensors.get(name)
        return super().read_slice(name, wanted) if tensor is None else tensor.read_slice(wanted)

    def stored_dtype(self, name: str) -> torch.dtype:
        """Dtype of the tensor in the file; of a merged one, the dtype that its sources promote to."""
        tensor = self._tensors.get(name)
        return self._buffers[name].dtype if tensor is None else tensor.dtype

    def _converted(self, conversion: Conversion) -> dict[str, _Converted]:
        """The tensors that a conversion makes, lazy."""
        try:
            made: Mapping[str, Any] = conversion.run(lambda source: self._files[source].lazy(), self._meta_model)
        except NotRecordedError:
            shapes = conversion.run(lambda source: self._files[source].full().to("meta"), self._meta_model)
            made = {
                n: LazyTensor(tuple(t.shape), t.dtype, self._redo(conversion, n), sliceable=False)
                for n, t in shapes.items()
            }
        return {name: _Converted(tensor, conversion.operations) for name, tensor in made.items()}

    def _redo(self, conversion: Conversion, name: str) -> Fill:
        def fill(out: torch.Tensor, wanted: TensorSlice) -> None:
            out.copy_(conversion.run(lambda source: self._files[source].full(), self._meta_model)[name][wanted.index])

        return fill

    def _check_shapes(self) -> None:
        expected = {name: tuple(t.shape) for name, t in self._meta_model.state_dict().items()}
        wrong = [
            f"{name} {list(tensor.shape)} instead of {list(expected[name])}"
            for name, tensor in self._tensors.items()
            if tensor.shape != expected[name]
        ]
        if wrong:
            raise ModelError(
                f"{self._folder} holds tensors of other shapes than its config.json announces: {_some(wrong)}",
                "every tensor has the shape that the model's class gives it",
                "set model.path to a checkpoint whose config.json and weights belong together",
            )

    def _resolve_ties(self) -> None:
        """Makes every name of a tied parameter read the one tensor that the checkpoint holds."""
        for names in tied_groups(self._meta_model):
            present = [name for name in names if name in self._tensors]
            for other in present[1:]:
                if not self._equal(present[0], other):
                    raise ModelError(
                        f"config.json of {self._folder} ties {present[0]} and {other}, but their stored values differ",
                        "a tied tensor has one value; taking either would silently drop the other",
                        "set tie_word_embeddings to false in config.json, or remove the wrong tensor from the file",
                    )
            for name in names if present else []:
                self._tensors[name] = self._tensors[present[0]]

    def _equal(self, name: str, other: str) -> bool:
        a, b = self._tensors[name], self._tensors[other]
        numel = prod(a.shape)
        ranges = ((start, min(start + _COMPARED_AT_ONCE, numel)) for start in range(0, numel, _COMPARED_AT_ONCE))
        return all(torch.equal(a.flat(*each), b.flat(*each)) for each in ranges)

    def _initialize(self, new: NewWeights) -> None:
        names = new.among(self._missing_parameters(), self._meta_model)
        values = new.values(names, self._meta_model)
        self._tensors |= {name: _Stored(tuple(value.shape), value) for name, value in values.items()}
        if names:
            warn_once(f"{self._folder} lacks {', '.join(names)}: initialised from run.seed, to be trained")

    def _missing_parameters(self) -> list[str]:
        return [name for name, _ in self._meta_model.named_parameters() if name not in self._tensors]

    def _check_missing(self) -> None:
        buffers = [name for name in self._buffers if name not in self._tensors]
        missing = self._missing_parameters() + _not_ignored(
            buffers, self._meta_model._keys_to_ignore_on_load_missing or ()
        )
        if missing:
            raise ModelError(
                f"{self._folder} lacks {len(missing)} tensors of {type(self._meta_model).__name__}: {_some(missing)}",
                "parameters are read from the checkpoint, but for a task head's and those in model.initialize_missing",
                "set model.path to a complete checkpoint, or model.auto_class to the class it was saved from; "
                "model.initialize_missing names tensors to begin anew",
            )


def _open_safetensors(folder: str) -> dict[str, _Stored]:
    headers = read_headers(folder)
    handles = {file: safe_open(Path(folder, file), framework="pt") for file in {t.file for t in headers.values()}}
    return {name: _Stored(t.shape, handles[t.file].get_slice(name)) for name, t in headers.items()}


def _open_pickled(folder: str, allowed: bool) -> dict[str, _Stored]:
    files = pickled_files(folder)
    if files and not allowed:
        raise ModelError(
            f"{folder} holds only pickled weights ({', '.join(files)})",
            "pickled files can run code when they are read, so they are refused unless allowed",
            "set model.allow_pickle to true if you trust them, or convert them to safetensors",
        )
    if not files:
        read_headers(folder)  # Raises: no weights at all.
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors |= torch.load(Path(folder, file), map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, EOFError, ValueError, UnpicklingError) as error:
            raise ModelError(
                f"{file} in {folder} cannot be read: {str(error).splitlines()[0]}",
                "pickled weights are read without running code and without holding the file in memory",
                "download the file again, or convert the checkpoint to safetensors",
            ) from error
    return {name: _Stored(tuple(t.shape), t) for name, t in tensors.items()}


def _unexpected_patterns(model: PreTrainedModel) -> list[str]:
    """Patterns of checkpoint names that a model may lack: the class's list, and buffers that older versions saved."""
    buffers = " ".join(name for name, _ in model.named_buffers())
    patterns = list(model._keys_to_ignore_on_load_unexpected or ())
    if "rotary_emb.inv_freq" in buffers:
        patterns.append(r"rotary_emb\.inv_freq")
    if "position_ids" in buffers:
        patterns.append(r"(^|\.)position_ids$")
    return patterns


def _not_ignored(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:10])
    return shown if len(names) <= 10 else f"{shown} and {len(names) - 10} more"
