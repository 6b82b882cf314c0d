"""One model type: loss and every gradient of its scaled-down model on one process and on a tensor group."""

from __future__ import annotations

import logging
from copy import deepcopy
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import transformers
from torch import nn

from ds_trainer.config.engine_sections import ParallelConfig
from ds_trainer.distributed.process_groups import Mesh, init_mesh
from ds_trainer.errors import UserError
from ds_trainer.launch.environment import grid_from_environment
from ds_trainer.layout import TensorSharding
from ds_trainer.log import get_logger
from ds_trainer.loss import CrossEntropy, shifted_labels
from ds_trainer.models.meta_model import skeleton
from ds_trainer.models.small_configs import VOCAB, causal_lm_classes, small_configs
from ds_trainer.models.weight_source import ModuleWeights
from ds_trainer.parallel.model_split import LocalWeights, ModelSplit
from ds_trainer.parallel.tensor.parallelize import split_model
from ds_trainer.parallel.tensor.vocab_parallel_head import make_cross_entropy
from ds_trainer.planning.tp_plan import TensorPlan, plan_for

TOLERANCE = 1e-4
"""Of each gradient's largest element, and of the loss: fp32, sums in another order, of which some all but cancel out.

A gradient that is not summed over the ranks, or summed twice, is off by a tenth and more.
"""

CUT = {"colwise", "colwise_gather_output", "qkv_colwise", "packed_colwise", "embedding_rowwise", "embedding_colwise"}
CUT_BUT_FOR_BIASES = {"rowwise", "rowwise_split_input", "packed_rowwise"}

_SEVERITY = ("failed", "refused", "passed")


@dataclass(frozen=True)
class Outcome:
    """What came of one model type.

    Args:
        verdict: `passed`, `refused` or `failed`.
        reason: Of a refusal its rule, of a failure what was found.
        error: Largest difference of a gradient, by that gradient's largest element.
        share: Elements on a rank, by those of the whole model.
    """

    verdict: str
    reason: str = ""
    error: float = 0.0
    share: float = 1.0

    def __str__(self) -> str:
        return f"{self.verdict}: {self.reason}" if self.reason else self.verdict


def compare_all(types: list[str], tp_plan: dict[str, str] | None = None) -> dict[str, tuple[Outcome, Outcome]]:
    """Holds model types on this world's ranks, one tensor group, to one process.

    Args:
        types: Model types.
        tp_plan: Over the plans of the types.

    Returns:
        Model type -> what came of it without and with sequence parallelism.
    """
    transformers.logging.set_verbosity_error()
    get_logger().setLevel(logging.WARNING)  # The progress bar has the line.
    grid = grid_from_environment()
    mesh = init_mesh(replace(grid, tp_size=grid.world), "cpu")
    settings = [ParallelConfig(tp=grid.world, tp_plan=tp_plan, sequence_parallel=value) for value in (False, True)]
    plain, sequence = settings
    return {each: (_compare_type(each, plain, mesh), _compare_type(each, sequence, mesh)) for each in types}


def worst(outcomes: tuple[Outcome, ...] | list[Outcome]) -> Outcome:
    """The one that says most against the model type."""
    return min(outcomes, key=lambda outcome: (_SEVERITY.index(outcome.verdict), -outcome.error))


def _compare_type(model_type: str, parallel: ParallelConfig, mesh: Mesh) -> Outcome:
    cls, config_class = causal_lm_classes(model_type)
    configs = small_configs(config_class)
    plan = plan_for(model_type, parallel.tp_plan)
    if plan is None:
        return Outcome("failed", "there is no plan")
    if unmatched := set.intersection(*(set(plan.unmatched(_names(cls, config))) for config in configs)):
        return Outcome("failed", f"nothing matches {', '.join(sorted(unmatched))}")
    return worst([_compare(cls, config, plan, parallel, mesh) for config in configs])


def _compare(cls: Any, config: Any, plan: TensorPlan, parallel: ParallelConfig, mesh: Mesh) -> Outcome:
    torch.manual_seed(0)
    whole = cls(deepcopy(config)).train()
    randomise(whole)
    batch = _batch()
    loss, gradients = _step(whole, batch, CrossEntropy())
    part = skeleton(lambda: cls(deepcopy(config)), torch.float32).train()
    try:
        split = split_model(part, parallel, mesh)
        _fill(part, LocalWeights(ModuleWeights(whole), split))
        cross_entropy = make_cross_entropy(part, split, mesh, 0.0)
        part_loss, part_gradients = _step(part, batch, cross_entropy)
        errors = differences({"logits": _logits(whole, batch)}, {"logits": _logits(part, batch)})
    except UserError as error:
        return Outcome("refused", error.rule)
    errors |= differences(gradients, dict(split.merged(part_gradients.items())))
    errors["loss"] = abs(part_loss - loss) / abs(loss)
    problems = _not_cut(plan, part, whole, split, mesh.grid.tp_size)
    problems += [f"{name} is off by {error:.1e}" for name, error in errors.items() if not error <= TOLERANCE]
    if not any(gradients[name].any() for name in split.shardings):
        problems.append("all gradients of sharded parameters are zero")
    elements, local = (sum(p.numel() for p in model.parameters()) for model in (whole, part))
    return Outcome("failed" if problems else "passed", "; ".join(problems), max(errors.values()), local / elements)


def _names(cls: Any, config: Any) -> list[str]:
    with torch.device("meta"):
        model = cls(deepcopy(config))
    return [*(name for name, _ in model.named_modules()), *(name for name, _ in model.named_parameters())]


def randomise(model: nn.Module) -> None:
    """Moves every parameter from its first value: of a bias that is 0 none would see that it is added twice."""
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)


def _batch() -> dict[str, torch.Tensor]:
    """Two samples of an odd number of positions, the second one padded."""
    input_ids = torch.randint(3, VOCAB, (2, 11))
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, -3:] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def _step(
    model: Any, batch: dict[str, torch.Tensor], cross_entropy: CrossEntropy
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, as training computes it, and every gradient."""
    torch.manual_seed(1)  # Some routers draw numbers.
    logits = model(**batch, use_cache=False, **cross_entropy.forward_options).logits
    labels = shifted_labels(batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100))
    loss = cross_entropy.sum(logits, labels) / (labels != -100).sum()
    loss.backward()
    return loss.item(), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


@torch.no_grad()
def _logits(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What anyone else gets who calls the model."""
    torch.manual_seed(1)
    return model(**batch, use_cache=False).logits


def _fill(model: nn.Module, weights: LocalWeights) -> None:
    """Gives a skeleton its values; a tied parameter stays tied."""
    filled = {
        parameter: nn.Parameter(weights.read(name, parameter.dtype), parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }
    for module in model.modules():
        module._parameters.update({n: filled[p] for n, p in module._parameters.items() if p is not None})
    for name, buffer in model.named_buffers():
        buffer.copy_(weights.view(name))


def _not_cut(plan: TensorPlan, part: nn.Module, whole: nn.Module, split: ModelSplit, size: int) -> list[str]:
    """Parameters that the plan shards and of which this rank, by their live shapes, does not hold 1/size."""
    local = {name: tuple(parameter.shape) for name, parameter in part.named_parameters()}
    problems = []
    for name, parameter in whole.named_parameters():
        style = plan.style_of(name) or plan.style_of(name.rpartition(".")[0])
        planned = style in CUT or (style in CUT_BUT_FOR_BIASES and not (name.endswith("bias") and parameter.dim() == 1))
        if planned and not _is_part(local[name], tuple(parameter.shape), split.shardings.get(name), size):
            problems.append(f"{name} of shape {tuple(parameter.shape)} is {local[name]} on a rank")
    return problems


def _is_part(local: tuple[int, ...], whole: tuple[int, ...], sharding: TensorSharding | None, size: int) -> bool:
    return sharding is not None and prod(local) * whole[sharding.dim] == prod(whole) * -(-whole[sharding.dim] // size)


def differences(whole: dict[str, torch.Tensor], merged: dict[str, torch.Tensor]) -> dict[str, float]:
    """Of each gradient, by its largest element; or by 1/1000 of the largest of all, where a gradient is 0 but for
    rounding, as that of a bias of keys is.
    """
    largest = {name: gradient.abs().max().item() for name, gradient in whole.items()}
    floor = max(largest.values()) / 1000
    return {n: (merged[n] - gradient).abs().max().item() / max(largest[n], floor) for n, gradient in whole.items()}
