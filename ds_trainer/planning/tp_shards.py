"""What each tensor-parallel rank will hold of a checkpoint, by `config.json` and the safetensors headers alone. Pure.

A checkpoint's names are not always the model's: what the plan does not find here is checked when the model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from ds_trainer.planning.checkpoint_spec import ModelSpec, TensorInfo
from ds_trainer.planning.tp_divisibility import Unit
from ds_trainer.planning.tp_plan import TensorPlan

_BY_HEAD = ("colwise", "qkv_colwise", "rowwise")
"""Styles under which a projection of an attention module is sharded between heads."""

COLUMN = ("colwise", "qkv_colwise", "colwise_gather_output", "packed_colwise")
ROW = ("rowwise", "rowwise_split_input", "packed_rowwise")
EMBEDDING = ("embedding_rowwise", "embedding_colwise")
_EXPERTS = "moe_tp_experts"
_EXPERT_WIDTHS = ("moe_intermediate_size", "intermediate_size")
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class TensorShards:
    """How a plan shards a checkpoint.

    Args:
        spec: The checkpoint.
        plan: The plan of its model type.
    """

    spec: ModelSpec
    plan: TensorPlan

    @cached_property
    def names_agree(self) -> bool:
        """Whether the plan finds layers by the checkpoint's names, so that it is known here what is sharded."""
        tensors = self.spec.distinct().items()
        return any(self._style(name) is not None for name, tensor in tensors if not self._is_vocabulary(tensor))

    @property
    def shards_anything(self) -> bool:
        """Whether any tensor of the checkpoint is sharded."""
        return any(True for _ in self._planned())

    def units(self) -> list[Unit]:
        """Everything that is assigned undivided, heads first; vocabularies and gathered outputs are padded instead."""
        found: dict[Unit, None] = {}
        for name, tensor, style in self._planned():
            if style != "colwise_gather_output" and not self._is_vocabulary(tensor):
                found |= dict.fromkeys(self._units_of(name, tensor, style))
        return sorted(found, key=lambda unit: not unit.name.endswith("heads"))

    def elements(self, tp: int) -> tuple[int, int]:
        """Elements of one of `tp` ranks' shard of the model, and of its largest parameter; `tp` must be allowed."""
        sizes = self.sizes(tp)
        return sum(sizes.values()), self.spec.largest(sizes)

    def sizes(self, tp: int) -> dict[str, int]:
        """Elements of one of `tp` ranks' shard of every tensor of the checkpoint; `tp` must be allowed.

        Where the checkpoint has other names, all matrices count as sharded: a run must not be refused for want of
        memory that it does not need.
        """
        styles = {name: style for name, _, style in self._planned()}
        sizes = {}
        for name, tensor in self.spec.distinct().items():
            is_sharded = name in styles or (not self.names_agree and len(tensor.shape) > 1)
            sizes[name] = self._local_size(tensor, styles.get(name, ""), tp) if is_sharded else prod(tensor.shape)
        return sizes

    def table(self, tp: int) -> list[tuple[str, str, str]]:
        """What there is, how many in the full model, and how many on each of `tp` ranks."""
        rows = []
        for unit in self.units():
            replicas = unit.replicas(tp)
            shared = f" ({replicas} ranks hold the same)" if replicas > 1 else ""
            rows.append((unit.name, f"{unit.number}", f"{unit.per_rank(tp)}{shared}"))
        if experts := self._number(_NUM_EXPERTS):
            rows.append(("experts", f"{experts}", f"{experts}, 1/{tp} of each"))
        vocabulary = self.spec.vocab_size
        if vocabulary and any(self._is_vocabulary(tensor) for _, tensor, _ in self._planned()):
            rows_per_rank = -(-vocabulary // tp)
            padding = rows_per_rank * tp - vocabulary
            padded = f" ({padding} of {rows_per_rank * tp} are padding)" if padding else ""
            rows.append(("vocabulary", f"{vocabulary}", f"{rows_per_rank}{padded}"))
        rows.append(("parameters", f"{self.spec.num_parameters}", f"{self.elements(tp)[0]}"))
        return rows

    def _planned(self) -> Iterator[tuple[str, TensorInfo, str]]:
        """Name, tensor and style of what is sharded."""
        for name, tensor in self.spec.distinct().items():
            style = self._style(name)
            if style is None and self._is_vocabulary(tensor) and self._cuts_head:
                style = "embedding_rowwise"
            if style in (*COLUMN, *EMBEDDING, _EXPERTS) or (style in ROW and len(tensor.shape) > 1):
                yield name, tensor, style

    @property
    def _cuts_head(self) -> bool:
        """Whether the plan shards the head; an embedding, tied or not, that it does not name is then sharded alike."""
        entries = (entry for entry in (*self.plan.styles, *self.plan.override) if "*" not in entry)
        return any(self.plan.style_of(entry) in COLUMN for entry in entries)

    @cached_property
    def prefixes(self) -> tuple[str, ...]:
        """None, and what the class for language models puts before its body's names: a checkpoint may lack it."""
        entries = (entry for entry in self.plan.styles or self.plan.override if "." in entry)
        first = (f"{entry.partition('.')[0]}." for entry in entries)
        return tuple(dict.fromkeys(("", *(prefix for prefix in first if "*" not in prefix))))

    def _style(self, name: str) -> str | None:
        """Style by the plan."""
        if re.search(r"\.experts\.\d+\.", name) and _EXPERTS in self.plan.styles.values():
            return _EXPERTS
        module = re.sub(r"\.(weight|bias)$", "", name)
        for prefix in self.prefixes:
            if style := self.plan.style_of(prefix + module) or self.plan.style_of(prefix + name):
                return style
        return None

    def _is_vocabulary(self, tensor: TensorInfo) -> bool:
        return len(tensor.shape) == 2 and tensor.shape[0] == self.spec.vocab_size

    def _units_of(self, name: str, tensor: TensorInfo, style: str) -> Iterator[Unit]:
        heads, kv_heads = self._heads
        # The module that holds the layer, by its name within a block.
        module = re.split(r"\.\d+(?:\.|$)", name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[0])[-1]
        if style == _EXPERTS or "experts" in module.split("."):
            if width := self._number(_EXPERT_WIDTHS):
                yield Unit("features inside an expert", width)
        elif style in _BY_HEAD and "att" in module and heads:
            yield Unit("attention heads", heads)
            if kv_heads not in (None, heads):
                yield Unit("KV heads", kv_heads, repeats=True)
        else:
            yield Unit(f"features inside {module or 'a block'}", self._length(tensor, style))

    def _length(self, tensor: TensorInfo, style: str) -> int:
        """Length of the dimension that is sharded: not that of the residual stream, whichever way the matrix lies."""
        if len(tensor.shape) == 1:
            return tensor.shape[0]
        inner = [size for size in tensor.shape[-2:] if size != self.spec.hidden_size]
        return inner[0] if len(inner) == 1 else tensor.shape[-2 if style in COLUMN else -1]

    def _local_size(self, tensor: TensorInfo, style: str, tp: int) -> int:
        if self._is_vocabulary(tensor):
            return -(-tensor.shape[0] // tp) * tensor.shape[1]
        return -(-prod(tensor.shape) // tp) * (self._replicas(tensor, tp) if style == "colwise" else 1)

    def _replicas(self, tensor: TensorInfo, tp: int) -> int:
        """How many ranks hold the same shard of a projection to keys or values."""
        heads, kv_heads = self._heads
        if heads is None or kv_heads is None:
            return 1
        head_dim = self.spec.config.get("head_dim") or (self.spec.hidden_size or 0) // heads
        return Unit("KV heads", kv_heads, repeats=True).replicas(tp) if tensor.shape[0] == kv_heads * head_dim else 1

    @property
    def _heads(self) -> tuple[int | None, int | None]:
        """Heads of queries, and of keys and values."""
        return self._number(("num_attention_heads",)), self._number(("num_key_value_heads",))

    def _number(self, names: tuple[str, ...]) -> int | None:
        return next((number for name in names if isinstance(number := self.spec.config.get(name), int)), None)
