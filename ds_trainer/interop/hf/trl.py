"""Fields that TRL's `SFTConfig` adds to `TrainingArguments`. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_trainer.interop.hf.arguments import HFImport

_PACKING = "samples are not packed: each is a row of its own, and a step has batch.global_size of them"
_IS_SO = "so it is here"


@dataclass(frozen=True)
class _TrlField:
    """A field of TRL's.

    Args:
        key: Our key that means the same.
        here: The value that describes what happens here in any case.
        why: What happens here where the field has another value.
    """

    key: str = ""
    here: Any = None
    why: str = ""


TRL_FIELDS = {
    "max_length": _TrlField("data.max_length"),
    "max_seq_length": _TrlField("data.max_length"),
    "chat_template_path": _TrlField("data.chat_template"),
    "packing": _TrlField(here=False, why=_PACKING),
    "eval_packing": _TrlField(here=False, why=_PACKING),
    "packing_strategy": _TrlField(why=_PACKING),
    "padding_free": _TrlField(here=False, why="micro-batches are padded to their longest sample"),
    "dataset_text_field": _TrlField(here="text", why="records have their text under text: rename the column"),
    "assistant_only_loss": _TrlField(here=True, why="of messages the assistant's turns are learned, and nothing else"),
    "completion_only_loss": _TrlField(here=True, why="of prompt and completion the completion is learned"),
    "loss_type": _TrlField(here="nll", why="the loss is cross entropy: pass Trainer(compute_loss_func=...)"),
    "dataset_num_proc": _TrlField(why="data is tokenised once and kept in data.cache_dir: nothing is lost"),
}
"""Field -> what it means here. Source: trl/trainer/sft_config.py of TRL 0.9 to 0.24."""


def carry_trl_field(given: HFImport, name: str) -> None:
    """Reports one of TRL's fields that is set."""
    field, item = TRL_FIELDS[name], given.set_fields[name]
    if field.key:
        given.carry(name, {field.key: item}, "a field of TRL's SFTConfig")
    elif item == field.here:
        given.carry(name, {}, _IS_SO)
    else:
        given.drop(name, field.why)
