"""Train a chat model on conversations that Python code makes, handed over as `datasets` objects.

deepspeed --num_gpus 2 examples/sft_chat.py
python examples/sft_chat.py --set model.path=my-checkpoint
"""

import random
from pathlib import Path

from datasets import Dataset

from ds_trainer import Trainer, exit_on_user_error
from ds_trainer.cli.train import config_from_arguments, parse_train_arguments


def sums(n: int, seed: int) -> Dataset:
    """Conversations about sums; the loss is taken on the assistant's turns alone."""
    draw = random.Random(seed)
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(n)]
    return Dataset.from_list(
        [
            {
                "messages": [
                    {"role": "user", "content": f"What is {a} + {b}?"},
                    {"role": "assistant", "content": f"{a} + {b} = {a + b}"},
                ]
            }
            for a, b in pairs
        ]
    )


def main() -> None:
    """Trains, with an evaluation before and after."""
    args = parse_train_arguments(default_config=Path(__file__).with_suffix(".json"))
    with exit_on_user_error(args.debug):
        trainer = Trainer(
            config=config_from_arguments(args),
            train_dataset=sums(200, seed=0),
            eval_dataset=sums(20, seed=1),
        )
        trainer.train()
        trainer.close()


if __name__ == "__main__":
    main()
