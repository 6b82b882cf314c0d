"""How many optimizer steps a run has. Pure."""

from __future__ import annotations


def steps_per_epoch(num_samples: int, global_size: int) -> int:
    """Optimizer steps of one pass: the last, shorter window of an epoch is a step of its own."""
    return -(-num_samples // global_size)


def total_steps(num_samples: int | None, global_size: int, epochs: int | None, max_steps: int | None) -> int:
    """Optimizer steps of a run.

    Every epoch has `ceil(num_samples / global_size)` steps, so that each sample is seen once an epoch and no step
    reaches into the next one. 10 samples, 3 epochs, global size 16: 3 steps.

    Args:
        num_samples: Samples of one epoch; None where the data has no length.
        global_size: Samples per optimizer step over all ranks.
        epochs: Passes over the data; None: as many as `max_steps` needs.
        max_steps: Upper bound; None: none.

    Raises:
        ValueError: Neither an epoch's length nor `max_steps` says where the run ends.
    """
    bounds = [max_steps] if max_steps is not None else []
    if num_samples is not None and epochs is not None:
        bounds.append(epochs * steps_per_epoch(num_samples, global_size))
    if not bounds:
        raise ValueError("neither epochs of known length nor max_steps bound the run")
    return min(bounds)
