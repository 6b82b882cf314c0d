"""`ds-trainer export checkpoint-500 --out model`: the weights of any checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm import tqdm

from ds_trainer.checkpoint.export import export_model
from ds_trainer.checkpoint.folder import RUN
from ds_trainer.checkpoint.shard_reader import MasterWeights
from ds_trainer.checkpoint.verified import open_checkpoint
from ds_trainer.config.schema import RunConfig
from ds_trainer.engines.introspect import TORCH_DTYPES
from ds_trainer.errors import CheckpointError, MachineError
from ds_trainer.log import get_logger
from ds_trainer.models.build import build_model
from ds_trainer.models.hub import resolve_folder
from ds_trainer.models.load_weights import fill_buffers
from ds_trainer.models.tokenizer import load_tokenizer
from ds_trainer.models.weight_source import WeightSource
from ds_trainer.planning.checkpoint_spec import read_spec


def run(args: argparse.Namespace) -> int:
    """Exports; the handler of `ds-trainer export`. One process, whatever layout the checkpoint was saved in."""
    out = Path(args.out)
    if not args.overwrite:
        _require_free(out)
    checkpoint = open_checkpoint(Path(args.checkpoint), mesh=None)
    config = RunConfig.model_validate_json(json.dumps(checkpoint.json(RUN)))
    if config.model.path is None:
        raise CheckpointError(
            f"{checkpoint.folder} is of a model instance that was passed to Trainer",
            "an export needs the class and the config of the model, which are in a script",
            "set checkpoint.resume to it in that script and call save_model()",
        )
    spec = read_spec(resolve_folder(config.model.path, config.model.revision, config.model.allow_pickle))
    saved = checkpoint.folder / "model"
    has_tokenizer = (saved / "tokenizer_config.json").is_file()
    tokenizer = load_tokenizer(config.model, str(saved)) if has_tokenizer else None
    model, others = build_model(config, None, spec, tokenizer)
    weights = MasterWeights(checkpoint.shards(), others)
    fill_buffers(model, weights, torch.device("cpu"))
    dtype = TORCH_DTYPES[args.dtype] if args.dtype else getattr(torch, checkpoint.json("model/config.json")["dtype"])
    export_model(
        _values(model, weights),
        model,
        tokenizer,
        str(out),
        dtype=dtype,
        max_shard_size=config.checkpoint.max_shard_size,
        is_writer=True,
    )
    get_logger().info("model: %s", out)
    return 0


def _require_free(out: Path) -> None:
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise MachineError(
            f"{out} exists and is not empty",
            "an export goes to a new or an empty folder, unless it is to replace what is there",
            "name another --out, or add --overwrite",
        )


def _values(model: torch.nn.Module, weights: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
    names = [name for name, _ in model.named_parameters()]
    for name in tqdm(names, "exporting", delay=3, leave=False):
        yield name, weights.read(name, torch.float32)
