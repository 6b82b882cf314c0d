"""Checks that ranks hold equal replicas: of parameters that tensor parallelism does not shard, and of tied weights."""

from __future__ import annotations

from ds_trainer.distributed.consensus import consensus
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.engines.base import Engine
from ds_trainer.engines.introspect import content_hash
from ds_trainer.engines.state_handles import MASTER
from ds_trainer.errors import EngineError
from ds_trainer.layout import ParameterSlice


def check_replicas(engine: Engine, mesh: Mesh, place: str) -> None:
    """Checks that parameters which several ranks of one model hold are the same on them, bit for bit.

    Each tensor-parallel rank updates its replica of a parameter that is not sharded. Replicas stay equal as long as
    their gradients are equal. Where a layer does not sum these over the tensor-parallel ranks, the replicas drift
    apart, and for long the loss does not show it. A tied weight's replica on another pipeline stage gets its owner's
    value after each update.

    Args:
        engine: Its fp32 masters are compared, those that a data-parallel rank owns; of tied weights what it runs with.
        mesh: Process groups.
        place: The step's name in the consensus, such as "step 4".

    Comm: one gather of a hash per such parameter over `tp_host_group`, one over `pp_host_group`, and one consensus;
        nothing where one rank holds the model.

    Raises:
        EngineError: Replicas differ; on every rank.
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
            f"after {place} ranks {first} and {rank} hold different values of {name}; tensor-parallel ranks differ in "
            f"{len({name for name, *_ in odd})} of {len(firsts)} parameters that they hold replicas of",
            "tensor-parallel ranks update their replicas of a parameter alike, for which each needs its full gradient",
            "where parallel.tp_plan does not shard a module that computes on a rank's own heads or width, give it "
            "the style replicated_with_grad_allreduce; otherwise set parallel.tp to 1, and report it",
        )


def _first_holders(layout: list[ParameterSlice], tp_size: int) -> dict[str, list[int]]:
    """For each tensor-parallel rank the first one that holds the same shard, by parameter that has replicas."""
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
                "a tied weight's replica gets the value of its owner after each update",
                "remove what changes the weight from outside, such as a callback; otherwise set parallel.pp to 1, and "
                "report it",
            )
