"""Methods that scripts for transformers' Trainer call at the end, without a run."""

import json
from types import SimpleNamespace

import pytest
from transformers import TrainerCallback

from ds_trainer.callbacks.base import Callback
from ds_trainer.callbacks.hf import HFCallbacks
from ds_trainer.callbacks.trainer_state import TrainerState
from ds_trainer.trainer import hf_methods
from ds_trainer.trainer.hf_methods import RankFlag

pytestmark = pytest.mark.case("N10")


@pytest.mark.parametrize("is_it", [True, False])
def test_a_rank_flag_is_true_as_it_stands_and_when_called(is_it):
    flag = RankFlag(is_it)
    assert bool(flag) is is_it and flag() is is_it


def trainer_of(folder, rank=0):
    config = SimpleNamespace(run=SimpleNamespace(output_dir=str(folder)))
    return SimpleNamespace(
        config=config, is_world_process_zero=RankFlag(rank == 0), state=TrainerState(3), callbacks=[]
    )


def test_metrics_and_state_are_written_under_transformers_file_names_by_rank_0_only(tmp_path):
    for rank in (0, 1):
        trainer = trainer_of(tmp_path / str(rank), rank)
        hf_methods.save_metrics(trainer, "train", {"train_loss": 1.5})
        hf_methods.save_metrics(trainer, "eval", {"eval_loss": 2.5})
        hf_methods.save_state(trainer)
    names = ["all_results.json", "eval_results.json", "train_results.json", "trainer_state.json"]
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == names and not (tmp_path / "1").exists()
    assert json.loads((tmp_path / "0/all_results.json").read_text()) == {"train_loss": 1.5, "eval_loss": 2.5}
    assert json.loads((tmp_path / "0/trainer_state.json").read_text())["max_steps"] == 3


def test_callbacks_of_both_kinds_are_added_told_of_the_trainer_and_taken_out_by_class_or_object(tmp_path):
    class Ours(Callback):
        seen = None

        def on_init_end(self, trainer):
            self.seen = trainer

    class Theirs(TrainerCallback):
        pass

    trainer, ours, theirs = trainer_of(tmp_path), Ours(), Theirs()
    hf_methods.add_callback(trainer, ours)
    trainer.callbacks.append(HFCallbacks([theirs]))
    assert ours.seen is trainer
    assert hf_methods.pop_callback(trainer, Theirs) is theirs and hf_methods.pop_callback(trainer, Theirs) is None
    hf_methods.remove_callback(trainer, ours)
    assert [type(one) for one in trainer.callbacks] == [HFCallbacks]
