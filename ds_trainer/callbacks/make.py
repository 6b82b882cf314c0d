"""Which built-in callbacks a run has, and in which order."""

from __future__ import annotations

from pathlib import Path

from ds_trainer.callbacks.base import Callback
from ds_trainer.callbacks.builtin import MetricsCallback, PlotCallback, ProgressCallback
from ds_trainer.callbacks.early_stopping import EarlyStoppingCallback
from ds_trainer.callbacks.trackers import TrackerCallback
from ds_trainer.config.schema import RunConfig
from ds_trainer.run_folder import METRICS


def built_in_callbacks(config: RunConfig, is_first: bool) -> list[Callback]:
    """The built-in callbacks by config.

    Args:
        config: The run's config.
        is_first: Whether this is rank 0, which alone prints, writes and draws.
    """
    folder = Path(config.run.output_dir)
    built_in: list[Callback] = []
    if config.evaluation.early_stopping_patience is not None:
        built_in.append(EarlyStoppingCallback(config.evaluation))
    if config.logging.report_to:
        built_in.append(TrackerCallback())
    if is_first:
        built_in += [ProgressCallback(config.logging.progress_bar), MetricsCallback(folder / METRICS)]
        if config.logging.plots:
            built_in.append(PlotCallback(folder / METRICS, folder))
    return built_in
