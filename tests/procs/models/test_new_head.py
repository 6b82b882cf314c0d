"""A task head on a language model's checkpoint begins with the same values on every rank and in every layout."""

import pytest
import torch

from ds_trainer.trainer.trainer import Trainer
from tests.helpers.runs import D8, collate, largest_difference, run_config, weights
from tests.helpers.tiny import tiny_llama

LAYOUTS = {
    "ddp": ("ddp", {}),
    "zero3": ("zero3", {}),
    "fsdp2": ("fsdp2", {}),
    "tp": ("ddp", {"parallel": {"engine": "ddp", "tp": 2}}),
}


@pytest.mark.case("N3")
def test_a_new_head_is_the_same_on_every_rank_and_in_every_layout(world, tmp_path):
    tiny_llama(tied=False).save_pretrained(tmp_path / "source")
    ranks = world(classify, 2, tmp_path)
    (loss, head, trained), *others = [cell for cells in ranks for cell in cells]
    assert head.std() > 0
    for other_loss, other_head, other_trained in others:
        assert torch.equal(other_head, head)
        assert other_loss == pytest.approx(loss, rel=1e-6)
        assert largest_difference(other_trained, trained) <= 2e-6


def classify(out):
    cells = []
    for name, (engine, sections) in LAYOUTS.items():
        source = {"path": str(out / "source"), "auto_class": "AutoModelForSequenceClassification"}
        config = run_config(engine, out / name, model=source, optimizer={"lr": 0.01}, **sections)
        trainer = Trainer(config=config, train_dataset=D8, data_collator=classes)
        head = weights(trainer)["score.weight"]
        state = trainer.train()
        cells.append((state.loss, head, weights(trainer)))
        trainer.close()
    return cells


def classes(features):
    batch = collate(features)
    batch["labels"] = torch.tensor([sum(each["input_ids"]) % 2 for each in features])
    return batch
