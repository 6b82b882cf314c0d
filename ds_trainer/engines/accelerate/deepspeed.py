"""accelerate over DeepSpeed."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from accelerate.utils import DeepSpeedPlugin
from transformers.integrations import unset_hf_deepspeed_config

from ds_trainer.config.accelerate.arguments import accelerate_arguments
from ds_trainer.config.deepspeed.native_keys import ReadRecorder
from ds_trainer.config.keys import flatten
from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.engines.accelerate.accelerator import check_prepared, configured_by_json, make_accelerator
from ds_trainer.engines.deepspeed.engine import DeepSpeedEngine
from ds_trainer.errors import EngineError


class AccelerateDeepSpeedEngine(DeepSpeedEngine):
    """`DeepSpeedEngine` set up by accelerate from a `DeepSpeedPlugin`.

    Args:
        resolved: The run's config.
        mesh: Process groups and device.
    """

    def __init__(self, resolved: ResolvedConfig, mesh: Mesh) -> None:
        super().__init__(resolved, mesh)
        if "zero_force_ds_cpu_optimizer" in self.native:
            # DeepSpeed's CPU optimizer is here already. Where it is forced, accelerate 1.15 replaces whatever it is
            # given: DeepSpeed's own AdamW, and Lion, by an Adam without decoupled decay.
            self.native["zero_force_ds_cpu_optimizer"] = False

    def _initialize(self, optimizer: torch.optim.Optimizer, config: ReadRecorder) -> deepspeed.DeepSpeedEngine:
        deepspeed.DeepSpeedConfig(config)  # accelerate passes on a copy, in which it looks up every key.
        arguments = accelerate_arguments(self._resolved)
        with configured_by_json(self.mesh):
            # The model is loaded already: transformers has nothing to partition.
            plugin = DeepSpeedPlugin(hf_ds_config=dict(self.native), zero3_init_flag=False)
            self.accelerator = make_accelerator(self.mesh, **arguments.accelerator, deepspeed_plugin=plugin)
            engine, _ = self.accelerator.prepare(self._model, optimizer)
        # The plugin has set it for transformers, which would partition the next model that is built in this process.
        unset_hf_deepspeed_config()
        check_prepared(engine, deepspeed.DeepSpeedEngine, self.accelerator, self._resolved)
        _check_passed_on(self.native, plugin.deepspeed_config)
        return engine


def _check_passed_on(given: dict[str, Any], got: dict[str, Any]) -> None:
    found, wanted = flatten(got), {key: item for key, item in flatten(given).items() if item is not None}
    changed = [key for key, item in wanted.items() if found.get(key) != item]
    if changed:
        changes = ", ".join(f"{key} from {wanted[key]!r} to {found.get(key)!r}" for key in changed)
        raise EngineError(
            f"accelerate changed {changes}",
            "what was asked for must be what runs",
            "set parallel.engine to deepspeed, or remove the key from native.deepspeed",
        )
