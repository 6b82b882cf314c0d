"""Every shipped config loads, resolves and translates to a JSON that the installed DeepSpeed accepts."""

import json

import pytest

from ds_trainer.cli.config import json_schema
from ds_trainer.config.backend import backend
from ds_trainer.config.deepspeed.arguments import to_deepspeed
from tests.helpers.deepspeed_reads import accept
from tests.helpers.shipped_configs import FOLDER, SHIPPED, TABLE, resolved
from tests.helpers.table import table


def test_the_readme_lists_every_config_and_no_other():
    assert sorted(row[0].partition("]")[0].removeprefix("[") for row in TABLE) == SHIPPED


def test_the_shipped_schema_is_the_one_of_the_code():
    assert json.loads((FOLDER / "schema.json").read_text()) == json_schema()


@table("name", SHIPPED)
def test_a_shipped_config_names_the_schema_in_its_folder(name):
    raw = json.loads((FOLDER / name).read_text())
    assert (FOLDER / name).parent.joinpath(raw["$schema"]).resolve() == (FOLDER / "schema.json").resolve()


@table("name", SHIPPED)
def test_a_shipped_config_runs_on_the_ranks_that_the_readme_states(name):
    run = resolved(name)
    batch = run.config.batch
    assert batch.global_size == batch.micro_size * batch.accumulation * run.dp_size
    if backend(run.config) == "deepspeed":
        accepted = accept(to_deepspeed(run), run.dp_size)
        assert accepted.zero_optimization_stage == run.config.zero.stage
        assert accepted.train_batch_size == batch.global_size


@table("name", [name for name in SHIPPED if "ddp" not in name and "fsdp2" not in name])
def test_a_shipped_config_is_refused_on_ranks_that_do_not_divide_its_batch(name):
    with pytest.raises(AssertionError, match="train_batch_size"):
        accept(to_deepspeed(resolved(name)), 7)
