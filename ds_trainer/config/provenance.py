"""Which keys the user set, and where; the others have their defaults. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ds_trainer.config.keys import default, value
from ds_trainer.config.schema import RunConfig


class Provenance:
    """Where the values of a config come from: a file, the command line, or the defaults.

    Args:
        config: The config.
        origins: Dotted key -> the place that set it, or `default`.
    """

    def __init__(self, config: RunConfig, origins: Mapping[str, str]) -> None:
        self._config, self._origins = config, origins
        self._of_inner_key: dict[str, str] = {}
        for name, place in origins.items():
            while "." in name:
                name = name.rpartition(".")[0]
                self._of_inner_key.setdefault(name, place)

    def is_set(self, key: str) -> bool:
        """Whether the user set `key` to a value that has an effect: neither null nor a default of false or "none"."""
        if self.origin(key) == "default":
            return False
        item = value(self._config, key)
        return item is not None and not (item == default(key) and item in (False, "none"))

    def origin(self, key: str) -> str:
        """The place that set `key`, or a key inside it."""
        own = self._origins.get(key, "default")
        return own if own != "default" else self._of_inner_key.get(key, "default")

    def describe(self, key: str) -> str:
        """`key is value (place)`, as error texts begin."""
        return f"{key} is {json.dumps(value(self._config, key))} ({self.origin(key)})"
