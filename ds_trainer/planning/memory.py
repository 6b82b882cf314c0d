"""Bytes per parameter that a rank really keeps under ZeRO, beside what the ZeRO paper counts. Pure.

The sizes were read in DeepSpeed 0.19.8's source and measured at 1, 2 and 4 ranks: unique storages of all live
tensors, with communication buckets, swap buffers, activations and gathered parameters kept out or near zero. Buckets
and swap buffers are set in elements rather than by the model: see `ds_trainer.config.memory_needs`. Nor is what
depends on the largest parameter counted: at stages 1 and 2 the gradient of one that lies across two ranks' shards is
kept in full, and optimizer offload has two staging buffers of its size. Under tensor and pipeline parallelism the model
is what one rank holds of it.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_MOMENTS = {"adamw": 2, "adam": 2, "lion": 1, "sgd": 0, "adafactor": 0}

Place = Literal["device", "host", "nvme"]
Offload = Literal["none", "cpu", "nvme"]
_PLACES: dict[str, Place] = {"none": "device", "cpu": "host", "nvme": "nvme"}


@dataclass(frozen=True)
class MemoryItem:
    """One kind of tensor that a rank keeps.

    Args:
        name: What it is.
        size: Bytes per parameter of the model.
        place: Where it lies; `device` is host memory too where the device is the CPU.
        lasting: False when it is freed by the optimizer step.
    """

    name: str
    size: float
    place: Place = "device"
    lasting: bool = True


@dataclass(frozen=True)
class MemoryRow:
    """Bytes per parameter of the model on one rank.

    Args:
        items: What is kept; after the last backward all of it, after the step the lasting ones.
        transient: Bytes that the last backward needs on top, and frees before it ends.
        paper: What the ZeRO paper counts, with these dtypes.
        why: Why the two differ.
    """

    items: tuple[MemoryItem, ...]
    transient: float
    paper: float
    why: str

    @property
    def after_backward(self) -> float:
        """Bytes in device and host memory after the last backward of a step."""
        return sum(item.size for item in self.items if item.place != "nvme")

    @property
    def after_step(self) -> float:
        """Bytes in device and host memory after the optimizer step."""
        return sum(item.size for item in self.items if item.place != "nvme" and item.lasting)

    @property
    def peak(self) -> float:
        """The most bytes at any time, in device and host memory."""
        return self.after_backward + self.transient

    @property
    def host(self) -> float:
        """Bytes that lie in host memory where the device is a GPU."""
        return sum(item.size for item in self.items if item.place == "host")

    @property
    def nvme(self) -> float:
        """Bytes in swap files."""
        return sum(item.size for item in self.items if item.place == "nvme")


def moment_bytes(optimizer: str, momentum: bool = False) -> int:
    """Bytes of fp32 moments per parameter.

    Args:
        optimizer: Name as in `optimizer.name`.
        momentum: Whether sgd keeps a momentum.
    """
    return 4 * (1 if momentum and optimizer == "sgd" else _MOMENTS[optimizer])


def bytes_per_parameter(
    stage: int,
    dtype: str,
    grad_dtype: str,
    dp_size: int,
    optimizer: str = "adamw",
    offload_optimizer: Offload = "none",
    offload_param: Offload = "none",
    *,
    accumulation: int = 1,
    momentum: bool = False,
) -> MemoryRow:
    """The row of the table for one layout.

    Args:
        stage: ZeRO stage, 0 to 3.
        dtype: Of the forward and backward pass.
        grad_dtype: In which gradients are accumulated.
        dp_size: Ranks over which state is sharded.
        optimizer: Name as in `optimizer.name`.
        offload_optimizer: Where masters and moments live.
        offload_param: Where the parameters of stage 3 live.
        accumulation: Micro-batches per step; more than one costs a buffer in one cell (stage 2, host, one dtype).
        momentum: Whether sgd keeps a momentum.

    Example:
        Stage 2 in fp32 on 2 ranks keeps 4 + 16/2 bytes after the backward pass, and 4 + 12/2 after the step.
    """
    layout = _Layout(stage, dtype, grad_dtype, dp_size, offload_optimizer, offload_param, accumulation)
    moments = moment_bytes(optimizer, momentum)
    items = {0: _replicated, 1: _sharded_state, 2: _sharded_state, 3: _sharded_all}[stage](layout, moments)
    # Stage 1 reduces all gradients at the end of the last backward, and only then frees the other ranks' shards; sums
    # in another dtype than the gradients' it keeps in full, which `items` counts.
    transient = layout.grad_bytes if stage == 1 and not layout.is_mixed else 0
    row = MemoryRow(tuple(item for item in items if item.size), transient, _paper(layout, moments), _why(layout))
    return replace(row, why=f"as in the paper; {row.why}") if row.after_backward == row.paper else row


def ddp_bytes_per_parameter(
    dtype: str, optimizer: str = "adamw", *, gradient_as_bucket_view: bool = True, momentum: bool = False
) -> MemoryRow:
    """The row of DDP, which keeps full fp32 parameters, gradients and moments on every rank.

    Args:
        dtype: Of the forward and backward pass.
        optimizer: Name as in `optimizer.name`.
        gradient_as_bucket_view: Whether gradients lie in the buckets in which they are reduced, which are never freed;
            otherwise the buckets come on top.
        momentum: Whether sgd keeps a momentum.
    """
    row = bytes_per_parameter(0, dtype, "fp32", 1, optimizer, momentum=momentum)
    if not gradient_as_bucket_view:
        return row
    lasting = "gradients are views of DDP's buckets, which last"
    return replace(
        row,
        items=tuple(replace(item, lasting=True) for item in row.items),
        why=f"as in the paper; {lasting}" if dtype == "fp32" else f"{row.why}; {lasting}",
    )


def fsdp2_bytes_per_parameter(
    dtype: str,
    reduce_dtype: str,
    shards: int,
    optimizer: str = "adamw",
    *,
    reshard_after_forward: bool | int = True,
    cpu_offload: bool = False,
    accumulation: int = 1,
    momentum: bool = False,
) -> MemoryRow:
    """The row of FSDP2, which shards fp32 parameters, their gradients and moments.

    Args:
        dtype: Of the forward and backward pass.
        reduce_dtype: In which gradients are accumulated and reduced.
        shards: Ranks over which one replica of the model is sharded.
        optimizer: Name as in `optimizer.name`.
        reshard_after_forward: As in `fully_shard`.
        cpu_offload: Whether shards, gradients and moments lie on the host.
        accumulation: Micro-batches per step; before the last one every rank holds their full sums.
        momentum: Whether sgd keeps a momentum.
    """
    place: Place = "host" if cpu_offload else "device"
    items = [
        MemoryItem("fp32 parameters", 4 / shards, place),
        MemoryItem("moments", moment_bytes(optimizer, momentum) / shards, place),
        MemoryItem("fp32 gradients", 4 / shards, place, lasting=False),
    ]
    kept = 0.0 if reshard_after_forward is True else 1 / (reshard_after_forward or 1)
    sums = DTYPE_BYTES[reduce_dtype] if accumulation > 1 else 0
    # Both are freed group by group in the last backward, as the sharded gradients come about.
    transient = max(0.0, kept * DTYPE_BYTES[dtype] + sums - 4 / shards)
    stage = 3 if reshard_after_forward else 2
    paper = bytes_per_parameter(stage, dtype, reduce_dtype, shards, optimizer, momentum=momentum).paper
    why = [] if dtype == "fp32" else ["parameters are their own masters, and cast as they are gathered"]
    if not reshard_after_forward:
        why.append("gathered parameters are freed in the backward pass")
    return MemoryRow(tuple(item for item in items if item.size), transient, paper, "; ".join(why) or "as in the paper")


@dataclass(frozen=True)
class _Layout:
    """The arguments of `bytes_per_parameter` and what follows from them."""

    stage: int
    dtype: str
    grad_dtype: str
    ranks: int
    offload_optimizer: Offload
    offload_param: Offload
    accumulation: int

    @property
    def param_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def grad_bytes(self) -> int:
        return DTYPE_BYTES[self.grad_dtype]

    @property
    def is_mixed(self) -> bool:
        """Whether gradients are accumulated in another dtype than they are computed in."""
        return self.dtype != self.grad_dtype

    @property
    def is_autocast(self) -> bool:
        """Stage 0 runs bf16 with fp32 gradients under autocast: DeepSpeed has no other way."""
        return self.stage == 0 and self.is_mixed

    @property
    def is_bf16_optimizer(self) -> bool:
        """DeepSpeed routes this cell to its BF16_Optimizer rather than to ZeRO."""
        on_device = self.offload_optimizer == "none"
        return self.stage == 1 and self.dtype == "bf16" and self.grad_dtype == "fp32" and on_device


def _replicated(layout: _Layout, moments: int) -> list[MemoryItem]:
    if layout.is_autocast or layout.param_bytes == 4:
        return [MemoryItem("parameters", 4), MemoryItem("moments", moments), MemoryItem("gradients", 4, lasting=False)]
    items = [
        MemoryItem("parameters", layout.param_bytes),
        MemoryItem("fp32 masters", 4),
        MemoryItem("moments", moments),
    ]
    return [*items, MemoryItem("gradients", layout.grad_bytes, lasting=False)]


def _sharded_state(layout: _Layout, moments: int) -> list[MemoryItem]:
    n, place = layout.ranks, _PLACES[layout.offload_optimizer]
    items = [
        MemoryItem("parameters", layout.param_bytes),
        MemoryItem("fp32 masters", 4 / n, place),
        MemoryItem("moments", moments / n, place),
    ]
    if layout.is_bf16_optimizer:
        items += [MemoryItem("fp32 gradient sums", 4), MemoryItem("gradients", layout.param_bytes, lasting=False)]
    elif layout.offload_optimizer == "none":
        items += [MemoryItem("gradients", layout.grad_bytes / n, lasting=False)]
    else:
        items += [
            MemoryItem("fp32 gradients", 4 / n, "host"),
            MemoryItem("updated parameters on their way back", layout.param_bytes / n, "host"),
        ]
        if layout.is_mixed:
            items += [MemoryItem("gradient sums", layout.grad_bytes / (1 if layout.stage == 1 else n), lasting=False)]
        elif layout.stage == 2 and layout.accumulation > 1:
            items += [MemoryItem("gradient sums", layout.param_bytes / n, "host")]
    return items


def _sharded_all(layout: _Layout, moments: int) -> list[MemoryItem]:
    n, place = layout.ranks, _PLACES[layout.offload_optimizer]
    items = [
        MemoryItem("parameters", layout.param_bytes / n, _PLACES[layout.offload_param]),
        MemoryItem("fp32 masters", 4 / n, place),
        MemoryItem("moments", moments / n, place),
        MemoryItem("gradient sums", layout.grad_bytes / n, "device" if place == "device" else "host"),
    ]
    return items if place == "device" else [*items, MemoryItem("fp32 gradients", 4 / n, place)]


def _paper(layout: _Layout, moments: int) -> float:
    """Parameters, gradients and optimizer state, each divided by the ranks from its stage on."""
    state = moments + (4 if layout.param_bytes < 4 else 0)
    sizes = ((layout.param_bytes, 3), (layout.grad_bytes, 2), (state, 1))
    return sum(size / layout.ranks if layout.stage >= stage else size for size, stage in sizes)


def _why(layout: _Layout) -> str:
    if layout.stage == 0:
        return (
            f"{layout.dtype} runs under autocast on fp32 parameters, which need no masters"
            if layout.is_autocast
            else "gradients are freed by the step"
        )
    copies = "masters are a separate fp32 copy even of fp32 parameters"
    if layout.is_bf16_optimizer:
        return "DeepSpeed's BF16_Optimizer keeps whole fp32 gradient sums beside bf16 gradients"
    if layout.stage == 3:
        lasting = "gradient sums are one lasting buffer"
        swapped = "; the optimizer's fp32 gradients are a second one" if layout.offload_optimizer != "none" else ""
        return f"{copies}; {lasting}{swapped}" if layout.param_bytes == 4 else f"{lasting}{swapped}"
    if layout.offload_optimizer != "none":
        kept = "the host keeps fp32 gradients and a buffer for the way back besides masters and moments, all lasting"
        whole = f"; the device keeps whole {layout.grad_dtype} sums until the step"
        return kept + whole if layout.stage == 1 and layout.is_mixed else kept
    freed = "other ranks' gradients are freed once reduced, a rank's own by the step"
    return f"{copies}; {freed}" if layout.param_bytes == 4 else freed
