"""Names of torch 2.13 that its documentation does not promise; no other module uses its private ones.

A test lists all that a new version of torch no longer has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import _utils
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

if TYPE_CHECKING:  # Runs on other engines need not load it.
    from torch.distributed.fsdp import FSDPModule

default_store = distributed_c10d._get_default_store
"""The store of the rendezvous, which all ranks share."""
flatten_tensors = _utils._flatten_dense_tensors
unflatten_tensors = _utils._unflatten_dense_tensors
take_tensors = _utils._take_tensors
"""Groups tensors of one dtype into buckets of about so many bytes."""
tree_flatten, tree_map = _pytree.tree_flatten, _pytree.tree_map
"""Visit every item of nested arguments."""
multiply_all, copy_all = torch._foreach_mul_, torch._foreach_copy_
"""Work in place on a list of tensors, in few kernels."""


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def make_wrapper(cls: type, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of a class of its own, without memory, whose operations go to the class's `__torch_dispatch__`."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)


def is_mutable(operator: Any) -> bool:
    """Whether an operator writes into its operands."""
    return operator._schema.is_mutable


def mark_overflow(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Lets a loss scaler's next `update` lower the scale, whatever it found in the gradients of this rank."""
    for found in scaler._found_inf_per_device(optimizer).values():
        found.fill_(1.0)


def remove_hooks(wrapper: DistributedDataParallel) -> None:
    """Takes DDP's hooks off the parameters, which another wrapper may reduce then."""
    wrapper._remove_autograd_hooks()


def comm_hook_states(wrapper: Any) -> list[Any]:
    """States of a wrapper's communication hooks; none where the model is not wrapped."""
    return [state for _, state in getattr(wrapper, "_comm_hooks", ())]


def parameter_group(module: FSDPModule) -> Any | None:
    """FSDP2's record of the parameters that a module gathers together; None where it has none of its own."""
    return module._get_fsdp_state()._fsdp_param_group


def finish_backward(root: FSDPModule) -> None:
    """Reduces what FSDP2 has accumulated, as at the end of a backward pass.

    No public method does it; torch's own pipeline calls this one, too.
    """
    root._get_fsdp_state()._root_post_backward_final_callback()
