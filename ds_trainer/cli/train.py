"""`ds-trainer train run.json`, and the same arguments for a user's scripts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ds_trainer.config.io import load_config
from ds_trainer.config.schema import RunConfig
from ds_trainer.launch.environment import check_local_rank
from ds_trainer.launch.local_launcher import run_ranks


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a training script beside the path of its JSON; launchers add `--local_rank`."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key: --set optimizer.lr=1e-5"
    )
    parser.add_argument("--deepspeed_config", metavar="DS.JSON", help="DeepSpeed JSON, merged last (native.deepspeed)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error in the config or the data")
    add_local_rank(parser)
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)


def add_local_rank(parser: argparse.ArgumentParser) -> None:
    """Accepts the option that the deepspeed launcher puts before all others; its variables say the same."""
    # No default: a sub-command's default would override a value given before its name.
    parser.add_argument("--local_rank", "--local-rank", type=int, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def config_from_arguments(args: argparse.Namespace) -> tuple[RunConfig, dict[str, str]]:
    """The config that the arguments describe, and where each key comes from.

    Raises:
        ConfigErrors: Every fault of the config.
        MachineError: `--local_rank` contradicts the launcher's variables.
    """
    check_local_rank(getattr(args, "local_rank", None))
    return load_config(args.config, args.set, args.deepspeed_config)


def parse_train_arguments(default_config: str | Path) -> argparse.Namespace:
    """Parses the command line of a training script.

    Args:
        default_config: JSON that is used without `--config`.
    """
    parser = argparse.ArgumentParser(description="Train a model by one JSON.")
    parser.add_argument("--config", default=str(default_config), help="the run's JSON (default: %(default)s)")
    add_train_arguments(parser)
    return parser.parse_args()


def run(args: argparse.Namespace) -> int:
    """Trains; the handler of `ds-trainer train`."""
    config = config_from_arguments(args)
    if args.nproc is not None:
        return run_ranks(_command_of_a_rank(args), args.nproc)
    from ds_trainer import Trainer  # Loads torch, which takes seconds: a wrong config is reported before.

    trainer = Trainer(config=config)
    trainer.train()
    trainer.close()
    return 0


def _command_of_a_rank(args: argparse.Namespace) -> list[str]:
    """The same command without `--nproc`, with unbuffered output: the last lines of a rank that dies are kept."""
    named = [f"--set={setting}" for setting in args.set]
    if args.deepspeed_config is not None:
        named.append(f"--deepspeed_config={args.deepspeed_config}")
    if args.debug:
        named.append("--debug")
    return [sys.executable, "-u", "-m", "ds_trainer", "train", args.config, *named]
