"""Builds a Hugging Face checkpoint's model as a skeleton and sets a model up for training."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from ds_trainer.config.input_sections import ModelConfig
from ds_trainer.errors import ConfigError, ModelError
from ds_trainer.models.activation_checkpointing import enable_activation_checkpointing
from ds_trainer.models.meta_model import skeleton
from ds_trainer.models.rope_lengths import use_own_lengths
from ds_trainer.models.text_files import without_byte_order_marks
from ds_trainer.planning.checkpoint_spec import quantized_error


def build_skeleton(folder: str, model_config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The checkpoint's model without its values, in training mode.

    Parameters are on meta. Buffers, such as rotary frequencies that no checkpoint holds, are computed on the host.

    Args:
        folder: The checkpoint.
        model_config: The config's model section.
        dtype: Dtype of the parameters.

    Raises:
        ConfigError: `model.auto_class` is not an auto class of transformers.
        ModelError: Transformers cannot build the model, or it has a setting that training here does not support.
    """
    auto_class = _auto_class(model_config.auto_class)
    options: dict[str, Any] = {"trust_remote_code": model_config.trust_remote_code}
    if model_config.attn_implementation is not None:
        options["attn_implementation"] = model_config.attn_implementation
    try:
        config, generation_config = _read_configs(folder, model_config)
        if getattr(config, "quantization_config", None) is not None:
            raise quantized_error(folder)
        model = skeleton(lambda: auto_class.from_config(config, dtype=dtype, **options), dtype)
    except (ValueError, ImportError, OSError) as error:
        raise ModelError(
            f"transformers {transformers.__version__} cannot build the model of {folder}: {error}",
            "the checkpoint's class must be known, its code trusted, and the attention implementation installed",
            "see model.path, model.auto_class, model.trust_remote_code and model.attn_implementation",
        ) from error
    if model.can_generate() and generation_config is not None:
        model.generation_config = generation_config
    prepare_for_training(model, model_config)
    return model


def _read_configs(folder: str, model_config: ModelConfig) -> tuple[PreTrainedConfig, GenerationConfig | None]:
    """The checkpoint's config and, where it has one, its generation config."""
    with without_byte_order_marks(folder) as readable:
        config = AutoConfig.from_pretrained(readable, trust_remote_code=model_config.trust_remote_code)
        config.name_or_path = folder
        has_generation = Path(folder, "generation_config.json").is_file()
        return config, GenerationConfig.from_pretrained(readable) if has_generation else None


def prepare_for_training(model: PreTrainedModel, model_config: ModelConfig) -> None:
    """Puts a model, skeleton or not, in training mode: no key-value cache, activation checkpointing as configured.

    Raises:
        ModelError: Its loss is not linear in the batch, or it cannot recompute activations.
    """
    _refuse_router_loss(model)
    if not hasattr(model, "source_use_cache"):  # What an export writes back.
        model.source_use_cache = getattr(model.config.get_text_config(), "use_cache", True)  # type: ignore[assignment]
    set_use_cache(model.config, False)
    use_own_lengths(model)
    if model_config.gradient_checkpointing:
        enable_activation_checkpointing(model, model_config.gradient_checkpointing)
    model.train()


def set_use_cache(config: Any, value: bool) -> None:
    """Sets `use_cache` of a config and of its text part, where they have one."""
    for part in (config, config.get_text_config()):
        if hasattr(part, "use_cache"):
            part.use_cache = value


def _auto_class(name: str) -> Any:
    found = getattr(transformers, name, None)
    if isinstance(found, type) and issubclass(found, _BaseAutoModelClass):
        return found
    known = [n for n in dir(transformers) if n.startswith("AutoModel")]
    raise ConfigError(
        f"model.auto_class is {name!r}",
        f"it must be an auto class of transformers {transformers.__version__}",
        f"set model.auto_class to one such as {', '.join(get_close_matches(name, known) or ['AutoModelForCausalLM'])}",
    )


def _refuse_router_loss(model: PreTrainedModel) -> None:
    text = model.config.get_text_config()
    coefficients = {k: v for k, v in text.to_dict().items() if k.endswith("aux_loss_coef") and v}
    if getattr(text, "output_router_logits", False) and coefficients:
        raise ModelError(
            f"config.json has output_router_logits with {coefficients}",
            "the load-balancing loss is not a sum over tokens, so it would change with the number of ranks",
            "set output_router_logits to false in the checkpoint's config.json",
        )
