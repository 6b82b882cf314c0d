"""What fails after the last step does not take the trained model with it."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, TrainerCallback

from ds_trainer.errors import ConfigError
from tests.helpers.runs import D8, make_trainer
from tests.helpers.tiny import tiny_llama
from tests.helpers.tokenizers import make_tokenizer

EXPORTING = {"checkpoint": {"export": True}, "logging": {"plots": True, "progress_bar": False}}


def train_with_a_metric_that_fails(out):
    given = {"eval_dataset": D8, "compute_metrics": lambda prediction: {"x": prediction.no_such_thing}}
    trainer = make_trainer("zero2", out, given=given, **EXPORTING)
    with pytest.raises(AttributeError):
        trainer.train()
    trainer.close()


def test_a_failing_last_evaluation_leaves_the_exported_model(world, tmp_path):
    world(train_with_a_metric_that_fails, 2, tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def train_where_no_picture_can_be_drawn(out):
    (out / "loss.png").mkdir()
    trainer = make_trainer("ddp", out, **EXPORTING)
    trainer.train()
    trainer.close()


def test_a_picture_that_cannot_be_drawn_is_a_warning(world, tmp_path):
    world(train_where_no_picture_can_be_drawn, 1, tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert (tmp_path / "metrics.jsonl").exists()


class WaitsForMicrobatches(TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        pass


def refuse(callback, out, expected):
    with pytest.raises(ConfigError, match=expected):
        make_trainer("ddp", out, given={"callbacks": [callback]})


@pytest.mark.parametrize(
    ("callback", "expected"),
    [
        (print, "callbacks holds builtin_function_or_method"),
        (WaitsForMicrobatches(), "callbacks holds WaitsForMicrobatches, which overrides on_substep_end"),
    ],
)
def test_a_callback_that_could_not_be_called_is_refused_before_anything_is_loaded(world, tmp_path, callback, expected):
    world(refuse, 1, callback, tmp_path, expected)


def predict_records(out):
    records = [{"prompt": "a b", "completion": " c d e"}, {"prompt": "b", "completion": " a"}]
    given = {"train_dataset": records, "data_collator": None, "processing_class": make_tokenizer(vocab_size=300)}
    trainer = make_trainer("ddp", out, model=tiny_llama(vocab=300), given=given)
    output = trainer.predict(records[::-1])
    trainer.close()
    return output.predictions.shape, (output.label_ids != -100).sum(1).tolist()


def test_predict_takes_the_same_records_as_training(world, tmp_path):
    for (samples, _, vocab), labels in world(predict_records, 2, tmp_path):
        assert (samples, vocab) == (2, 300)
        assert labels[0] < labels[1]
