"""The sections of a run's JSON that say what goes into it: the checkpoint and the samples. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ds_trainer.config.field_types import Fraction, Name, Paths, PositiveInt, Section


class ModelConfig(Section):
    """Which checkpoint is trained, and how its modules run."""

    path: Name | None = None
    """Folder of a Hugging Face checkpoint, or a hub id; may be left out only when `Trainer(model=instance)` is used."""
    revision: Name | None = None
    """Branch, tag or commit of a hub id."""
    tokenizer: Name | None = None
    """Folder or hub id of the tokenizer; None: the checkpoint's own."""
    auto_class: Name = "AutoModelForCausalLM"
    """Transformers auto class that builds the model."""
    initialize_missing: tuple[Name, ...] | None = None
    """Patterns of parameters to initialise from `run.seed` where the checkpoint lacks them; None: of a task head."""
    attn_implementation: Name | None = None
    """Attention kernel by its transformers name (`eager`, `sdpa`, `flash_attention_2`); None: transformers' choice."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Recompute activations in the backward pass; `selective` keeps the results of matrix products and attention."""
    compile: bool = False
    """Compile each block of the model with `torch.compile`."""
    resize_embeddings: bool = False
    """Grow the embeddings to the tokenizer's length when the tokenizer has more tokens."""
    pad_embeddings_to_multiple_of: PositiveInt | None = None
    """With `resize_embeddings`: round the number of rows up to a multiple of this."""
    allow_pickle: bool = False
    """Read `pytorch_model.bin` (pickled) weights when a checkpoint has no safetensors."""
    trust_remote_code: bool = False
    """Run the Python code that a checkpoint ships."""


class DataConfig(Section):
    """Where samples come from and how they become tokens."""

    train: Paths | None = None
    """Training files (json, jsonl, parquet); may be left out only when `Trainer(train_dataset=...)` is used."""
    eval: Paths | None = None
    """Evaluation files."""
    max_length: Annotated[int, Field(ge=2, le=10**9)] | None = None
    """Longest sample in tokens; None: what the model's positions and the tokenizer allow."""
    on_too_long: Literal["truncate", "drop", "error"] = "truncate"
    """What happens to a sample longer than `max_length`."""
    max_affected_fraction: Fraction = 0.5
    """Largest fraction of samples that may be truncated, dropped or left without a supervised token."""
    chat_template: Name | None = None
    """File with a Jinja chat template, used instead of the tokenizer's."""
    cache_dir: Name | None = None
    """Folder of the tokenised data; None: `ds_trainer/` below the Hugging Face cache."""
    shuffle: bool = True
    """Draw a new permutation of the samples each epoch, from `run.seed`."""
    preview_samples: Annotated[int, Field(ge=0, le=1000)] = 2
    """Samples whose supervised text is printed at the start."""
    num_workers: Annotated[int, Field(ge=0, le=1000)] = 0
    """Processes per rank that read and collate samples; 0: the training process does."""
    prefetch_factor: Annotated[int, Field(gt=0, le=10**4)] = 2
    """Micro-batches that each worker prepares ahead."""
    pin_memory: bool | None = None
    """Put batches into page-locked memory; None: with a GPU."""
