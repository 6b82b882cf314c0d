"""Imported by the fork server: what ranks would each make or import at first use, made once for all of them."""

from __future__ import annotations

import importlib

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

# DeepSpeed, DDP and numpy import these at their first use.
for name in (
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.module_inject.auto_ep_presets.registry",
    "deepspeed.moe.ep_repack",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.utils.pin_memory",
    "numpy.ctypeslib",
    "setuptools._distutils.ccompiler",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch._subclasses.schema_check_mode",
):
    importlib.import_module(name)
# A thousand regular expressions, of all model types.
get_checkpoint_conversion_mapping("llama")
