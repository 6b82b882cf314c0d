"""On a GPU every engine takes the steps that plain torch takes on the CPU: whole, offloaded, and fused."""

import pytest
import torch

from tests.helpers.runs import D8, ENGINES, make_trainer
from tests.helpers.tiny import oracle, tiny_llama

pytestmark = pytest.mark.gpu

STEPS = 4
ADAMW = {"lr": 1e-3, "eps": 1e-4}
"""Adam divides small gradients by themselves, so rounding grows there; this eps bounds it."""
HOST = {"device": "cpu"}
OFFLOAD = {
    "zero2": {"zero": {"offload_optimizer": HOST}},
    "zero3": {"zero": {"offload_optimizer": HOST, "offload_param": HOST}},
    "fsdp2": {"fsdp": {"cpu_offload": True}},
}


@pytest.fixture(scope="module")
def cpu_losses():
    model, losses = tiny_llama(), []
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, **ADAMW)
    for _ in range(STEPS):
        losses.append(oracle(model, D8)[0])
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    return pytest.approx(losses, rel=1e-5)


def trainer_on_gpu(engine, out, **sections):
    run = {"max_steps": STEPS, "device": "cuda"}
    return make_trainer(engine, out, run=run, optimizer={"name": "adamw", **ADAMW}, **sections)


def losses_of(trainer):
    return [line.loss for line in trainer.train().log_history]


@pytest.mark.case("B8")
@pytest.mark.parametrize("engine", ENGINES)
def test_losses_over_nccl_are_those_of_plain_torch_on_the_cpu(gpu, tmp_path, cpu_losses, engine):
    assert gpu(train, engine, tmp_path) == (cpu_losses, "nccl", "cuda:0")


def train(engine, out):
    trainer = trainer_on_gpu(engine, out)
    losses = losses_of(trainer)
    backend = trainer.run.mesh.dp_group._get_backend(torch.device("cuda")).name()
    device = trainer.engine.facts().param_device
    trainer.close()
    return losses, backend, device


@pytest.mark.parametrize("engine", OFFLOAD)
def test_offload_keeps_page_locked_memory_on_the_host_and_the_losses(gpu, tmp_path, cpu_losses, engine):
    losses, optimizer_device, kept = gpu(train_offloaded, engine, tmp_path)
    assert losses == cpu_losses and optimizer_device == "cpu"
    assert kept and set(kept) == {("cpu", True)}


def train_offloaded(engine, out):
    trainer = trainer_on_gpu(engine, out, **OFFLOAD[engine])
    losses, parameters = losses_of(trainer), list(trainer.run.model.parameters())
    if engine == "zero2":
        kept = trainer.engine.module.optimizer.single_partition_of_fp32_groups
    elif engine == "zero3":
        kept = [p.ds_tensor for p in parameters]
    else:
        kept = [p.to_local() for p in parameters]
    result = losses, trainer.engine.facts().optimizer_device, [(t.device.type, t.is_pinned()) for t in kept]
    trainer.close()
    return result


@pytest.mark.parametrize("engine", ENGINES)
def test_all_tensors_are_updated_in_one_kernel(gpu, tmp_path, engine):
    assert "aten::_fused_adamw_" in gpu(operators_of_a_step, engine, tmp_path)


def operators_of_a_step(engine, out):
    trainer = trainer_on_gpu(engine, out)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        trainer.train_step()
    trainer.close()
    return {event.name for event in profile.events()}
