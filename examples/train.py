"""Fine-tune a model by one JSON, under any launcher.

deepspeed --num_gpus 2 examples/train.py
deepspeed --num_gpus 2 examples/train.py --config run.json --set optimizer.lr=1e-5
python examples/train.py --set zero.stage=0
"""

from pathlib import Path

from ds_trainer import Trainer, exit_on_user_error
from ds_trainer.cli.train import config_from_arguments, parse_train_arguments


def main() -> None:
    """Trains by the JSON that the command line names."""
    args = parse_train_arguments(default_config=Path(__file__).parent / "demo" / "demo.json")
    with exit_on_user_error(args.debug):
        trainer = Trainer(config=config_from_arguments(args))
        trainer.train()
        trainer.close()


if __name__ == "__main__":
    main()
