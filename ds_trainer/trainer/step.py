"""What one optimizer step consists of: its passes, its update, its place in a logging window."""

from __future__ import annotations

import time

import torch

from ds_trainer.callbacks.trainer_state import TrainerState
from ds_trainer.data.loader import BatchLoader
from ds_trainer.distributed.memory import peak_memory_bytes
from ds_trainer.engines.base import Engine
from ds_trainer.executors.step import StepLoss, run_step
from ds_trainer.log import warn_once
from ds_trainer.metrics import StepMetrics, WindowMean
from ds_trainer.trainer.non_finite import NonFinitePolicy
from ds_trainer.trainer.run import Run


def run_passes(run: Run, step: int) -> StepLoss:
    """Runs forward and backward of a step's micro-batches; see `run_step`.

    Args:
        run: The run.
        step: The step, from 0.
    """
    loader, place = run.training_data(), step_name(step)
    microbatches = loader.sampler.microbatches(step)
    run.mesh.monitor.at(place, step + 1, [index for samples in microbatches for index in samples])
    return run_step(loader.step(step), microbatches, run.executor, run.loss, run.mesh, place)


def step_name(step: int) -> str:
    """Name of a step, from 0, in log lines and errors, which count from 1."""
    return f"step {step + 1}"


def update_weights(engine: Engine, step_loss: StepLoss, state: TrainerState, non_finite: NonFinitePolicy) -> bool:
    """Updates the weights, unless the step has no label token or is not finite.

    Args:
        engine: Holds the step's gradients.
        step_loss: The step's loss.
        state: The run before the step; its gradient norm and its counts of such steps are set.
        non_finite: Decides what a loss or gradient that is not finite leads to.

    Returns:
        Whether the step was skipped because it is not finite.

    Raises:
        NonFiniteError: It is not finite, and the policy is to stop.
    """
    if step_loss.num_tokens == 0:
        state.empty_steps += 1
        state.grad_norm = 0.0
        warn_once(f"step {state.global_step + 1} has no label token: it updates nothing, schedule and data move on")
        return False
    non_finite.check_loss(step_loss, state.global_step)
    outcome = engine.optimizer_step()
    state.grad_norm = outcome.grad_norm
    state.skipped_steps += outcome.skipped
    non_finite.after_step(state.global_step, outcome.skipped)
    return outcome.skipped


class StepMeter:
    """Measures a step, beginning when it is constructed.

    Args:
        loader: The training data.
    """

    def __init__(self, loader: BatchLoader) -> None:
        self._loader = loader
        self._began, self._waited = time.monotonic(), loader.input_wait_s

    def add_to(self, window: WindowMean, step: int, step_loss: StepLoss, skipped: bool) -> None:
        """Ends the measurement and adds the step to a logging window.

        Args:
            window: The window.
            step: The step, from 0.
            step_loss: Its loss.
            skipped: Whether its update was skipped.
        """
        window.add(
            loss_sum=step_loss.loss_sum,
            num_tokens=step_loss.num_tokens,
            tokens=step_loss.seen_tokens,
            samples=len(self._loader.sampler.global_batch(step)),
            step_s=time.monotonic() - self._began,
            input_wait_s=self._loader.input_wait_s - self._waited,
            skipped=skipped,
        )


def close_window(window: WindowMean, state: TrainerState, lr: float, device: torch.device) -> StepMetrics:
    """The metrics of a logging window, which begins anew.

    Args:
        window: The window.
        state: The run after the window's last step.
        lr: Learning rate of that step.
        device: Its peak memory is measured.
    """
    return window.take(
        step=state.global_step,
        epoch=state.epoch,
        lr=lr,
        grad_norm=state.grad_norm,
        memory_bytes=peak_memory_bytes(device),
    )
