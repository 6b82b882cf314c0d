"""What fails after the last step does not take the trained model with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from ds_trainer.callbacks.base import Callback
from ds_trainer.errors import ConfigError, MachineError, ModelError
from tests.helpers.runs import D8, largest_difference, make_trainer, weights
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


def train_where_no_model_can_be_written(engine, out, every_steps):
    checkpoint = {"export": True, "every_steps": every_steps}
    trainer = make_trainer(engine, out, given={"callbacks": [BlocksTheExport()]}, checkpoint=checkpoint)
    with pytest.raises(MachineError) as caught:
        trainer.train()
    trained = weights(trainer)
    trainer.close()
    return trained, [str(caught.value), *caught.value.__notes__]


class BlocksTheExport(Callback):
    """A file of the export's temporary name."""

    def on_step_end(self, trainer):
        path = Path(trainer.config.run.output_dir, ".model.partial")
        if trainer.is_world_process_zero:
            path.write_text("in the way")


def resume_and_export(engine, out):
    (out / ".model.partial").unlink(missing_ok=True)
    checkpoint = {"export": True, "resume": str(out / "checkpoint-1")}
    trainer = make_trainer(engine, out, checkpoint=checkpoint)
    trainer.train()
    trainer.close()


@pytest.mark.case("L3")
@pytest.mark.parametrize(("engine", "every_steps"), [("zero2", 500), ("ddp", 0), ("ddp", 1)])
def test_a_failing_export_leaves_a_checkpoint_and_says_how_to_export_it(world, tmp_path, engine, every_steps):
    results = world(train_where_no_model_can_be_written, 2, engine, tmp_path, every_steps)
    for _, texts in results:
        assert "cannot be written" in texts[0]
        assert f"checkpoint.resume = {tmp_path / 'checkpoint-1'} exports it again" in texts[1]
    world(resume_and_export, 2, engine, tmp_path)
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    assert largest_difference(exported, results[0][0]) == 0


def train_adapted(out):
    model = tiny_llama()
    model.model.layers[0].self_attn.q_proj = torch.nn.Sequential(model.model.layers[0].self_attn.q_proj)
    with pytest.raises(ModelError, match="has 1 parameters that its class lacks") as caught:
        make_trainer("ddp", out, model=model, checkpoint={"export": True})
    return caught.value.on_all_ranks


@pytest.mark.case("L3")
def test_a_model_that_cannot_be_exported_is_refused_before_the_first_step(world, tmp_path):
    assert world(train_adapted, 2, tmp_path) == [True, True]


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
