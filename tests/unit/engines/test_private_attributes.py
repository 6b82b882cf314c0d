"""Names that our libraries do not promise: each that we use is listed here, and is there in the installed versions."""

import ast
import inspect
import re
from functools import cache
from importlib import import_module
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "ds_trainer"
FRAGMENTS, ZERO1, BF16 = (
    "deepspeed.utils.tensor_fragment",
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer",
    "deepspeed.runtime.bf16_optimizer.BF16_Optimizer",
)
ZERO3, PARTITIONS = (
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3",
    ("deepspeed.runtime.zero.partition_parameters"),
)
FSDP = "torch.distributed.fsdp._fully_shard"

# The object that has it, or a module whose source sets it; its name; what it is used for.
USED = [
    (FRAGMENTS, "_hp_mapping", "which fragment of a parameter this rank owns at stages 1 and 2"),
    (f"{FRAGMENTS}.tensor_fragment", "lp_fragment_address", "its first element and length"),
    (f"{FRAGMENTS}.tensor_fragment", "get_hp_fragment", "its fp32 master and optimizer states"),
    (f"{FRAGMENTS}.tensor_fragment", "get_optim_state_keys", "which states there are"),
    (FRAGMENTS, "get_full_hp_grad", "full gradients, for tests and exports"),
    (FRAGMENTS, "param_group_index", "the flat partition that it lies in"),
    (BF16, "_hp_grad", "gradients that a pipeline's passes have accumulated"),
    (BF16, "fp32_groups_flat_partition", "the tensors that the optimizer updates"),
    (BF16, "_hp_optimizer_states_linked", "lets fragments find states that were made late"),
    (BF16, "_lazy_init_hp_params_optimizer_state", "the same"),
    (ZERO1, "_hp_optimizer_states_linked", "the same at stages 1 and 2"),
    (ZERO1, "_lazy_init_hp_params_optimizer_state", "the same at stages 1 and 2"),
    (ZERO1, "single_partition_of_fp32_groups", "the tensors that the optimizer updates"),
    (ZERO1, "get_gradient_for_reduction", "gradients that a pipeline's passes have accumulated"),
    (ZERO1, "reduce_ready_partitions_and_remove_grads", "takes each gradient that is ready: gradients in one order"),
    (ZERO1, "overlapping_partition_gradients_reduce_epilogue", "ends a backward pass: gradients in one order"),
    (ZERO1, "use_grad_accum_attribute", "where a gradient is: zeros for what a rank did not run"),
    (ZERO3, "fp32_partitioned_groups_flat", "the tensors that the optimizer updates"),
    (ZERO3, "grad_position", "the sub-group of a parameter"),
    (ZERO3, "get_param_id", "the sub-group of a parameter"),
    (ZERO3, "get_local_fp32_param", "reads masters and states, swapped in"),
    (ZERO3, "_get_fp32_opt_state_partition", "writes masters and states"),
    (ZERO3, "_swappable_optimizer_subgroup", "whether a sub-group goes to NVMe"),
    (ZERO3, "_optimizer_states_and_gradient_swap_out", "writes a changed sub-group back to NVMe"),
    (ZERO3, "fp16_groups", "the parameters of each sub-group"),
    (ZERO3, "swap_optimizer", "whether states go to NVMe"),
    (ZERO3, "optimizer_swapper", "how gradients are aligned on NVMe"),
    ("deepspeed.runtime.swap_tensor.optimizer_utils.OptimizerSwapper", "numel_alignment", "the same"),
    ("deepspeed.runtime.swap_tensor.optimizer_utils.OptimizerSwapper", "is_swappable_tensor", "the same"),
    (f"{PARTITIONS}.Init", "_zero_init_param", "partitions a parameter without a broadcast"),
    (f"{PARTITIONS}.Init", "_convert_to_deepspeed_param", "the same"),
    (f"{PARTITIONS}.Init", "_convert_to_zero_parameters", "the same"),
    (PARTITIONS, "ds_id", "marks a partitioned parameter"),
    (PARTITIONS, "ds_shape", "its full shape"),
    (PARTITIONS, "ds_numel", "its full size"),
    (PARTITIONS, "ds_tensor", "this rank's shard of it"),
    (PARTITIONS, "ds_zero_partition_rank", "which shard that is"),
    (PARTITIONS, "ds_zero_partition_world_size", "of how many"),
    (PARTITIONS, "final_location", "whether it is on NVMe"),
    ("deepspeed.ops.adam.DeepSpeedCPUAdam", "ds_opt_adam", "brings bias corrections to the step of a checkpoint"),
    ("deepspeed.ops.adam.DeepSpeedCPUAdam", "opt_id", "the same"),
    ("deepspeed.DeepSpeedEngine", "buffered_allreduce_fallback", "reduces after a pipeline's passes at stage 0"),
    ("deepspeed.DeepSpeedEngine", "basic_optimizer", "the optimizer below DeepSpeed's wrapper"),
    ("deepspeed.DeepSpeedEngine", "mp_world_size", "the tensor-parallel size that is in effect"),
    ("deepspeed.DeepSpeedEngine", "data_parallel_group", "the group that gradients are reduced over"),
    ("deepspeed.utils.groups", "mpu", "an earlier engine's groups, which are forgotten"),
    ("deepspeed.ops", "__compatible_ops__", "switches an op off that takes minutes to compile"),
    ("torch.distributed.distributed_c10d", "_get_default_store", "barriers and the board of the ranks' states"),
    ("torch", "_utils", "buckets"),
    ("torch._utils", "_flatten_dense_tensors", "buckets"),
    ("torch._utils", "_unflatten_dense_tensors", "buckets"),
    ("torch._utils", "_take_tensors", "buckets"),
    ("torch", "_foreach_mul_", "clips in few kernels"),
    ("torch", "_foreach_copy_", "copies buckets back in few kernels"),
    ("torch.utils", "_pytree", "nested arguments"),
    ("torch.utils._pytree", "tree_flatten", "finds lazy tensors among an operator's arguments"),
    ("torch.utils._pytree", "tree_map", "puts others in their place"),
    ("torch.Tensor", "_make_wrapper_subclass", "tensors of a checkpoint that are not read yet"),
    ("torch.ops.aten.add_.Tensor", "_schema", "whether an operator writes into them"),
    ("torch", "_C", "whether a backward pass runs"),
    ("torch._C", "_current_graph_task_id", "whether a backward pass runs"),
    ("torch.amp.GradScaler", "_found_inf_per_device", "lowers the loss scale on all ranks alike"),
    ("torch.nn.parallel.DistributedDataParallel", "_remove_autograd_hooks", "gives the model to another engine"),
    ("torch.nn.parallel.DistributedDataParallel", "_comm_hooks", "PowerSGD's state where accelerate made it"),
    ("torch.distributed.fsdp.FSDPModule", "_get_fsdp_state", "FSDP2's records"),
    (f"{FSDP}._fsdp_state.FSDPState", "_fsdp_param_group", "what was set up; the sums of gradients"),
    (f"{FSDP}._fsdp_state.FSDPState", "_root_post_backward_final_callback", "reduces after a pipeline's passes"),
    (f"{FSDP}._fsdp_param_group.FSDPParamGroup", "fsdp_params", "the parameters of a group"),
    (f"{FSDP}._fsdp_param_group.FSDPParamGroup", "mesh_info", "over how many ranks they are sharded"),
    (f"{FSDP}._fsdp_param_group.FSDPParamGroup", "post_forward_mesh_info", "and after the forward pass"),
    (f"{FSDP}._fsdp_param_group.FSDPParamGroup", "offload_policy", "whether they are offloaded"),
    (f"{FSDP}._fsdp_param_group.FSDPParamGroup", "mp_policy", "their dtypes"),
    (f"{FSDP}._fsdp_param.FSDPParam", "unsharded_param", "adds gradients in the dtype of the reduction"),
    (f"{FSDP}._fsdp_param.FSDPParam", "accumulate_unsharded_grad_if_needed", "the same"),
    (f"{FSDP}._fsdp_param.FSDPParam", "to_accumulated_grad_if_needed", "the same"),
    ("torch.ops.aten", "_grouped_mm", "kept by selective recomputation"),
    ("deepspeed.runtime.config", "_REMOVED_TOP_LEVEL_CONFIG_KEYS", "sections that it no longer reads"),
    ("torch.ops.aten", "_scaled_dot_product_flash_attention", "kept by selective recomputation"),
    ("deepspeed.runtime.config", "_REMOVED_TOP_LEVEL_CONFIG_KEYS", "sections that it no longer reads"),
    ("torch.ops.aten", "_scaled_dot_product_flash_attention_for_cpu", "kept by selective recomputation"),
    ("deepspeed.runtime.config", "_REMOVED_TOP_LEVEL_CONFIG_KEYS", "sections that it no longer reads"),
    ("torch.ops.aten", "_scaled_dot_product_efficient_attention", "kept by selective recomputation"),
    ("deepspeed.runtime.config", "_REMOVED_TOP_LEVEL_CONFIG_KEYS", "sections that it no longer reads"),
    ("torch.ops.aten", "_scaled_dot_product_cudnn_attention", "kept by selective recomputation"),
    ("transformers.PreTrainedModel", "_from_config", "skeletons on meta"),
    ("transformers.PreTrainedModel", "_init_weights", "values of a new task head"),
    ("transformers.PreTrainedModel", "_get_dtype_plan", "modules that stay fp32"),
    ("transformers.PreTrainedModel", "_no_split_modules", "a model's blocks"),
    ("transformers.PreTrainedModel", "_keys_to_ignore_on_load_missing", "which tensors may be missing"),
    ("transformers.PreTrainedModel", "_keys_to_ignore_on_load_unexpected", "which tensors may be left over"),
    ("transformers.PreTrainedModel", "_keys_to_ignore_on_save", "which tensors are not exported"),
    ("transformers.core_model_loading", "_weight_conversions", "how a checkpoint's names become the model's"),
    ("transformers.models.auto.auto_factory", "_BaseAutoModelClass", "the type of the auto classes"),
    ("transformers.models.auto.auto_factory._BaseAutoModelClass", "_model_mapping", "which classes they make"),
    ("accelerate.state.AcceleratorState", "_reset_state", "forgets what an earlier Accelerator was told"),
    ("accelerate.Accelerator", "_is_accelerate_prepared", "the mark on a model, taken off when it is given back"),
    ("datasets.Dataset", "_fingerprint", "names the cache of a dataset in memory"),
]
# Modules that alone may use the private names of a library.
HOMES = {
    "deepspeed": {"engines/deepspeed/internals.py"},
    "torch": {"torch_internals.py", "models/activation_checkpointing.py"},  # The latter lists operators.
}
# Of Python itself, and of Module, which documents the dictionaries for classes that derive from it.
PYTHON = {"_current_frames", "_exit", "_getframe"}
MODULE = {"_buffers", "_modules", "_parameters"}


def found(path: str):
    """The object at a dotted path: a module, or what attributes lead to from one."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            place = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            place = getattr(place, name)
        return place
    raise ModuleNotFoundError(path)


@cache
def source(path: str) -> str:
    return inspect.getsource(found(path))


def exists(path: str, name: str) -> bool:
    """Whether an object has an attribute, or sets it on itself or on others once it runs."""
    try:
        return hasattr(found(path), name) or re.search(rf"\b{name}\b", source(path)) is not None
    except (AttributeError, ModuleNotFoundError, TypeError):  # The last: it has no source in Python.
        return False


def test_every_private_name_that_we_use_is_there():
    assert [f"{path}.{name}: {use}" for path, name, use in USED if not exists(path, name)] == []


def private_names(path: Path) -> set[tuple[str, bool]]:
    """Private names that a module looks up on an object or imports; whether it defines or assigns each."""
    tree = ast.parse(path.read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            own = isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ("self", "cls")
            names.add((node.attr, own))
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and "__dict__" in ast.unparse(node):
            names |= {(key.value, True) for key in [node.slice] if isinstance(key, ast.Constant)}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add((node.name, True))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {(name.id, True) for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("ds_trainer"):
            names |= {(alias.name, False) for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            names |= {(arg.value, False) for arg in node.args[1:2] if isinstance(arg, ast.Constant)}
    return {(name, own) for name, own in names if name.startswith("_") and not name.startswith("__")}


def test_the_list_is_complete_and_each_name_of_torch_and_deepspeed_is_used_in_one_module():
    names = {path.relative_to(PACKAGE).as_posix(): private_names(path) for path in PACKAGE.rglob("*.py")}
    ours = {name for module in names.values() for name, own in module if own}
    listed = {name: path.split(".")[0] for path, name, _ in USED}
    wrong = [
        f"{module}: {name}"
        for module, found_here in names.items()
        for name in {name for name, own in found_here if not own} - PYTHON - MODULE
        if (name not in ours and name not in listed) or module not in HOMES.get(listed.get(name, ""), {module})
    ]
    assert wrong == []
