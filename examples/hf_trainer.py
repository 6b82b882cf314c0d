"""Train by one JSON with transformers' own Trainer: the samples come in the same order, and the losses are the same.

torchrun --nproc_per_node 2 examples/hf_trainer.py --config run.json
torchrun --nproc_per_node 2 examples/hf_trainer.py --config run.json --set zero.stage=3

Subclasses of it, such as TRL's, work the same way: make_trainer(args, SFTTrainer, SFTConfig, max_length=None).
"""

import argparse
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from ds_trainer import exit_on_user_error
from ds_trainer.cli.train import config_from_arguments, parse_train_arguments
from ds_trainer.config.backend import backend
from ds_trainer.config.resolve import resolve, total_steps
from ds_trainer.config.resolved import Machine, ResolvedConfig
from ds_trainer.config.schema import RunConfig
from ds_trainer.data.collate import pad_collate, padding_id
from ds_trainer.data.prepare import prepare
from ds_trainer.data.sampler import GlobalBatchSampler
from ds_trainer.distributed.device import probe_machine
from ds_trainer.host.deepspeed_ops import disable_shm_comm
from ds_trainer.interop.hf.exporter import to_hf
from ds_trainer.launch.environment import grid_from_environment
from ds_trainer.log import get_logger


def training_arguments(resolved: ResolvedConfig) -> dict[str, Any]:
    """The run as `TrainingArguments` take it, except for the order of samples, which `in_order` fixes."""
    exported = to_hf(resolved)
    arguments = exported.arguments | {"train_sampling_strategy": "sequential", "deepspeed": exported.deepspeed}
    if exported.deepspeed is not None and resolved.machine.device == "cpu":
        # Without a GPU accelerate treats each rank as a world of one rank, unless its state exists already.
        disable_shm_comm()
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        arguments["accelerator_config"] = {"use_configured_state": True}
    return arguments


def machine_of_transformers(config: RunConfig) -> Machine:
    """This machine as transformers' Trainer uses it, from which an unset `precision.dtype` is derived."""
    machine = probe_machine(grid_from_environment().world, config.run.device)
    if machine.device == "cpu" and backend(config) == "deepspeed":
        machine = replace(machine, native_dtypes=("fp32",), reason="transformers takes bf16 on a CPU under DDP only")
        if config.precision.dtype is None:
            get_logger().info("precision.dtype = fp32: %s", machine.reason)
    return machine


def in_order(dataset: Any, resolved: ResolvedConfig) -> Dataset:
    """The samples of all steps, one after the other.

    Every step of transformers is full: a short last step of an epoch is filled with samples of the next one.
    """
    config, batch, data = resolved.config, resolved.config.batch, resolved.config.data
    sampler = GlobalBatchSampler(len(dataset), batch.global_size, batch.micro_size, 0, 1, config.run.seed, data.shuffle)
    steps = total_steps(len(dataset), batch.global_size, config.run.epochs, config.run.max_steps)
    samples = Dataset.from_list([dict(dataset[index]) for index in range(len(dataset))])
    return samples.select([index for step in range(steps) for index in sampler.global_batch(step)])


def make_trainer(
    args: argparse.Namespace,
    trainer_class: type[Trainer] = Trainer,
    arguments_class: type[TrainingArguments] = TrainingArguments,
    **more: Any,
) -> Trainer:
    """A Trainer of transformers for the run of the command line; `more` are further arguments of `arguments_class`."""
    config, origins = config_from_arguments(args)
    resolved = resolve(config, origins, machine_of_transformers(config))
    arguments = arguments_class(
        **training_arguments(resolved), **more
    )  # First: under ZeRO-3 it changes how the model is built.
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(config.model.tokenizer or config.model.path)
    sizes = {"vocab_size": model.config.vocab_size, "max_positions": model.config.max_position_embeddings}
    dataset = prepare(config.data.train, tokenizer, config.data, what="train", **sizes)
    return trainer_class(
        model=model,
        args=arguments,
        train_dataset=in_order(dataset, resolved),
        processing_class=tokenizer,  # It is saved beside the weights.
        data_collator=partial(pad_collate, pad_token_id=padding_id(tokenizer)),
    )


def main() -> None:
    """Trains, and saves the model to `<run.output_dir>/model`."""
    args = parse_train_arguments(default_config=Path(__file__).parent / "demo" / "demo.json")
    with exit_on_user_error(args.debug):
        trainer = make_trainer(args)
        trainer.train()
        trainer.save_model(str(Path(trainer.args.output_dir) / "model"))


if __name__ == "__main__":
    main()
