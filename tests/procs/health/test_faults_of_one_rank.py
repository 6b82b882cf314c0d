"""What goes wrong on one rank ends every rank at once, in that rank's words."""

import dataclasses
import time

import pytest
import torch

from ds_trainer.engines.ddp import DDPEngine
from ds_trainer.engines.deepspeed.engine import DeepSpeedEngine
from ds_trainer.errors import DataError, EngineError
from tests.helpers.runs import D8, make_trainer

BAD_ROWS = [row | {"input_ids": [*row["input_ids"][:-1], 65]} if i == 3 else row for i, row in enumerate(D8)]
"""Sample 3, which rank 1 meets first, has an id beyond the embedding."""


@pytest.mark.parametrize("where", ["train", "evaluate"])
@pytest.mark.parametrize("engine", ["ddp", "zero3"])
def test_a_sample_that_one_rank_cannot_use_ends_all(world, tmp_path, engine, where):
    for text, agreed, seconds in world(meet_bad_sample, 2, engine, tmp_path, where):
        assert text.startswith("on rank 1: samples [2, 3] have token id 65, the model's embedding has 65 rows")
        assert agreed
        assert seconds < 10


def meet_bad_sample(engine, out, where):
    trainer = make_trainer(engine, out, rows=BAD_ROWS, given={"eval_dataset": BAD_ROWS})
    began = time.monotonic()
    with pytest.raises(DataError) as caught:
        getattr(trainer, where)()
    return str(caught.value), caught.value.on_all_ranks, time.monotonic() - began


def other_facts(engine_class, **changes):
    """Makes rank 1 measure something else than what was set up."""
    measure = engine_class.facts

    def facts(self):
        found = measure(self)
        return dataclasses.replace(found, **changes) if self.mesh.grid.rank == 1 else found

    engine_class.facts = facts


WRONG = {
    "data ranks": (DDPEngine, "ddp", {"group_size": 1}, "says data-parallel ranks = 2 and .* set up 1"),
    "precision": (DDPEngine, "ddp", {"compute_dtype": "bf16"}, "says precision.dtype = 'fp32' and .* 'bf16'"),
    "tensor ranks": (DDPEngine, "ddp", {"settings": {"parallel.tp": 2}}, "tp = 1 and .* set up 2"),
    "stage": (DeepSpeedEngine, "zero2", {"stage": 1}, "says zero.stage = 2 and .* set up 1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_rank_that_got_something_else_than_was_asked_for_ends_all(world, tmp_path, what):
    for text in world(get_something_else, 2, tmp_path, what):
        assert "rank 1: " in text


def get_something_else(out, what):
    engine_class, engine, changes, text = WRONG[what]
    other_facts(engine_class, **changes)
    with pytest.raises(EngineError, match=text) as caught:
        make_trainer(engine, out)
    assert caught.value.on_all_ranks
    return str(caught.value)


@pytest.mark.parametrize("engine", ["ddp", "zero1"])
def test_ranks_that_start_from_other_parameters_end_all(world, tmp_path, engine):
    for text in world(start_elsewhere, 2, engine, tmp_path):
        assert "ranks [1] start with other parameters than rank 0" in text


def start_elsewhere(engine, out):
    for engine_class in (DDPEngine, DeepSpeedEngine):
        whole = engine_class.wrap

        def wrap(self, make_optimizer, whole=whole):
            whole(self, make_optimizer)
            if self.mesh.grid.rank == 1:
                with torch.no_grad():
                    next(self.module.parameters())[0, 0] += 1e-3

        engine_class.wrap = wrap
    with pytest.raises(EngineError) as caught:
        make_trainer(engine, out)
    return str(caught.value)
