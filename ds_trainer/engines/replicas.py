"""Proves that tensor ranks hold the same values of what tensor parallelism has not cut."""

from __future__ import annotations

from ds_trainer.engines.base import Engine
from ds_trainer.engines.measure import content_hash
from ds_trainer.engines.state import MASTER
from ds_trainer.errors import EngineError
from ds_trainer.layout import ParameterSlice
from ds_trainer.mesh.agree import agreed
from ds_trainer.mesh.mesh import Mesh


def check_replicas(engine: Engine, mesh: Mesh, place: str) -> None:
    """Checks that trained parameters which several tensor ranks hold are the same on them, bit for bit.

    Each rank updates its copy by itself. Copies stay equal as long as their gradients are equal, and where a layer
    forgets to sum these over the tensor ranks the copies drift apart, which the loss does not show for long.

    Args:
        engine: Its fp32 masters are compared, of each data rank those that it owns.
        mesh: Process groups.
        place: The step's name in an agreement, such as "step 4".

    Comm: one gather of a hash per such parameter over `tp_host_group` and one agreement; nothing at tensor size 1.

    Raises:
        EngineError: Copies differ; on every rank.
    """
    if mesh.grid.tp_size == 1:
        return
    with agreed(mesh, f"the replicas after {place}"):
        firsts = _first_holders(engine.parameter_layout(), mesh.grid.tp_size)
        state = engine.state()
        hashes = mesh.gather_from_tensor_ranks({n: content_hash([state[n][MASTER].read()]) for n in firsts})
        ranks = mesh.grid.tp_ranks[mesh.grid.dp_rank]
        odd = [
            (name, ranks[rank], ranks[first])
            for name, holders in firsts.items()
            for rank, first in enumerate(holders)
            if hashes[rank][name] != hashes[first][name]
        ]
        if odd:
            name, rank, first = odd[0]
            raise EngineError(
                f"after {place} ranks {first} and {rank} hold different values of {name}, and so do tensor ranks of "
                f"{len({name for name, *_ in odd})} of {len(firsts)} parameters that they have copies of",
                "tensor ranks update their copies of a parameter alike, for which each needs its whole gradient",
                "where parallel.tp_plan leaves a module whole that computes on a rank's own heads or width, give it "
                "the style replicated_with_grad_allreduce; otherwise set parallel.tp to 1, and report it",
            )


def _first_holders(layout: list[ParameterSlice], tp_size: int) -> dict[str, list[int]]:
    """For each tensor rank the first one that holds the same part, by parameter of which there are copies."""
    firsts = {p.name: [p.cut.first_holder(rank) if p.cut else 0 for rank in range(tp_size)] for p in layout}
    return {name: holders for name, holders in firsts.items() if len(set(holders)) < tp_size}
