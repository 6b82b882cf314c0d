"""Which modules of a model FSDP2 gathers and frees as a group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from torch import nn
from transformers import PreTrainedModel

from ds_trainer.config.engine_sections import FSDPConfig
from ds_trainer.errors import ConfigError
from ds_trainer.parallel.tensor.linear import ColumnParallelLinear

_LARGE = 10**8
_GROUPS = 8
"""About how many groups a model gets that has no blocks and fewer than `_LARGE` elements in each."""


def groups(model: nn.Module, config: FSDPConfig) -> list[nn.Module]:
    """The modules that are gathered as groups, outer before inner ones; the model gathers what is left.

    A module that shares a parameter with a module outside of it is no group: the innermost one that holds every user
    of the parameter gathers it, so that no parameter is in two groups. The same holds for column layers that read one
    tensor, since the first of them computes the outputs of all.

    Args:
        model: The model, its parameters not yet sharded.
        config: The wrapping policy.

    Raises:
        ConfigError: The model has none of the classes that the policy names.
    """
    policy, is_closed = config.auto_wrap_policy, _closed_in(model)
    if policy == "no_wrap":
        return []
    names = set(config.transformer_layer_cls_to_wrap or getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    missing = names - {type(block).__name__ for block in blocks}
    if policy == "transformer_based_wrap" and (not blocks or (config.transformer_layer_cls_to_wrap and missing)):
        raise _no_such_class(model, missing)
    if policy == "size_based_wrap" or not blocks:
        smallest = config.min_num_params or min(_LARGE, -(-sum(p.numel() for p in model.parameters()) // _GROUPS))
        chosen = _by_size(model, smallest, is_closed)
    else:
        # Untied embeddings and heads are often the largest modules; the model itself would hold them throughout.
        chosen = {module for module in (*blocks, *filter(None, ends(model))) if is_closed(module)}
    return [module for module in model.modules() if module in chosen and module is not model]


def _closed_in(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Whether a module holds every use of what it uses; shared modules count as often as they occur."""
    uses = Counter(_uses(model))
    return lambda module: all(uses[use] == count for use, count in Counter(_uses(module)).items())


def _uses(module: nn.Module) -> Iterator[int]:
    """Identities of the parameters and column groups that a module uses."""
    for _, parameter in module.named_parameters(remove_duplicate=False):
        yield id(parameter)
    for _, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, ColumnParallelLinear):
            yield id(part.column_group)


def ends(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """The token embeddings and the head of a language model; None for what a model lacks."""
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        return None, None
    return model.get_input_embeddings(), model.get_output_embeddings()


def _by_size(model: nn.Module, smallest: int, is_closed: Callable[[nn.Module], bool]) -> set[nn.Module]:
    """Modules with at least `smallest` elements that no chosen module inside of them has."""
    chosen: set[nn.Module] = set()

    def left_in(module: nn.Module) -> set[nn.Parameter]:
        if isinstance(module, nn.MultiheadAttention):  # Uses its children's parameters without calling them.
            left = set(module.parameters())
        else:
            left = set(module.parameters(recurse=False)).union(*map(left_in, module.children()))
        runs = type(module).forward is not nn.Module.forward  # A ModuleList does not, and nothing would gather it.
        if runs and sum(p.numel() for p in left) >= smallest and is_closed(module):
            chosen.add(module)
            return set()
        return left

    left_in(model)
    return chosen


def _no_such_class(model: nn.Module, missing: set[str]) -> ConfigError:
    present = sorted({type(module).__name__ for module in model.modules() if module is not model})
    return ConfigError(
        f"{type(model).__name__} has no module of class {', '.join(sorted(missing)) or '(it names none itself)'}",
        f"transformer_based_wrap gathers by the model's own classes, here {', '.join(present)}",
        "set fsdp.transformer_layer_cls_to_wrap to the classes of its blocks, or fsdp.auto_wrap_policy to "
        "size_based_wrap",
    )
