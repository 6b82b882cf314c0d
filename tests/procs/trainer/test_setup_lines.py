"""The lines at the start of a run say what is there: parameter groups, masters and moments."""

import logging
import re

import pytest

from ds_trainer.log import get_logger
from tests.helpers.runs import make_trainer
from tests.helpers.tiny import tiny_llama

ENGINES = ("ddp", "zero2", "zero3", "fsdp2")


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


def start_lines(out):
    """Of each engine: its lines, and the bytes of its masters and moments after a step."""
    found = {}
    for engine in ENGINES:
        lines = Lines()
        get_logger().addHandler(lines)
        optimizer = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1.0}
        trainer = make_trainer(engine, out / engine, model=tiny_llama(hidden=256), optimizer=optimizer)
        trainer.train()
        get_logger().removeHandler(lines)
        found[engine] = "\n".join(lines.said), trainer.engine.facts().optimizer_bytes
    return found


@pytest.mark.case("N6")
@pytest.mark.case("N11")
def test_what_is_said_at_the_start_is_what_is_held_after_a_step(world, tmp_path):
    shapes = [tuple(parameter.shape) for parameter in tiny_llama(hidden=256).parameters()]
    matrices = [shape for shape in shapes if len(shape) > 1]
    elements = sum(rows * columns for rows, columns in matrices)
    norms = [shape for shape in shapes if len(shape) == 1]
    groups = (
        f"groups: {len(matrices)} tensors of {elements:,} elements, lr 0.001, weight decay 0.1; "
        f"{len(norms)} tensors of {sum(size for (size,) in norms):,} elements, lr 0.001, weight decay 0"
    )
    found = world(start_lines, 2, tmp_path)[0]
    for engine, (text, held) in found.items():
        assert groups in text, engine
        said = re.search(r"optimizer: \w+, ([\d,.]+) MB per rank", text)
        assert said, (engine, text)
        assert float(said[1].replace(",", "")) == pytest.approx(held / 1e6, abs=0.06), engine
        assert held > 1e6, "a tenth of a megabyte is less than a moment"
