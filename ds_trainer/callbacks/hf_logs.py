"""Metrics under the names that transformers logs, which trackers and transformers' callbacks expect."""

from __future__ import annotations

from dataclasses import asdict

from ds_trainer.metrics import HF_NAMES, EvalMetrics, StepMetrics


def hf_logs(metrics: StepMetrics | EvalMetrics) -> dict[str, float]:
    """`loss`, `learning_rate`, `grad_norm`, `epoch`, `eval_loss`, ..., and the other values, without `step`."""
    line = asdict(metrics)
    line |= line.pop("extra", {})
    return {HF_NAMES.get(name, name): value for name, value in line.items() if name != "step" and value is not None}


def by_phase(logs: dict[str, float]) -> dict[str, float]:
    """`train/loss` for `loss` and `eval/loss` for `eval_loss`, as transformers' integrations call them."""
    phase = "eval_"
    return {f"eval/{n.removeprefix(phase)}" if n.startswith(phase) else f"train/{n}": v for n, v in logs.items()}
