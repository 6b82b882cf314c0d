"""What scripts for transformers' Trainer do with a trainer and with what `train()` returns, on real ranks."""

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ds_trainer.errors import ConfigError
from tests.helpers.runs import D8, make_trainer
from tests.helpers.tiny import tiny_llama

ODD = D8[3:6]
RATE = 0.01


def plateau(parameters):
    """Halves the rate at each evaluation but the first."""
    optimizer = torch.optim.SGD(parameters, lr=RATE)
    return optimizer, ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0, threshold_mode="abs")


@pytest.mark.case("N10")
@pytest.mark.case("L5")
def test_a_trainer_is_used_as_transformers_one(world, tmp_path):
    for rank, (told, rates, losses, history) in enumerate(world(use, 2, tmp_path)):
        assert rates == [RATE, RATE, RATE / 2, RATE / 4]
        assert told["first"] == (rank == 0)
        assert told["training_loss"] == pytest.approx(sum(line["loss"] for line in history) / len(history))
        assert [line["learning_rate"] for line in history] == rates
        assert told["metrics"]["train_loss"] == told["training_loss"] and told["metrics"]["train_steps_per_second"] > 0
        assert losses["test_loss"] == losses["predicted"] == losses["named"]["val_a_loss"]
        assert list(losses["named"]) == ["val_a_loss", "val_b_loss"] and list(losses["own"]) == ["mine_loss"]
        assert told["history_grew"] == 1


def use(out):
    for given, sections, text in (
        ({"eval_dataset": {"a": ODD}}, {}, "holds 1 data sets by name"),
        ({"optimizers": plateau(tiny_llama().parameters())}, {}, "nothing is evaluated between steps"),
    ):
        with pytest.raises(ConfigError, match=text):
            make_trainer("ddp", out, given=given, **sections)
    model = tiny_llama()
    trainer = make_trainer(
        "ddp",
        out,
        model=model,
        given={"eval_dataset": ODD, "optimizers": plateau(model.parameters())},
        evaluation={"every_steps": 1},
        optimizer={"name": "sgd"},
        run={"max_steps": 4},
        logging={"every_steps": 1},
    )
    with pytest.raises(ConfigError, match="set up without a checkpoint"):
        trainer.train(resume_from_checkpoint=True)
    result = trainer.train(resume_from_checkpoint=None)
    with pytest.raises(ConfigError, match="called again"):
        trainer.train()
    history = [line for line in result.log_history if "loss" in line]
    before = len(result.log_history)
    losses = {
        **trainer.evaluate(eval_dataset=ODD, metric_key_prefix="test"),
        "predicted": trainer.predict(ODD).metrics["test_loss"],
        "named": trainer.evaluate(eval_dataset={"a": ODD, "b": D8[:2]}, metric_key_prefix="val"),
        "own": trainer.evaluate(metric_key_prefix="mine"),
    }
    assert trainer.model is trainer.run.model and trainer.eval_dataset is ODD and trainer.processing_class is None
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(RATE / 16)
    told = {
        "first": trainer.is_world_process_zero(),
        "training_loss": result.training_loss,
        "metrics": result.metrics,
        "history_grew": len(result.log_history) - before,
    }
    return told, [line.lr for line in history], losses, [dict(line) for line in history]
