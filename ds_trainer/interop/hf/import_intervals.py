"""The fields of `TrainingArguments` for logging, evaluation and saving intervals, and for the data. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

from ds_trainer.config.keys import default
from ds_trainer.config.training_sections import LoggingConfig
from ds_trainer.interop.hf.arguments import HFImport

_ALL = 10**9
"""As many checkpoints as a run can have."""

_TRACKERS = get_args(get_args(LoggingConfig.model_fields["report_to"].annotation)[0])

_ACCELERATOR = {
    "split_batches": (False, "per_device_train_batch_size is that of one rank here: divide it by the ranks"),
    "dispatch_batches": (None, "every rank reads its own samples"),
    "even_batches": (True, "no sample is repeated: the last window of an epoch may be short"),
    "use_seedable_sampler": (True, "the order of samples follows from run.seed alone"),
    "non_blocking": (False, "batches are copied without waiting where memory is page-locked: data.pin_memory"),
    "gradient_accumulation_kwargs": (None, "gradients are accumulated as batch.accumulation says"),
    "use_configured_state": (False, "accelerate's state is not used"),
}
"""Key of `accelerator_config` -> its default, and what happens here."""


def carry_logging(given: HFImport) -> None:
    """When and where metrics are written."""
    strategy = given["logging_strategy"]
    if strategy == "steps":
        _carry_steps(given, "logging_steps", "logging.every_steps")
    else:
        given.drop("logging_steps", f"logging_strategy is {strategy}: nothing is lost")
    if strategy == "epoch":
        _carry_epochs(given, "logging_strategy", "logging.every_steps")
    elif strategy == "no":
        given.drop("logging_strategy", f"metrics are always written: {_until('logging.every_steps')}")
    if "disable_tqdm" in given.set_fields:
        given.carry("disable_tqdm", {"logging.progress_bar": not given["disable_tqdm"]})
    if "report_to" in given.set_fields:
        _carry_trackers(given)


def _carry_trackers(given: HFImport) -> None:
    report_to = given["report_to"]
    names = [report_to] if isinstance(report_to, str) else list(report_to)
    known = [name for name in names if name in _TRACKERS]
    lost = [name for name in names if name not in (*_TRACKERS, "none")]
    note = f"there is no {', '.join(lost)} here, but {', '.join(_TRACKERS)}" if lost else ""
    if known or not lost:
        given.carry("report_to", {"logging.report_to": known}, note, changed=bool(note))
    else:
        given.drop("report_to", note)


def carry_evaluation(given: HFImport) -> None:
    """When evaluations run: transformers has none at the end that is not due by its strategy."""
    strategy = given["eval_strategy"]
    if strategy == "steps":
        given.carry("eval_strategy", {"evaluation.at_end": False})
        field = "eval_steps" if given["eval_steps"] else "logging_steps"
        if field == "eval_steps":
            _carry_steps(given, field, "evaluation.every_steps")
        elif given[field] >= 1:
            note = "eval_steps is left out, which means logging_steps"
            given.found.carry("eval_steps", None, {"evaluation.every_steps": int(given[field])}, note)
        return
    if strategy == "epoch":
        _carry_epochs(given, "eval_strategy", "evaluation.every_steps", {"evaluation.at_end": True})
    else:
        given.carry("eval_strategy", {"evaluation.at_end": False})
    given.drop("eval_steps", f"eval_strategy is {strategy}: nothing is lost")


def carry_saving(given: HFImport) -> None:
    """When checkpoints are saved and how many are kept."""
    strategy = given["save_strategy"]
    if strategy == "steps":
        _carry_steps(given, "save_steps", "checkpoint.every_steps")
    else:
        given.drop("save_steps", f"save_strategy is {strategy}: nothing is lost")
    if strategy == "epoch":
        _carry_epochs(given, "save_strategy", "checkpoint.every_steps")
    elif strategy == "no":
        given.carry("save_strategy", {"checkpoint.every_steps": 0})
    elif strategy == "best":
        metric = given["metric_for_best_model"] or "loss"
        ours = {"checkpoint.every_steps": 0, "evaluation.metric_for_best_model": metric}
        given.carry("save_strategy", ours)
    limit, best = given["save_total_limit"], bool(given["load_best_model_at_end"])
    if best:
        few = given["eval_strategy"] == "epoch" and given.steps_per_epoch is None
        note = "until evaluation.every_steps is set, the last model is the only one to choose from" if few else ""
        given.carry("load_best_model_at_end", {"checkpoint.load_best_model_at_end": True}, note, changed=few)
    if limit is None or limit <= 0:
        given.carry("save_total_limit", {"checkpoint.keep_last": _ALL}, "transformers keeps every checkpoint")
    else:
        note = "the best one is kept besides" if best else ""
        given.carry("save_total_limit", {"checkpoint.keep_last": max(1, limit - best)}, note)
    if "resume_from_checkpoint" in given.set_fields:
        note = "a checkpoint of ds_trainer; for one of transformers, set model.path to the model folder"
        given.carry("resume_from_checkpoint", {"checkpoint.resume": given["resume_from_checkpoint"]}, note, True)


def _carry_epochs(given: HFImport, name: str, ours: str, more: Mapping[str, Any] | None = None) -> None:
    """A strategy of once per epoch, as a number of steps where the data is known; `more` is set in any case."""
    steps = given.steps_per_epoch
    if steps is not None:
        given.carry(name, {ours: steps, **(more or {})}, f"one epoch is {steps} steps")
        return
    size = f"{given['per_device_train_batch_size']} x {given['gradient_accumulation_steps']} x ranks"
    note = f"an epoch is counted in steps here: set {ours} to ceil(samples / ({size})); {_until(ours)}"
    kept = {} if default(ours) is None else {ours: default(ours)}
    given.carry(name, {**kept, **(more or {})}, note, changed=True)


def _until(ours: str) -> str:
    steps = default(ours)
    return "until then it is once, at the end" if steps is None else f"{ours} is {steps} until it is set"


def _carry_steps(given: HFImport, name: str, ours: str) -> None:
    """A number of steps; below 1 it is a fraction of all steps."""
    steps, total = given[name], given.total_steps
    if steps >= 1:
        given.carry(name, {ours: int(steps)})
    elif total is not None:
        given.carry(name, {ours: math.ceil(steps * total)}, f"{steps} of {total} steps")
    else:
        given.drop(name, f"a fraction of all steps is known with run.max_steps only: set {ours}")


def carry_data(given: HFImport) -> None:
    """Order, workers' memory, and the options of accelerate's loaders."""
    strategy = given["train_sampling_strategy"]
    if strategy == "sequential":
        given.carry("train_sampling_strategy", {"data.shuffle": False})
    elif strategy != "random":
        given.drop("train_sampling_strategy", "samples are drawn at random, and not by length")
    if not given["dataloader_pin_memory"]:
        given.carry("dataloader_pin_memory", {"data.pin_memory": False})
    if given["data_seed"] == given["seed"]:
        given.carry("data_seed", {}, "run.seed is that of the data too")
    else:
        given.drop("data_seed", "one seed is used for the data and everything else: set run.seed")
    if given["use_cpu"]:
        given.carry("use_cpu", {"run.device": "cpu"})
    _carry_accelerator_config(given)


def _carry_accelerator_config(given: HFImport) -> None:
    config: Any = given["accelerator_config"] or {}
    if isinstance(config, str):
        given.drop("accelerator_config", "ds_trainer reads its own data; the file is not read")
        return
    for name, item in config.items():
        usual, note = _ACCELERATOR.get(name, (None, "ds_trainer reads its own data"))
        if item != usual:
            given.found.drop(f"accelerator_config.{name}", item, note)
