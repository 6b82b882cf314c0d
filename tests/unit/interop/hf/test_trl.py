"""Fields of TRL's SFTConfig: known to the importer, carried or dropped with the reason."""

import pytest

from ds_trainer.config.keys import flatten
from ds_trainer.interop.hf.importer import from_hf
from ds_trainer.interop.hf.trl import TRL_FIELDS
from tests.helpers.table import table


def imported(**fields):
    found = from_hf({"learning_rate": 1e-4, **fields})
    return flatten(found.tree), {line.key: line for line in found.lines}


@pytest.mark.case("N15")
@table(
    ("fields", "ours", "outcome", "note"),
    {
        "length": ({"max_length": 2048}, {"data.max_length": 2048}, "carried", "SFTConfig"),
        "its old name": ({"max_seq_length": 512}, {"data.max_length": 512}, "carried", "SFTConfig"),
        "a template": ({"chat_template_path": "a.jinja"}, {"data.chat_template": "a.jinja"}, "carried", "SFTConfig"),
        "no packing": ({"packing": False}, {}, "carried", "so it is here"),
        "packing": ({"packing": True}, {}, "dropped", "samples are not packed"),
        "how to pack": ({"packing_strategy": "bfd"}, {}, "dropped", "samples are not packed"),
        "another column": ({"dataset_text_field": "content"}, {}, "dropped", "rename the column"),
        "the whole conversation": ({"assistant_only_loss": False}, {}, "dropped", "assistant's turns are learned"),
    }.values(),
)
def test_each_is_carried_or_dropped_with_the_reason(fields, ours, outcome, note):
    flat, lines = imported(**fields)
    (name,) = fields
    assert ours.items() <= flat.items()
    assert (lines[name].outcome, lines[name].ours) == (outcome, tuple(ours)) and note in lines[name].note


@pytest.mark.case("N15")
def test_none_of_them_is_unknown():
    lines = imported(**dict.fromkeys(TRL_FIELDS, 7))[1]
    assert [name for name in TRL_FIELDS if "unknown" in lines[name].note] == []


def test_a_misspelt_one_is_recognised():
    assert "did you mean max_seq_length?" in imported(max_seq_len=7)[1]["max_seq_len"].note
