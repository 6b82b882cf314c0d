"""Shows what a finished demo run did: the evaluation loss before and after it, and one answer of the exported model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ds_trainer.metrics import read_metrics


def answer(model_folder: Path, messages: list[dict[str, str]], max_new_tokens: int = 96) -> str:
    """The exported model's greedy answer to a chat."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    """Reads the run's config, metrics, evaluation data and exported model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path("examples/demo/demo.json"))
    config = json.loads(parser.parse_args().config.read_text(encoding="utf-8"))
    output = Path(config["run"]["output_dir"])
    with open(config["data"]["eval"], encoding="utf-8") as file:
        *request, reference = json.loads(next(file))["messages"]
    losses = [line["eval_loss"] for line in read_metrics(output / "metrics.jsonl") if "eval_loss" in line]

    print(f"\n--- asked, from the evaluation data ---\n{request[-1]['content']}")
    print(f"\n--- {output / 'model'}, loaded with from_pretrained, answers ---\n{answer(output / 'model', request)}")
    print(f"\n--- the standard library's own ---\n{reference['content']}")
    print(f"\neval loss before {losses[0]:.4f} after {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
