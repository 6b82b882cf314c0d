"""`ds-trainer export` makes a Hugging Face folder of a checkpoint, in one process, whatever layout saved it."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ds_trainer.callbacks.base import Callback
from ds_trainer.cli import main
from ds_trainer.trainer.trainer import Trainer
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.launch import run_folder
from tests.helpers.runs import largest_difference, weights
from tests.helpers.tiers import tiers


class Watch(Callback):
    """The weights at the moment of the save."""

    def on_save(self, trainer, folder):
        self.weights = weights(trainer)


def train(config):
    watch = Watch()
    trainer = Trainer(config=config, callbacks=[watch])
    trainer.train()
    trainer.close()
    return watch.weights


@pytest.mark.parametrize(
    ("kind", "stage"), tiers(product(["llama_tied", "mixtral"], [1, 3]), quick=[("llama_tied", 1), ("mixtral", 3)])
)
def test_the_weights_of_a_sharded_checkpoint_are_exported(world, tmp_path, kind, stage):
    config = run_folder(tmp_path)
    config["model"]["path"] = make_checkpoint(tmp_path / kind, kind)
    config["zero"] = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
    config["checkpoint"] = {"every_steps": 2, "export": False}
    saved = world(train, 2, config)[0]
    assert (
        main(["export", str(tmp_path / "out" / "checkpoint-3"), "--out", str(tmp_path / "hf"), "--dtype", "fp32"]) == 0
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert largest_difference(dict(model.named_parameters()), saved) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("Paris").input_ids


def test_what_is_no_checkpoint_is_said_in_a_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["export", str(tmp_path / "nothing"), "--out", str(tmp_path / "hf")])
    assert stop.value.code == 2
    assert "nothing does not exist" in capsys.readouterr().err
