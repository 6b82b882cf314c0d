"""Trackers (TensorBoard, W&B, MLflow, trackio), through accelerate's classes, fed by rank 0."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any

from ds_trainer.callbacks.base import Callback
from ds_trainer.callbacks.hf_logs import by_phase, hf_logs
from ds_trainer.callbacks.view import TrainerView
from ds_trainer.config.keys import leaf_values
from ds_trainer.config.schema import RunConfig
from ds_trainer.distributed.consensus import consensus
from ds_trainer.errors import MachineError
from ds_trainer.health.expected_wait import expected_wait
from ds_trainer.log import get_logger, warn_once
from ds_trainer.metrics import EvalMetrics, StepMetrics

START_S = 60.0
"""Longest wait at the start of a run for a tracker: a login, a server, a slow import."""
FINISH_S = 15.0
"""Longest wait at the end of a run for a tracker to send its last lines: a stopped run has little time."""
MAX_WAITING_LINES = 10_000
"""Most lines that wait for a slow tracker; new ones are dropped then."""


class TrackerCallback(Callback):
    """Sends the config, every logged line and every evaluation to the trackers of `logging.report_to`.

    A resumed run continues the trackers' runs that its checkpoint names. Every rank has one; only that of rank 0 sends.
    """

    def __init__(self) -> None:
        self._threads: list[_TrackerThread] = []
        self._runs: dict[str, str] = {}

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Starts the trackers.

        Comm: one consensus over all ranks.

        Raises:
            MachineError: A tracker does not start.
        """
        with consensus(trainer.run.mesh, "the start of the trackers"):
            if trainer.is_world_process_zero:
                self._start(trainer.config, trainer.state.global_step)

    def _start(self, config: RunConfig, step: int) -> None:
        for name in config.logging.report_to:
            earlier = self._runs.get(name)
            thread = _TrackerThread(name, _make(name, config, earlier, step))
            self._runs[name] = thread.start({} if earlier else _flat(config))
            self._threads.append(thread)
            get_logger().info("%s: run %s", name, self._runs[name])

    def on_log(self, trainer: TrainerView, metrics: StepMetrics) -> None:
        """Sends a training line."""
        self._send(metrics)

    def on_evaluate(self, trainer: TrainerView, metrics: EvalMetrics) -> None:
        """Sends an evaluation."""
        self._send(metrics)

    def _send(self, metrics: StepMetrics | EvalMetrics) -> None:
        for thread in self._threads:
            thread.log(by_phase(hf_logs(metrics)), metrics.step)

    def close(self) -> None:
        """Waits a limited time for the trackers to send their last lines."""
        for thread in self._threads:
            thread.finish()
        self._threads = []

    def state_dict(self) -> dict[str, Any]:
        """The trackers' names for this run."""
        return dict(self._runs)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues these runs."""
        self._runs = dict(state)


class _TrackerThread:
    """Calls one tracker, always from the same separate thread.

    A slow or unreachable server blocks a tracker's call, for minutes where it retries; a step must not wait for that.
    There is only one thread, since MLflow keeps its active run by thread.
    """

    def __init__(self, name: str, tracker: Any) -> None:
        self._name, self._tracker = name, tracker
        self._lines: queue.SimpleQueue[tuple[dict[str, float], int] | None] = queue.SimpleQueue()
        self._started: Future[str] = Future()
        self._finished = threading.Event()
        self._faulty = False

    def start(self, config: dict[str, Any]) -> str:
        """Starts the tracker, stores the config in it if there is any, and returns its name for the run.

        Raises:
            MachineError: It fails, or takes longer than `START_S`.
        """
        threading.Thread(target=self._work, args=(config,), name=self._name, daemon=True).start()
        try:
            with expected_wait():
                return self._started.result(START_S)
        except TimeoutError:
            found = f"{self._name} has not started within {START_S:.0f} s"
        except Exception as error:  # noqa: BLE001  whatever a tracker's package raises
            found = f"{self._name} does not start: {type(error).__name__}: {error}"
        raise MachineError(
            found,
            "a run does not begin before its trackers have",
            f"log in to {self._name}, use its offline mode, or remove it from logging.report_to",
        )

    def log(self, line: dict[str, float], step: int) -> None:
        """Queues a line without waiting."""
        if self._lines.qsize() < MAX_WAITING_LINES:
            self._lines.put((line, step))
        else:
            warn_once(f"{self._name} is {MAX_WAITING_LINES} lines behind: new ones are dropped")

    def finish(self) -> None:
        """Waits until the tracker has sent everything, at most `FINISH_S`."""
        self._lines.put(None)
        with expected_wait():
            in_time = self._finished.wait(FINISH_S)
        if not in_time:
            warn_once(f"{self._name} has not finished within {FINISH_S:.0f} s: unsent lines are lost")

    def _work(self, config: dict[str, Any]) -> None:
        try:
            self._tracker.start()
            if config:
                self._tracker.store_init_configuration(config)
            self._started.set_result(_run_name(self._name, self._tracker))
        except Exception as error:  # noqa: BLE001  whatever a tracker's package raises; `start` says it
            self._started.set_exception(error)
            return
        while (item := self._lines.get()) is not None:
            self._tolerant(self._tracker.log, *item)
        self._tolerant(self._tracker.finish)
        self._finished.set()

    def _tolerant(self, call: Callable[..., None], *args: Any) -> None:
        """An error of a tracker during a run loses its lines and does not end the run."""
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001  whatever a tracker's package raises
            if not self._faulty:
                get_logger().warning("warning: %s loses lines: %s: %s", self._name, type(error).__name__, error)
            self._faulty = True


def _make(name: str, config: RunConfig, earlier: str | None, step: int) -> Any:
    """The tracker, not yet started.

    Args:
        name: An entry of `logging.report_to`.
        config: The run's config, resolved.
        earlier: The tracker's name for the run that this one resumes; None for a new run.
        step: Optimizer steps taken.
    """
    from accelerate import tracking

    # accelerate's trackers and its logger take the rank from its PartialState. That singleton would read the launcher's
    # variables, take every rank for the only one on CPU, and stay for the rest of the process. Only rank 0 gets here,
    # so it is not needed.
    tracking.logger = logging.getLogger(tracking.__name__)
    project, run, out = config.logging.project_name, config.logging.run_name, Path(config.run.output_dir)
    tracker: Any
    match name:
        case "tensorboard":
            # Events that a crashed run wrote after its checkpoint are hidden.
            purge = {"purge_step": step + 1} if earlier else {}
            tracker = tracking.TensorBoardTracker(earlier or _free(out / name, str(run)), out / name, **purge)
        case "wandb":
            # Without limits it waits for its server for ever when the interpreter ends.
            limits = {"init_timeout": 0.75 * START_S, "finish_timeout": FINISH_S}
            resume = "allow" if earlier else None
            tracker = tracking.WandBTracker(project, name=run, dir=out, id=earlier, resume=resume, settings=limits)
        case "mlflow":
            tracker = tracking.MLflowTracker(project, run_name=run, run_id=earlier)
        case "trackio":
            tracker = tracking.TrackioTracker(project, name=earlier or run, resume="must" if earlier else "never")
    tracker.main_process_only = False
    return tracker


def _free(folder: Path, run: str) -> str:
    """A name in the folder that no earlier run has."""
    names = (run if n == 0 else f"{run}.{n}" for n in count())
    return next(name for name in names if not (folder / name).exists())


def _run_name(name: str, tracker: Any) -> str:
    """The name by which `_make` continues the run of a started tracker."""
    match name:
        case "wandb":
            return tracker.tracker.id
        case "mlflow":
            return tracker.tracker.info.run_id
        case "trackio":
            return tracker.tracker.name
    return tracker.run_name


def _flat(config: RunConfig) -> dict[str, Any]:
    """Dotted key -> value, of the types that trackers take; MLflow takes no key with a `$`."""
    plain = (bool, int, float, str)
    values = {key: value for key, value in leaf_values(config).items() if key != "$schema"}
    return {key: value if isinstance(value, plain) else str(value) for key, value in values.items()}
