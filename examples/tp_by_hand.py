"""Shards an MLP and an attention block over ranks by hand, shows what is sent, and compares with the full blocks.

torchrun --nproc_per_node 2 examples/tp_by_hand.py

Runs on the CPU in seconds, on 1, 2, 4 or 8 ranks. `parallel.tp` does this for any model: docs/tensor_parallel.md.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_trainer.layout import TensorSharding
from ds_trainer.parallel.tensor.collectives import gather_sequence, scatter_sequence
from ds_trainer.parallel.tensor.column_linear_group import ColumnGroup
from ds_trainer.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear

BATCH, TOKENS, HIDDEN, WIDTH, HEAD = 2, 10, 64, 256, 8
TOLERANCE = 1e-5


class MLP(nn.Module):
    """Gated, as Llama's. Unit i of its width needs row i of `gate` and `up` and column i of `down`, nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From hidden states to hidden states."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Causal. A head needs its rows of `q`, `k` and `v`, and its columns of `out`, nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From hidden states to hidden states."""
        # As many heads as the layers give: on a rank, its own.
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


BLOCKS: dict[type[nn.Module], tuple[list[str], str]] = {
    MLP: (["gate", "up"], "down"),
    Attention: (["q", "k", "v"], "out"),
}
"""Block -> its column-parallel layers, of whose outputs each rank has some, and the row-parallel layer that ends it."""


def split(whole: nn.Module, group: dist.ProcessGroup, sequence_parallel: bool) -> nn.Module:
    """This rank's part of a block: the same class, with smaller layers."""
    columns, row = BLOCKS[type(whole)]
    part = type(whole)()
    for name, layer in whole.named_children():
        sharding = TensorSharding.even(tuple(layer.weight.shape), 1 if name == row else 0, group.size())
        kind = RowParallelLinear if name == row else ColumnParallelLinear
        parallel = kind.from_module(layer, sharding, group)
        parallel.weight = nn.Parameter(own_part(layer.weight, sharding.dim, group))
        setattr(part, name, parallel)
    # They read the same tensor: the ranks' parts of its gradient are summed once for all of them.
    ColumnGroup([part.get_submodule(name) for name in columns], group)
    part.get_submodule(row).sequence_parallel = sequence_parallel
    return part


def own_part(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The one of equally long parts of a tensor that is this rank's."""
    return tensor.detach().chunk(group.size(), dim)[group.rank()].clone()


class Sent(TorchDispatchMode):
    """Notes every collective that runs in its block, with the bytes of the full tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.namespace == "c10d":
            tensors = [item for arg in args[:2] for item in (arg if isinstance(arg, list | tuple) else [arg])]
            num_bytes = max(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
            name = operator.__name__
            kind = "all-gather" if "gather" in name else "reduce-scatter" if "scatter" in name else "all-reduce"
            self.notes.append(f"{kind} of {num_bytes:,} bytes")
        return operator(*args, **(kwargs or {}))


def compare(
    kind: type[nn.Module], group: dist.ProcessGroup, sequence_parallel: bool, say: Callable[[str], None]
) -> None:
    """Runs a block, full and sharded, forward and backward.

    Raises:
        SystemExit: They differ.
    """
    torch.manual_seed(0)  # The same numbers on every rank.
    whole, x, grad = kind(), torch.randn(BATCH, TOKENS, HIDDEN), torch.randn(BATCH, TOKENS, HIDDEN)
    part = split(whole, group, sequence_parallel)
    say(f"\n{kind.__name__}{', with sequence parallelism' if sequence_parallel else ''}")
    for name, layer in whole.named_children():
        shape, local = (tuple(linear.weight.shape) for linear in (layer, part.get_submodule(name)))
        say(f"  {name}: {shape} -> {local} on each rank")

    whole_x = x.clone().requires_grad_()
    expected = whole(whole_x)
    expected.backward(grad)

    # Outside of the block each rank has all positions, or with sequence parallelism some of them.
    own_x = (scatter_sequence(x, group) if sequence_parallel else x.clone()).requires_grad_()
    with Sent() as forward:
        given = own_x
        if sequence_parallel:
            given = gather_sequence(own_x, TOKENS, group)
            given.sequence_shard = own_x
        y = part(given)
    with Sent() as backward:
        y.backward(scatter_sequence(grad, group) if sequence_parallel else grad)
    say(f"  forward sends: {', '.join(forward.notes) or 'nothing'}")
    say(f"  backward sends: {', '.join(backward.notes) or 'nothing'}")

    y, of_x = (gather_sequence(t, TOKENS, group) if sequence_parallel else t for t in (y.detach(), own_x.grad))
    pairs = {"output": (y, expected.detach()), "input's gradient": (of_x, whole_x.grad)}
    for name, layer in whole.named_children():
        parallel = part.get_submodule(name)
        pairs[f"gradient of {name}"] = parallel.weight.grad, own_part(layer.weight.grad, parallel.sharding.dim, group)
    errors = {name: relative_error(got, wanted) for name, (got, wanted) in pairs.items()}
    say(f"  largest difference from the whole block: {max(errors.values()):.0e} of the largest number")
    if wrong := {name: error for name, error in errors.items() if error > TOLERANCE}:
        raise SystemExit(f"{kind.__name__} on rank {group.rank()} differs from the whole block: {wrong}")


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, of the largest number."""
    return ((got - wanted).abs().max() / wanted.abs().max()).item()


def main() -> None:
    """Both blocks, without and with sequence parallelism.

    Raises:
        SystemExit: There is no launcher, or the heads do not divide by its ranks.
    """
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise SystemExit("start it with: torchrun --nproc_per_node 2 examples/tp_by_hand.py")
        dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    if (HIDDEN // HEAD) % group.size():
        message = f"{HIDDEN // HEAD} heads do not divide by {group.size()} ranks: start 1, 2, 4 or 8"
        raise SystemExit(message if group.rank() == 0 else 1)

    def say(text: str) -> None:
        if group.rank() == 0:
            print(text, flush=True)

    say(
        f"{group.size()} ranks; activations of {BATCH} x {TOKENS} x {HIDDEN} fp32 numbers are "
        f"{BATCH * TOKENS * HIDDEN * 4:,} bytes"
    )
    for sequence_parallel in (False, True):
        for kind in BLOCKS:
            compare(kind, group, sequence_parallel, say)
    say(
        "\nA rank computes its units of the width, or its heads, from the first layers to the last without asking the "
        "others.\nThe last layer's outputs are sums over all units, so the ranks sum their parts: one all-reduce. "
        "Backward the\nsame holds for the gradient of the input, which all of the first layers read: one all-reduce.\n"
        "With sequence parallelism a rank has some of the positions outside of the block: an all-reduce falls apart\n"
        "into a reduce-scatter and an all-gather, which together send as much. The one more all-gather gets the input\n"
        "again for the weights' gradients, so that no rank has to keep all of it."
    )


if __name__ == "__main__":
    main()
