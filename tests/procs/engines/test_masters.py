"""fp32 masters keep the checkpoint's own precision in a bf16 run, under every stage and from either kind of source."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.helpers.parity import collate, rows
from tests.helpers.tiny import tiny_llama

CELLS = {
    "ddp": {"parallel": {"engine": "ddp"}},
    "zero0": {"zero": {"stage": 0}},
    "zero1": {"zero": {"stage": 1}},
    "zero2": {"zero": {"stage": 2}},
    "zero3": {"zero": {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 3000}},
    "zero3-cpu": {"zero": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
    "fsdp2": {"parallel": {"engine": "fsdp2"}},
}


def initial_masters(checkpoint: str, out: str, sections: dict, as_instance: bool) -> dict[str, torch.Tensor]:
    from ds_trainer.trainer.trainer import Trainer

    config = {
        "model": {} if as_instance else {"path": checkpoint},
        "precision": {"dtype": "bf16"},
        "batch": {"global_size": 4, "micro_size": 2},
        "run": {"output_dir": out, "device": "cpu", "max_steps": 1},
        "checkpoint": {"export": False},
        "logging": {"plots": False, "progress_bar": False},
        **sections,
    }
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32) if as_instance else None
    trainer = Trainer(model=model, config=config, train_dataset=rows(65), data_collator=collate)
    masters = {name: value.clone() for name, value in trainer.engine.full_parameters()}
    trainer.train_step()
    trainer.close()
    return masters


@pytest.mark.case("G1")
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("as_instance", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["path", "instance"])
def test_masters_hold_every_bit_of_an_fp32_checkpoint(world, tmp_path, cell, as_instance):
    checkpoint = tmp_path / "checkpoint"
    tiny_llama().save_pretrained(checkpoint)
    expected = load_file(checkpoint / "model.safetensors")
    for masters in world(initial_masters, 2, str(checkpoint), str(tmp_path), CELLS[cell], as_instance):
        assert set(masters) == set(expected)
        for name, value in masters.items():
            assert torch.equal(value, expected[name]), name
