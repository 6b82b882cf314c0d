"""Tensor ranks as threads of this process: a collective costs microseconds, and a test milliseconds."""

import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from ds_trainer.parallel.tensor import collectives

TIMEOUT_S = 60.0


def on_threads(function, size, *args):
    """Runs `function(group, *args)` on each rank of a group and returns one result per rank."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    store, results, errors = dist.HashStore(), [None] * size, []

    def run(rank):
        dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
        try:
            results[rank] = function(dist.group.WORLD, *args)
        except BaseException as error:  # noqa: BLE001 - the ranks that wait for this one leave, and the test raises it
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if errors:
        raise errors[0]
    assert not stuck, f"ranks {stuck} wait for others"
    return results


def local_part(whole, sharding, rank):
    """What a rank holds of a tensor; padding is 0."""
    part, at = whole.new_zeros(sharding.local_shape), 0
    for start, stop in sharding.ranges[rank]:
        part.narrow(sharding.dim, at, stop - start).copy_(whole.narrow(sharding.dim, start, stop - start))
        at += stop - start
    return part


def fill(layer, module, **shardings):
    """Gives a layer a module's values; a parameter with a cut its part of them."""
    for name, parameter in module.named_parameters():
        sharding = shardings.get(name)
        value = (
            parameter.detach().clone()
            if sharding is None
            else local_part(parameter.detach(), sharding, layer.group.rank())
        )
        assert getattr(layer, name).is_meta and getattr(layer, name).shape == value.shape
        setattr(layer, name, nn.Parameter(value, parameter.requires_grad))
    return layer


class Communication:
    """Counts the collectives of rank 0, where they are called: kind and payload, of gathers and scatters the whole."""

    def __init__(self, monkeypatch):
        self.calls = []
        self._watch(monkeypatch, collectives.dist, "all_reduce", "all-reduce", lambda args: args[0])
        self._watch(monkeypatch, collectives, "_all_gather", "all-gather", lambda args: args[0])
        self._watch(monkeypatch, collectives, "_reduce_scatter", "reduce-scatter", lambda args: args[1])

    def _watch(self, monkeypatch, module, name, kind, payload):
        stock = getattr(module, name)

        def watched(*args, **kwargs):
            if dist.get_rank() == 0:
                self.calls.append((kind, payload(args).nbytes))
            return stock(*args, **kwargs)

        monkeypatch.setattr(module, name, watched)

    def since_last(self):
        """What was called since this was last asked."""
        calls, self.calls = self.calls, []
        return calls
