"""Every smoke config of ds_configs trains its two steps and exports."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from ds_trainer.config.backend import backend
from ds_trainer.config.io import load_config
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.launch import chats, write_jsonl
from tests.helpers.tiers import tiers

SMOKE = Path(__file__).parents[2] / "ds_configs" / "smoke"
CLASSES = {"deepspeed": "DeepSpeedEngine", "ddp": "DistributedDataParallel", "fsdp2": "FSDP2"}
CLASSES |= {"ddp of stages": "DDPEngine"}
RANKS = {"fsdp2_hsdp.json": 4, "tp2_pp2_dp2.json": 8}


def train(name: str, overrides: list[str]) -> tuple[int, str]:
    from ds_trainer.trainer.trainer import Trainer

    trainer = Trainer(config=load_config(SMOKE / name, overrides))
    state = trainer.train()
    trainer.close()
    return state.global_step, trainer.run.facts.engine


QUICK = ["accelerate_ddp.json", "fsdp2_selective_chunked.json", "pp2_zbv.json", "tp2_zero2_sequence_parallel.json"]
QUICK += ["zero3_cpu_offload.json"]


def check(world, name: str, folder: Path, **overrides: str) -> None:
    places = {
        "model.path": make_checkpoint(folder / "checkpoint", num_hidden_layers=4),  # As many as stages, at most.
        "data.train": write_jsonl(folder / "train.jsonl", chats()),
        "data.cache_dir": folder / "cache",
        "run.output_dir": folder / "out",
    }
    config, ranks = load_config(SMOKE / name)[0], RANKS.get(name, 2)
    kind = "ddp of stages" if backend(config) == "ddp" and config.parallel.pp > 1 else backend(config)
    arguments = [f"{key}={value}" for key, value in (places | overrides).items()]
    assert world(train, ranks, name, arguments) == [(2, CLASSES[kind])] * ranks
    _, info = AutoModelForCausalLM.from_pretrained(folder / "out" / "model", output_loading_info=True)
    assert not any(info.values()), info


@pytest.mark.parametrize(
    "name",
    tiers(sorted(path.name for path in SMOKE.glob("*.json") if "nvme" not in path.name), quick=QUICK),
)
def test_a_smoke_config_trains(world, tmp_path, name):
    check(world, name, tmp_path)


@pytest.mark.slow
@pytest.mark.nvme
@pytest.mark.parametrize("part", ["optimizer", "param"])
def test_a_smoke_config_with_nvme_trains(world, tmp_path, nvme, part):
    check(world, f"zero3_nvme_{part}.json", tmp_path, **{f"zero.offload_{part}.nvme_path": str(nvme)})
