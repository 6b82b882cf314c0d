"""The `ds-trainer` command. Handlers are imported when they are called, so that `config` loads no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from ds_trainer.cli.train import add_local_rank, add_train_arguments
from ds_trainer.errors import exit_on_user_error


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: Arguments; None: those of the process.

    Returns:
        The exit code; a `UserError` exits with 2 and its text on stderr.
    """
    args = _parser().parse_args(argv)
    try:
        with exit_on_user_error(args.debug):
            return import_module(args.handler).run(args)
    except KeyboardInterrupt:
        return 130  # The shell's code for SIGINT; a run in progress handles the signal itself.


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds-trainer", description="Fine-tune Hugging Face checkpoints from one JSON.")
    add_local_rank(parser)
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('ds_trainer')}")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="fine-tune a model by a run's JSON", allow_abbrev=False)
    train.add_argument("config", help="the run's JSON")
    train.add_argument("--nproc", type=_number_of_ranks, metavar="N", help="start N ranks on this machine")
    add_train_arguments(train)
    train.set_defaults(handler="ds_trainer.cli.train")
    _add_export(commands.add_parser("export", help="write a checkpoint's weights as a Hugging Face folder"))
    _add_config(commands.add_parser("config", help="show, check, translate and import a run's JSON"))
    _add_plan(commands.add_parser("plan", help="show what a run will do, without starting anything"))
    _add_doctor(commands.add_parser("doctor", help="show what this machine can run", allow_abbrev=False))
    return parser


def _number_of_ranks(text: str) -> int:
    if not text.isdecimal() or not 1 <= len(text) <= 6 or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of ranks: give 1 or more")
    return int(text)


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(handler="ds_trainer.cli.export")
    parser.add_argument("checkpoint", help="folder of a checkpoint, such as outputs/checkpoint-500")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the Hugging Face folder goes")
    parser.add_argument("--overwrite", action="store_true", help="replace the model in a FOLDER that is not empty")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="dtype of the weights (default: the run's)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(handler="ds_trainer.cli.plan")
    subjects = parser.add_subparsers(dest="subject", required=True)
    schedule = subjects.add_parser("schedule", help="draw the timeline of a pipeline's ranks", allow_abbrev=False)
    _add_run(schedule)
    schedule.add_argument(
        "--world", type=_number_of_ranks, metavar="N", help="number of ranks (default: those of one model replica)"
    )
    schedule.add_argument("--output", metavar="FILE", help="draw a picture too: a .png, .pdf or .svg")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="the run's JSON")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    parser.add_argument("--deepspeed_config", metavar="DS.JSON", help="DeepSpeed JSON (native.deepspeed)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="kind of device (default: this machine's)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(handler="ds_trainer.cli.config")
    actions = parser.add_subparsers(dest="action", required=True)
    for name, text in (
        ("show", "print every resolved value and where it comes from"),
        ("check", "report every fault, without starting anything"),
        ("translate", "print the run as the config of an engine or another tool"),
    ):
        action = actions.add_parser(name, help=text, allow_abbrev=False)
        _add_run(action)
        action.add_argument(
            "--world", type=_number_of_ranks, default=1, metavar="N", help="number of ranks (default: 1)"
        )
    actions.choices["show"].add_argument(
        "--backend",
        choices=("deepspeed", "fsdp2", "ddp", "accelerate", "all"),
        help="print instead what this engine, or each of them, does with every key",
    )
    translate = actions.choices["translate"]
    translate.add_argument(
        "--to",
        choices=("deepspeed", "fsdp2", "ddp", "accelerate", "hf"),
        help="DeepSpeed's JSON, Python for FSDP2 or DDP, accelerate's YAML, TrainingArguments (default: the engine's)",
    )
    translate.add_argument("--python", action="store_true", help="accelerate, hf: Python instead of the file")
    translate.add_argument(
        "--standalone", action="store_true", help="add optimizer and scheduler, for use outside ds_trainer"
    )
    importing = actions.add_parser("import", help="make a run's JSON from another tool's config", allow_abbrev=False)
    importing.add_argument(
        "config", metavar="FILE", help="DeepSpeed JSON, accelerate YAML, or TrainingArguments; - is stdin"
    )
    importing.add_argument(
        "--from", dest="kind", choices=("deepspeed", "accelerate", "hf"), help="what FILE is (default: by its keys)"
    )
    importing.add_argument("--out", metavar="RUN.JSON", help="new file for the run (default: stdout)")
    importing.add_argument("--debug", action="store_true", help="show the traceback of an error")
    actions.add_parser("schema", help="print the JSON Schema of a run").set_defaults(debug=False)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(handler="ds_trainer.cli.doctor")
    parser.add_argument("--build-ops", action="store_true", help="compile DeepSpeed's ops ahead of the first run")
    parser.add_argument("--ops", nargs="+", metavar="NAME", help="which ops to build")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
