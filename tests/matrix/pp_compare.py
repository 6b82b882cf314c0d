"""One model type: loss and every gradient of its scaled-down model, whole and cut into the stages of a pipeline.

Legend: B samples, T positions.
"""

from __future__ import annotations

import logging
import re
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ds_trainer.errors import ModelError
from ds_trainer.log import get_logger
from ds_trainer.loss import IGNORE_INDEX, shifted_labels
from ds_trainer.models.small_configs import VOCAB, causal_lm_classes, small_configs
from ds_trainer.parallel.pipeline.split import split_into_stages, verified_trace
from ds_trainer.parallel.pipeline.stages import StagedModel
from tests.matrix.compare import Outcome, differences, randomise, worst

Batch = dict[str, torch.Tensor]
Gradients = dict[str, torch.Tensor]

SIZES = (2, 3)
"""Numbers of stages; of three the middle one has neither embedding nor head."""

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Of each gradient's largest element, and of the loss, by the format that the type runs in.

Stages do what the whole model does, operation by operation. Only sums over micro-batches and over the uses of a tied
weight may be in another order: 1e-16 each in float64, more where they all but cancel out. In fp32 that is what the
matrix of tensor parallelism allows. A multiplier that is applied twice, or a gradient that is lost, is off by a tenth
and more.
"""

# What by default changes nothing would not show that it is applied twice, or left out.
_NEUTRAL = (None, 0.0, 1.0)
_ODD: tuple[tuple[str, float], ...] = (
    (r".*soft_?cap(ping)?", 5.0),
    (r"(?!rope_).*(multipliers?|_scal(e|ing)(_factor)?)|scale_emb", 1.375),
)
_SWITCHES = r"(re)?scale_embeddings?|scale_attn_by_inverse_layer_idx"


def compare_all(types: list[str]) -> dict[str, tuple[Outcome, ...]]:
    """Holds model types, cut into stages on this one process, to the whole.

    Args:
        types: Model types.

    Returns:
        Model type -> what came of it at each of `SIZES`.
    """
    transformers.logging.set_verbosity_error()
    get_logger().setLevel(logging.WARNING)  # The progress bar has the line.
    return {name: _compare_type(name) for name in types}


def _compare_type(model_type: str) -> tuple[Outcome, ...]:
    cls, config_class = causal_lm_classes(model_type)
    try:
        layers = verified_trace(cls, config_class).plan.layers
    except ModelError as error:
        return (_refused(error),) * len(SIZES)
    configs = [_odd(config, tied) for tied in (False, True) for config in small_configs(config_class, max(SIZES))]
    outcomes = [_compare(cls, config, layers) for config in configs]
    return tuple(worst(of_size) for of_size in zip(*outcomes, strict=True))


def _refused(error: ModelError) -> Outcome:
    return Outcome("refused", " ".join(error.found.split()))


def _odd(config: PretrainedConfig, tied: bool) -> PretrainedConfig:
    """The config with every multiplier and cap at work, head and embedding tied or not, changed in place."""
    for name, value in vars(config).items():
        odd = next((odd for pattern, odd in _ODD if re.fullmatch(pattern, name)), None)
        if isinstance(value, PretrainedConfig):
            _odd(value, tied)
        elif odd is not None and isinstance(value, list) and all(each in _NEUTRAL for each in value):
            setattr(config, name, [odd] * len(value))
        elif odd is not None and not isinstance(value, int | list) and value in _NEUTRAL:
            setattr(config, name, odd)
        elif re.fullmatch(_SWITCHES, name):
            setattr(config, name, True)
    config.tie_word_embeddings = tied
    return config


def _compare(cls: Any, config: PretrainedConfig, layers: str) -> tuple[Outcome, ...]:
    torch.manual_seed(0)
    whole = cls(deepcopy(config)).train()
    randomise(whole)
    for number, module in enumerate(whole.modules()):
        module.register_forward_pre_hook(partial(_seed, number))
    unused = [[deepcopy(whole) for _ in range(size)] for size in SIZES]  # Some keep what is of no copy once they ran.
    batches = _batches()
    try:
        dtype = torch.float64
        loss = _step([whole.to(dtype)], batches)
    except RuntimeError:  # Some kernels know no float64.
        dtype = torch.float32
        loss = _step([whole.to(dtype)], batches)
    return tuple(
        _compare_stages(whole, [each.to(dtype) for each in models], layers, batches, loss) for models in unused
    )


def _seed(number: int, module: nn.Module, args: Any) -> None:
    """Some routers draw numbers: each module draws the same, whatever was drawn before it."""
    torch.manual_seed(number)


def _batches() -> list[Batch]:
    """Two micro-batches of different lengths and numbers of labels; a sample of the first one is padded."""
    padded = {"input_ids": torch.randint(3, VOCAB, (2, 11)), "attention_mask": torch.ones(2, 11, dtype=torch.long)}
    padded["attention_mask"][1, -3:] = 0
    padded["labels"] = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, IGNORE_INDEX)
    short = {"input_ids": torch.randint(3, VOCAB, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    short["labels"] = short["input_ids"].clone()
    short["labels"][:, :4] = IGNORE_INDEX
    return [padded, short]


def _step(stages: list[Any], batches: list[Batch]) -> float:
    """The loss of one step, after which every parameter has its gradient.

    All forward passes come before the first backward pass: a stage must not lose what it keeps of a micro-batch when it
    runs the next one.

    Args:
        stages: The models cut into stages in their order, or the whole model alone.
        batches: The micro-batches.
    """
    num_tokens = sum(int((shifted_labels(batch["labels"]) != IGNORE_INDEX).sum()) for batch in batches)
    for model in stages:
        model.zero_grad()
    passes = [_forward(stages, batch) for batch in batches]
    for received, sent in passes:
        sent[-1].div(num_tokens).backward()
        for output, leaf in zip(sent[-2::-1], received[:0:-1], strict=True):
            output.backward(leaf.grad)
    return sum(sent[-1].item() for _, sent in passes) / num_tokens


def _forward(stages: list[Any], batch: Batch) -> tuple[list[Any], list[torch.Tensor]]:
    """What each stage was given of the stage before, and what it returned: of the last one the sum of the loss."""
    inputs = {key: value for key, value in batch.items() if key != "labels"} | {"use_cache": False}
    received: list[Any] = [None]
    sent = []
    for stage, model in enumerate(stages):
        cut = {"pipeline_stage": stage, "hidden_states": received[-1]} if len(stages) > 1 else {}
        output = model(**cut, **inputs)
        if stage < len(stages) - 1:
            sent.append(output)
            received.append(output.detach().requires_grad_())
    labels = shifted_labels(batch["labels"]).flatten()
    return received, [*sent, F.cross_entropy(output.logits.flatten(0, -2), labels, reduction="sum")]


def _compare_stages(
    whole: PreTrainedModel, models: list[PreTrainedModel], layers: str, batches: list[Batch], loss: float
) -> Outcome:
    depth, size = len(whole.get_submodule(layers)), len(models)  # type: ignore[arg-type]
    ranges = [(stage * depth // size, (stage + 1) * depth // size) for stage in range(size)]
    try:
        cuts = [split_into_stages(model, ranges, [stage], int) for stage, model in enumerate(models)]
        stages_loss = _step(models, batches)
    except ModelError as error:
        return _refused(error)
    if problems := _misplaced(whole, models, cuts):
        return Outcome("failed", "; ".join(problems))
    errors = differences(_gradients([whole]), _gradients(models)) | {"loss": abs(stages_loss - loss) / abs(loss)}
    tolerance = TOLERANCES[next(whole.parameters()).dtype]
    problems = [f"{name} is off by {error:.1e}" for name, error in errors.items() if not error <= tolerance]
    return Outcome("failed" if problems else "passed", "; ".join(problems), max(errors.values()))


def _gradients(models: list[Any]) -> Gradients:
    """Every gradient, those of a parameter and its copies summed."""
    gradients: Gradients = {}
    for model in models:
        for name, parameter in model.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return gradients


def _misplaced(whole: nn.Module, models: list[Any], cuts: list[StagedModel]) -> list[str]:
    """What keeps the stages from being parts of the whole that together, copies apart, are all of it."""
    shapes = {name: tuple(parameter.shape) for name, parameter in whole.named_parameters()}
    held = [{name: tuple(parameter.shape) for name, parameter in model.named_parameters()} for model in models]
    problems = []
    for rank, (model, cut) in enumerate(zip(models, cuts, strict=True)):
        expected = {n: shape for n, shape in shapes.items() if rank in (cut.owners[n], *cut.replicas.get(n, ()))}
        if held[rank] != expected:
            differing = sorted({n for n, _ in held[rank].items() ^ expected.items()})
            problems.append(f"stage {rank} does not hold what it should of {', '.join(differing)}")
        owned = [parameter for name, parameter in model.named_parameters() if cut.owners.get(name) == rank]
        if not any(parameter.grad is not None and parameter.grad.any() for parameter in owned):
            problems.append(f"all gradients of what stage {rank} owns are zero")
        if (cut.owners, cut.replicas) != (cuts[0].owners, cuts[0].replicas) or list(cut.shapes) != list(shapes):
            problems.append(f"stage {rank} knows other owners or parameters than the others")
    return problems
