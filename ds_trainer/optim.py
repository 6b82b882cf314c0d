"""Parameter groups, optimizers and the learning rate by step."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.config.training_sections import OptimizerConfig, ScheduleConfig
from ds_trainer.errors import ConfigError


def make_optimizer(
    named: list[tuple[str, nn.Parameter]],
    shapes: Mapping[str, torch.Size],
    resolved: ResolvedConfig,
    given: torch.optim.Optimizer | None,
) -> torch.optim.Optimizer:
    """The user's optimizer if there is one, else the config's.

    Args:
        named: Trainable parameters by their names in the model.
        shapes: Full shapes by name.
        resolved: The run's config.
        given: Optimizer handed to `Trainer`.

    Raises:
        ConfigError: The user's optimizer does not update exactly the trainable parameters.
    """
    if given is None:
        return build_optimizer(parameter_groups(named, shapes, resolved.config.optimizer), resolved)
    theirs = {id(p) for group in given.param_groups for p in group["params"]}
    foreign = len(theirs - {id(p) for _, p in named})
    left_out = [name for name, p in named if id(p) not in theirs]
    if foreign or left_out:
        raise ConfigError(
            f"the optimizer handed to Trainer updates {foreign} tensors that are not parameters of the model, and "
            f"leaves out {len(left_out)} trainable ones{': ' + ', '.join(left_out[:5]) if left_out else ''}",
            "an optimizer updates exactly the model's trainable parameters",
            "build it on the model instance handed to Trainer(model=...), and freeze what it should not update",
        )
    return given


def hand_over(
    optimizer: torch.optim.Optimizer, before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]
) -> None:
    """Makes an optimizer update the parameters that an engine has put in place of those it was built on.

    Args:
        optimizer: The optimizer.
        before: The parameters that it may have been built on, by name.
        after: Those of the same model now.

    Raises:
        ConfigError: It holds states of parameters that are no longer there.
    """
    replaced = {old: after[name] for name, old in before.items() if after[name] is not old}
    if any(parameter in optimizer.state for parameter in replaced):
        raise ConfigError(
            "the optimizer handed to Trainer has states already, of parameters that the engine has sharded since",
            "an optimizer starts with the run, or resumes from a checkpoint of it",
            "pass an optimizer that has taken no step, or set parallel.engine to ddp",
        )
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(parameter, parameter) for parameter in group["params"]]


LOOK_AT_FULL_TENSORS = {"Adafactor", "LAMB", "LARS", "LBFGS", "Lamb", "Muon", "SOAP", "Shampoo"}
"""Classes whose update of one element depends on others of its tensor: wrong where it is sharded or flattened."""


def parameter_groups(
    named: list[tuple[str, nn.Parameter]], shapes: Mapping[str, torch.Size], config: OptimizerConfig
) -> list[dict]:
    """Splits parameters into those with and those without weight decay.

    Args:
        named: Trainable parameters by their names in the model.
        shapes: Full shapes by name: an engine may have replaced a parameter's data by an empty shard.
        config: Optimizer section.

    Returns:
        Groups for a torch optimizer; an empty group is left out.
    """
    decayed = [(n, p) for n, p in named if config.decay_norms_and_biases or len(shapes[n]) > 1]
    names = {n for n, _ in decayed}
    plain = [(n, p) for n, p in named if n not in names]
    groups = [(decayed, config.weight_decay), (plain, 0.0)]
    return [{"params": [p for _, p in members], "weight_decay": decay} for members, decay in groups if members]


def build_optimizer(groups: list[dict], resolved: ResolvedConfig) -> torch.optim.Optimizer:
    """The optimizer class for where its state is kept.

    Source: AdamW, Loshchilov and Hutter 2019; Lion, Chen et al. 2023; Adafactor, Shazeer and Stern 2018.
    """
    config = resolved.config.optimizer
    fused = {"fused": True} if resolved.optimizer_implementation == "torch_fused" else {}
    if resolved.optimizer_implementation == "deepspeed_cpu":
        return _deepspeed_cpu_optimizer(groups, config)
    match config.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, **fused)
        case "adam":
            return torch.optim.Adam(groups, lr=config.lr, betas=config.betas, eps=config.eps, **fused)
        case "sgd":
            return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, **fused)
        case "adafactor":
            return torch.optim.Adafactor(groups, lr=config.lr)
        case "lion":
            from lion_pytorch import Lion

            return Lion(groups, lr=config.lr, betas=config.betas)


def _deepspeed_cpu_optimizer(groups: list[dict], config: OptimizerConfig) -> torch.optim.Optimizer:
    if config.name == "lion":
        from deepspeed.ops.lion import DeepSpeedCPULion

        return DeepSpeedCPULion(groups, lr=config.lr, betas=config.betas)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(
        groups,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        adamw_mode=config.name == "adamw",
        fp32_optimizer_states=True,
    )


def warmup_steps(config: ScheduleConfig, total_steps: int) -> int:
    """Steps of linear warm-up: the key, or the ratio's share of all steps, rounded up as in transformers."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    return math.ceil((config.warmup_ratio or 0.0) * total_steps)


def lr_factor(config: ScheduleConfig, step: int, total_steps: int) -> float:
    """The learning rate of one optimizer step, as a share of the peak.

    The first of the steps after the warm-up runs at the peak, and the step after the last would run at
    `min_lr_ratio`, as with transformers' schedules.

    Args:
        config: Schedule section.
        step: Optimizer step, counted from 0.
        total_steps: Optimizer steps of the run.
    """
    warmup = warmup_steps(config, total_steps)
    if step < warmup:
        return step / warmup
    floor = config.min_lr_ratio
    if config.name == "constant":
        return 1.0
    begin = warmup
    if config.name == "wsd":
        begin = max(warmup, total_steps - math.ceil(config.decay_ratio * total_steps))
        if step < begin:
            return 1.0
    progress = min(1.0, (step - begin) / max(1, total_steps - begin))
    shape = 0.5 * (1.0 + math.cos(math.pi * progress)) if config.name == "cosine" else 1.0 - progress
    return floor + (1.0 - floor) * shape
