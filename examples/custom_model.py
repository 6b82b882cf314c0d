"""Train a model instance that is no language model: a small BERT that classifies, with its own loss and a metric.

deepspeed --num_gpus 2 examples/custom_model.py
python examples/custom_model.py --set parallel.engine=ddp
"""

from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, EvalPrediction, default_data_collator

from ds_trainer import Trainer, exit_on_user_error
from ds_trainer.cli.train import config_from_arguments, parse_train_arguments

VOCAB, LENGTH, WANTED = 16, 12, 7


def samples(n: int, seed: int) -> list[dict]:
    """Random rows of tokens; the label says whether token 7 is among them."""
    rows = torch.randint(0, VOCAB, (n, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row.tolist(), "label": int(WANTED in row)} for row in rows]


def build_model() -> BertForSequenceClassification:
    """A BERT of a few thousand parameters, the same on every rank."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Share of samples whose higher logit is that of the label."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    """Trains, with loss and accuracy on other samples before and after."""
    args = parse_train_arguments(default_config=Path(__file__).with_suffix(".json"))
    with exit_on_user_error(args.debug):
        trainer = Trainer(
            model=build_model(),
            config=config_from_arguments(args),
            train_dataset=samples(320, seed=1),
            eval_dataset=samples(100, seed=2),
            data_collator=default_data_collator,
            compute_metrics=accuracy,
        )
        trainer.train()
        trainer.close()


if __name__ == "__main__":
    main()
