"""Proves that ranks hold the same values of what several of them have: what no cut has touched, and tied weights."""

from __future__ import annotations

from ds_trainer.distributed.consensus import consensus
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.engines.base import Engine
from ds_trainer.engines.introspect import content_hash
from ds_trainer.engines.state_handles import MASTER
from ds_trainer.errors import EngineError
from ds_trainer.layout import ParameterSlice


def check_replicas(engine: Engine, mesh: Mesh, place: str) -> None:
    """Checks that parameters which several ranks of a copy of the model hold are the same on them, bit for bit.

    Each tensor rank updates its copy of what tensor parallelism has not cut by itself. Copies stay equal as long as
    their gradients are equal, and where a layer forgets to sum these over the tensor ranks the copies drift apart,
    which the loss does not show for long. A tied weight's copy on another pipeline stage gets its owner's value after
    each update.

    Args:
        engine: Its fp32 masters are compared, of each data rank those that it owns; of tied weights what it runs with.
        mesh: Process groups.
        place: The step's name in the consensus, such as "step 4".

    Comm: one gather of a hash per such parameter over `tp_host_group`, one over `pp_host_group`, and one consensus;
        nothing where one rank holds the model.

    Raises:
        EngineError: Copies differ; on every rank.
    """
    if mesh.grid.model_size == 1:
        return
    with consensus(mesh, f"the replicas after {place}"):
        if mesh.grid.tp_size > 1:
            _check_tensor_ranks(engine, mesh, place)
        if mesh.grid.pp_size > 1:
            _check_stages(engine, mesh, place)


def _check_tensor_ranks(engine: Engine, mesh: Mesh, place: str) -> None:
    firsts = _first_holders(engine.parameter_layout(), mesh.grid.tp_size)
    state = engine.state()
    hashes = mesh.gather_over_tp({n: content_hash([state[n][MASTER].read()]) for n in firsts})
    ranks = next(ranks for ranks in mesh.grid.tp_ranks if mesh.grid.rank in ranks)
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
    firsts = {p.name: [p.sharding.first_holder(rank) if p.sharding else 0 for rank in range(tp_size)] for p in layout}
    return {name: holders for name, holders in firsts.items() if len(set(holders)) < tp_size}


def _check_stages(engine: Engine, mesh: Mesh, place: str) -> None:
    hashes = mesh.gather_over_pp({n: content_hash([value]) for n, value in engine.shared_parameters().items()})
    ranks = next(ranks for ranks in mesh.grid.pp_ranks if mesh.grid.rank in ranks)
    for name in {name: None for held in hashes for name in held}:
        values = {rank: held[name] for rank, held in zip(ranks, hashes, strict=True) if name in held}
        if len(set(values.values())) > 1:
            raise EngineError(
                f"after {place} ranks {', '.join(map(str, values))} hold different values of {name}, which the stages "
                "of a pipeline share",
                "a tied weight's copy gets the value of its owner after each update",
                "remove what changes the weight from outside, such as a callback; otherwise set parallel.pp to 1, and "
                "report it",
            )
