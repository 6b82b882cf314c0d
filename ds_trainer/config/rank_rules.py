"""Whether the number of ranks is a multiple of the ranks of one model replica. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ds_trainer.config.provenance import Provenance
from ds_trainer.config.resolved import Machine
from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import ConfigError, one_of

_RANKS = {"pp": "pipeline ranks", "tp": "tensor-parallel ranks"}


def check_ranks(config: RunConfig, given: Provenance, machine: Machine) -> Iterator[ConfigError]:
    """A number of ranks that is no multiple of pp x tp."""
    pp, tp = config.parallel.pp, config.parallel.tp
    if machine.world % (pp * tp) == 0:
        return
    axes = [axis for axis, size in (("pp", pp), ("tp", tp)) if size > 1]
    says = " and ".join(given.describe(f"parallel.{axis}") for axis in axes)
    yield ConfigError(
        f"{says} on {machine.world} {'ranks' if machine.world > 1 else 'rank'}",
        f"ranks = {' x '.join(_RANKS[axis] for axis in axes)} x data-parallel ranks",
        f"{_sizes_that_fit(pp, tp, machine.world)}, or start a multiple of {pp * tp} ranks",
    )


def _sizes_that_fit(pp: int, tp: int, world: int) -> str:
    """The axis to change, and the sizes that divide the ranks."""
    if world % pp == 0:
        return f"set parallel.tp to {one_of(_divisors(world // pp))}"
    if world % tp == 0:
        return f"set parallel.pp to {one_of(_divisors(world // tp))}"
    return f"set parallel.pp and parallel.tp to sizes whose product is {one_of(_divisors(world))}"


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
