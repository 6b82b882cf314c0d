"""Reads what TensorBoard would show."""

from pathlib import Path


def scalars(folder: Path, tag: str) -> list:
    """The events of a tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events.Scalars(tag)
