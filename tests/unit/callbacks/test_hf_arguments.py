"""What callbacks of transformers read of a config under the names of `TrainingArguments`."""

import dataclasses
import json

import pytest
from transformers import TrainingArguments

from ds_trainer.callbacks.hf_arguments import Arguments
from ds_trainer.config.keys import FOREIGN_SPELLINGS, leaf_fields
from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import ConfigError
from ds_trainer.interop.hf.fields import KEY_OF_FIELD
from ds_trainer.launch.rank_grid import Grid

PROPERTIES = {"process_index", "local_process_index", "world_size"}


def arguments(**sections) -> Arguments:
    grid = Grid(world=4, rank=3, local_rank=1, local_world=2)
    return Arguments(RunConfig.model_validate(sections), grid, max_steps=30, num_epochs=2)


def test_every_name_is_one_of_training_arguments_and_stands_for_the_key_that_errors_suggest():
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert vars(arguments()).keys() - PROPERTIES <= fields
    assert all(hasattr(TrainingArguments, name) for name in PROPERTIES)
    assert set(KEY_OF_FIELD.values()) <= leaf_fields().keys()
    assert {name: key for name, key in KEY_OF_FIELD.items() if FOREIGN_SPELLINGS.get(name, key) != key} == {}


def test_values_come_from_the_config_the_grid_and_the_length_of_the_run():
    args = arguments(
        precision={"dtype": "bf16"},
        optimizer={"lr": 0.5, "betas": (0.8, 0.9)},
        logging={"report_to": ("wandb",), "progress_bar": False},
        checkpoint={"every_steps": 0},
        evaluation={"every_steps": 7},
    )
    assert (args.bf16, args.fp16, args.learning_rate, args.adam_beta1, args.adam_beta2) == (True, False, 0.5, 0.8, 0.9)
    assert (args.report_to, args.disable_tqdm) == (["wandb"], True)
    assert (args.save_strategy, args.save_steps, args.eval_strategy, args.eval_steps) == ("no", 0, "steps", 7)
    assert (args.process_index, args.local_process_index, args.world_size) == (3, 1, 4)
    assert (args.max_steps, args.num_train_epochs) == (30, 2)
    assert json.loads(args.to_json_string())["eval_strategy"] == "steps"
    assert args.to_sanitized_dict()["report_to"] == "['wandb']"


def test_another_attribute_is_an_attribute_error_that_names_it():
    args = arguments()
    assert not hasattr(args, "torch_compile")
    assert getattr(args, "torch_compile", "none") == "none"
    with pytest.raises(AttributeError, match="a callback reads args.torch_compile") as caught:
        _ = args.torch_compile
    assert isinstance(caught.value, ConfigError)
