"""What every engine does with every key, as text: for `config show --backend` and the docs. Pure."""

from __future__ import annotations

import re
from functools import cache

from ds_trainer.config.deepspeed.native_keys import unified_keys
from ds_trainer.config.key_support import KeySupport, key_support
from ds_trainer.config.keys import leaf_fields

BACKENDS = ("deepspeed", "fsdp2", "ddp")
ENGINES = (*BACKENDS, "accelerate")

AS_BACKEND = "as what it runs on"


def cell(key: str, engine: str) -> str:
    """What an engine does with a key, and the note; for an implied key the word alone."""
    if engine == "deepspeed" and key in (natives := _native_names()):
        return f"mapped: {natives[key]}"
    if engine != "accelerate":
        return _text(key_support(key, engine))
    own = {name: key_support(key, f"accelerate+{name}") for name in BACKENDS}
    if len(set(own.values())) == 1:
        return _text(own["deepspeed"])
    departures = [f"on {name} {_text(support)}" for name, support in own.items() if support != key_support(key, name)]
    return "; ".join([AS_BACKEND, *departures])


def section_row(section: str) -> list[str]:
    """What each engine does with the keys of a section, in the order of the keys."""
    keys = [key for key in leaf_fields() if key.split(".")[0] == section]
    row = []
    for engine in BACKENDS:
        words = dict.fromkeys(_word(key_support(key, engine)) for key in keys)
        row.append(", ".join(words))
    cells = dict.fromkeys(re.split("[:;]", cell(key, "accelerate"))[0] for key in keys)
    return [*row, ", ".join(cells)]


@cache
def _native_names() -> dict[str, str]:
    """Our key -> the longest of DeepSpeed's names for it, which is the one of today."""
    names: dict[str, str] = {}
    for native, ours in unified_keys().items():
        if key_support(ours, "deepspeed").status == "mapped" and len(native) > len(names.get(ours, "")):
            names[ours] = native
    return names


def _word(support: KeySupport) -> str:
    return support.status.replace("_", " ")


def _text(support: KeySupport) -> str:
    return "implied" if support.status == "implied" else f"{_word(support)}: {support.note}"
