"""Reading a launcher's variables. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ds_trainer.errors import MachineError
from ds_trainer.launch.rank_grid import Grid


def number(environ: Mapping[str, str], name: str) -> int:
    """A variable that is set, as a number.

    Raises:
        MachineError: It is not a whole number.
    """
    try:
        return int(environ[name])
    except ValueError:
        raise MachineError(
            f"{name}={environ[name]} is not a number",
            "launchers set ranks and their number as whole numbers",
            f"start with a launcher, or set {name} to a number",
        ) from None


def require(environ: Mapping[str, str], names: Sequence[str], launcher: str) -> None:
    """Checks that all of a launcher's variables are set.

    Raises:
        MachineError: Some are missing; the text names them and those that are set.
    """
    if missing := [name for name in names if not environ.get(name)]:
        raise MachineError(
            f"the environment sets {shown(environ, names)} but not {', '.join(missing)}",
            f"{launcher} sets {', '.join(names)} together",
            "start with deepspeed, torchrun, accelerate launch or ds-trainer train --nproc N (one machine), srun or "
            f"mpirun; or set {', '.join(missing)}",
        )


def grid_of(environ: Mapping[str, str], names: tuple[str, str, str], local_world: tuple[str, int]) -> Grid:
    """This process's coordinates according to a launcher's variables.

    Args:
        environ: The environment.
        names: Names of the variables of the number of ranks, the rank and the local rank.
        local_world: Source of the number of ranks on this node, and the number.

    Raises:
        MachineError: Variables are not numbers, or contradict one another.
    """
    world, rank, local_rank = (number(environ, name) for name in names)
    source, on_node = local_world
    if not (0 <= rank < world and 0 <= local_rank < on_node <= world):
        raise MachineError(
            " ".join(f"{name}={environ[name]}" for name in names) + f" {source}={on_node}",
            "0 <= rank < number of ranks, and 0 <= local rank < ranks on the node <= number of ranks",
            "start with one launcher only, and unset variables left over from another",
        )
    return Grid(world, rank, local_rank, on_node)


def shown(environ: Mapping[str, str], names: Iterable[str]) -> str:
    """`A=1, B=2` of those variables that are set."""
    return ", ".join(f"{name}={environ[name]}" for name in names if environ.get(name))
