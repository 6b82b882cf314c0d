"""What the installed DeepSpeed reads of its config, and whether it accepts one."""

from __future__ import annotations

from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, DeepSpeedConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

from ds_trainer.config.deepspeed.native_keys import ReadRecorder

MODELS = {
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
}
BY_HAND = ("aio", "data_types", "torch_autocast")


def recorded_keys() -> dict[str, list[str]]:
    """Section ("" for the top level) -> keys that the installed DeepSpeed reads in it."""
    sections = {name: ReadRecorder({"dtype": "bfloat16"} if name == "torch_autocast" else {}) for name in BY_HAND}
    sections["torch_autocast"]["lower_precision_safe_modules"] = []
    top = ReadRecorder({"train_batch_size": 1, **sections})
    DeepSpeedConfig(top)
    names = {
        name: {n for f, i in model.model_fields.items() for n in (f, i.alias or f)} for name, model in MODELS.items()
    }
    reads = {"": top.reads - set(_REMOVED_TOP_LEVEL_CONFIG_KEYS)} | names | {n: s.reads for n, s in sections.items()}
    return {section: sorted(keys) for section, keys in reads.items()}


def accept(native: dict, world: int) -> DeepSpeedConfig:
    """DeepSpeed's own reading of a native config for a number of ranks; raises where it refuses."""
    return type("ForRanks", (DeepSpeedConfig,), {"world_size": property(lambda self: world, lambda self, value: None)})(
        native
    )
