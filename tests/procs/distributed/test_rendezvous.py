"""How ranks find one another, and what they say when they do not."""

import io
import os
import socket
from contextlib import redirect_stderr
from datetime import timedelta

import pytest
import torch

from ds_trainer.distributed import rendezvous
from ds_trainer.errors import MachineError
from ds_trainer.launch.rank_grid import Grid
from tests.helpers.launch import free_port


def meet(port):
    """On each rank: what the other one wrote into the store that both have joined."""
    rank = int(os.environ["RANK"])
    os.environ["MASTER_PORT"] = str(port)
    store = rendezvous.join_store(Grid(2, rank, rank, 2))
    store.set(f"from {rank}", f"rank {rank}")
    heard = store.get(f"from {1 - rank}").decode()
    torch.distributed.barrier()  # The store ends with rank 0.
    return heard


def test_ranks_share_one_store(world):
    assert world(meet, 2, free_port()) == ["rank 1", "rank 0"]


def wait_in_vain(rank, port):
    """One rank of two, alone: the two parts of its error, and what it said before."""
    rendezvous._QUIET_S, rendezvous._NO_ANSWER_S = 0.0, 0.5
    os.environ["MASTER_PORT"] = str(port)
    said = io.StringIO()
    with redirect_stderr(said), pytest.raises(MachineError) as error:
        rendezvous.join_store(Grid(2, rank, rank, 2), timedelta(seconds=1))
    return error.value.found, error.value.change, said.getvalue()


@pytest.mark.case("F11")
@pytest.mark.parametrize(
    ("rank", "awaited", "why"),
    [
        (0, "waiting for 1 of 2 ranks at", "after 1 s only 1 of 2 ranks came"),
        (1, "waiting for rank 0 of 2 ranks at", "after 1 s nobody listens there: [Errno 111] Connection refused"),
    ],
)
def test_a_rank_says_whom_it_waits_for_and_ends_when_they_do_not_come(world, rank, awaited, why):
    port = free_port()
    ((found, change, said),) = world(wait_in_vain, 1, rank, port)
    assert said.count(f"{awaited} 127.0.0.1:{port}") == 1
    assert found == f"rank {rank} cannot join the process group at 127.0.0.1:{port} ({why})"
    assert "if ranks are missing start all of them" in change


@pytest.mark.case("F11")
@pytest.mark.parametrize(
    ("rank", "why"), [(0, "address already in use"), (1, "something else listens there, and does not answer")]
)
def test_a_busy_port_ends_every_rank_and_names_each_launchers_option(world, rank, why):
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        ((found, change, _),) = world(wait_in_vain, 1, rank, port)
    assert f"at 127.0.0.1:{port} " in found and why in found
    for option in ("deepspeed --master_port", "torchrun --master_port", "--main_process_port", "MASTER_PORT=N for"):
        assert option in change
