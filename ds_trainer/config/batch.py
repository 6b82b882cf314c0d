"""The batch equation: global_size = micro_size x accumulation x data ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_trainer.config.schema import BatchConfig
from ds_trainer.errors import ConfigError

_RULE = "batch.global_size = batch.micro_size x batch.accumulation x data ranks"


@dataclass(frozen=True)
class Batch:
    """A solved batch equation.

    Args:
        global_size: Samples per optimizer step over all ranks.
        micro_size: Samples per forward pass of one rank.
        accumulation: Forward passes of one rank per optimizer step.
        reasons: Key of the section -> why it has its value, for those that were derived.
    """

    global_size: int
    micro_size: int
    accumulation: int
    reasons: Mapping[str, str]


@dataclass(frozen=True)
class _DataRanks:
    """Ranks that see different samples, and the words for them."""

    number: int
    tp: int

    def __str__(self) -> str:
        every = f" ({self.number * self.tp} ranks / parallel.tp {self.tp})" if self.tp > 1 else ""
        return f"{self.number} data ranks{every}"


def solve_batch(batch: BatchConfig, data_ranks: int, tp: int = 1) -> Batch:
    """Fills in what the given numbers determine; what they leave open is 1.

    Args:
        batch: Section with any of the three numbers.
        data_ranks: Ranks that see different samples.
        tp: Ranks that share a copy of the model, and so see the same samples.

    Raises:
        ConfigError: The numbers contradict one another; names all of them and the nearest that work.
    """
    total, micro, accumulation = batch.global_size, batch.micro_size, batch.accumulation
    ranks = _DataRanks(data_ranks, tp)
    if total is None:
        return _from_factors(micro, accumulation, ranks)
    reasons: dict[str, str] = {}
    if micro is None and accumulation is None:
        micro, reasons["micro_size"] = 1, "1 needs the least memory; the rest is accumulated"
    known = (micro or 1) * (accumulation or 1) * data_ranks
    if total % known or (micro and accumulation and total != known):
        raise _contradiction(total, micro, accumulation, ranks)
    derived = total // known
    if accumulation is None:
        reasons["accumulation"] = f"{total} / (micro_size {micro} x {ranks})"
    elif micro is None:
        reasons["micro_size"] = f"{total} / (accumulation {accumulation} x {ranks})"
    return Batch(total, micro or derived, accumulation or derived, reasons)


def _from_factors(micro: int | None, accumulation: int | None, ranks: _DataRanks) -> Batch:
    reasons = {}
    if micro is None:
        reasons["micro_size"] = "1 where nothing else determines it"
    if accumulation is None:
        reasons["accumulation"] = "1 where nothing else determines it"
    micro, accumulation = micro or 1, accumulation or 1
    reasons["global_size"] = f"micro_size {micro} x accumulation {accumulation} x {ranks}"
    return Batch(micro * accumulation * ranks.number, micro, accumulation, reasons)


def _contradiction(total: int, micro: int | None, accumulation: int | None, ranks: _DataRanks) -> ConfigError:
    data_ranks = ranks.number
    known = (micro or 1) * (accumulation or 1) * data_ranks
    factors = [
        f"batch.micro_size {micro}" if micro else "",
        f"batch.accumulation {accumulation}" if accumulation else "",
    ]
    product = " x ".join([*filter(None, factors), str(ranks)])
    if micro and accumulation:
        fixes = [f"batch.global_size to {known}"]
        if total % (micro * data_ranks) == 0:
            fixes.append(f"batch.accumulation to {total // (micro * data_ranks)}")
        if total % (accumulation * data_ranks) == 0:
            fixes.append(f"batch.micro_size to {total // (accumulation * data_ranks)}")
        return ConfigError(f"batch.global_size {total}, but {product} = {known}", _RULE, f"set {' or '.join(fixes)}")
    below, above = total // known * known, -(-total // known) * known
    fixes = [f"batch.global_size to {' or '.join(str(size) for size in (below, above) if size)}"]
    name, given = ("micro_size", micro) if micro else ("accumulation", accumulation)
    if given and total % data_ranks == 0:
        share = total // data_ranks
        nearest = min((n for n in range(1, share + 1) if share % n == 0), key=lambda n: (abs(n - given), n))
        fixes.append(f"batch.{name} to {nearest}")
    return ConfigError(
        f"batch.global_size {total} is no multiple of {product} = {known}", _RULE, f"set {' or '.join(fixes)}"
    )
