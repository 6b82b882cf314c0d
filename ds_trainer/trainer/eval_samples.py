"""A few samples of the evaluation data, continued by the model in training: shown, and written beside the metrics."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

from ds_trainer.config.training_sections import EvaluationConfig
from ds_trainer.data.loader import BatchLoader
from ds_trainer.data.prompts import Prompt, first_prompts
from ds_trainer.errors import ConfigError
from ds_trainer.files import replace_text
from ds_trainer.log import get_logger, warn_once
from ds_trainer.trainer.generation import Decoding, generate, require_generative, require_positions
from ds_trainer.trainer.run import Run

SHOWN_CHARS = 300


@dataclass(frozen=True)
class Generation:
    """A line of `generations.jsonl`.

    Args:
        step: Optimizer steps taken before it.
        index: The sample's place in the evaluation data.
        prompt: What was continued, special tokens included.
        generated: The continuation, without special tokens.
        reference: What the data says, without special tokens.
    """

    step: int
    index: int
    prompt: str
    generated: str
    reference: str


def prompts_to_continue(
    config: EvaluationConfig, loader: BatchLoader | None, model: Any, tokenizer: Any, positions: int | None
) -> list[Prompt]:
    """The prompts of the first `evaluation.generate_samples` evaluation samples.

    Args:
        config: The config's evaluation section.
        loader: The evaluation data.
        model: The model, perhaps a skeleton.
        tokenizer: The run's tokenizer.
        positions: Longest sequence the model takes; None: any.

    Raises:
        UserError: There is no evaluation data, a sample has no prompt, or the model cannot continue it.
    """
    if not config.generate_samples:
        return []
    requested = f"evaluation.generate_samples is {config.generate_samples}"
    if loader is None:
        raise ConfigError(
            f"{requested}, and there is no evaluation data",
            "the prompts of evaluation samples are continued",
            "set data.eval, or pass Trainer(eval_dataset=...)",
        )
    require_generative(model, tokenizer, requested)
    prompts = first_prompts(loader, config.generate_samples)
    require_positions([prompt.input_ids for prompt in prompts], config.max_new_tokens, positions)
    return prompts


def continue_samples(run: Run, step: int) -> list[Generation]:
    """Continues the run's evaluation prompts, as texts; a collective."""
    if not run.eval_prompts:
        return []
    decoding = Decoding(run.resolved.config.evaluation.max_new_tokens)
    prompts, decode = run.eval_prompts, run.tokenizer.decode
    new_ids = generate(run, [prompt.input_ids for prompt in prompts], decoding, "the evaluation's continuations")
    return [
        Generation(
            step=step,
            index=prompt.index,
            prompt=decode(prompt.input_ids),
            generated=decode(ids, skip_special_tokens=True),
            reference=decode(prompt.reference_ids, skip_special_tokens=True),
        )
        for prompt, ids in zip(prompts, new_ids, strict=True)
    ]


def show_samples(generations: Sequence[Generation]) -> None:
    """Logs the end of each prompt, and the beginnings of the two answers."""
    for one in generations:
        prompt = one.prompt if len(one.prompt) <= SHOWN_CHARS else f"… {one.prompt[-SHOWN_CHARS:]}"
        text = indent(f"{prompt}⟦{_shortened(one.generated)}⟧\nreference: ⟦{_shortened(one.reference)}⟧", "  ")
        get_logger().info("step %d, evaluation sample %d, generated between ⟦ ⟧:\n%s", one.step, one.index, text)


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]} …"


def write_samples(path: Path, generations: Sequence[Generation]) -> None:
    """Adds lines to the file and removes those of this step and later ones, which a resumed run generates again.

    A file that cannot be written, as on a full disk, does not end the run: the texts have been shown.
    """
    lines = [json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in generations]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+", encoding="utf-8") as file:
            file.seek(0)
            earlier = [line for line in file if json.loads(line)["step"] < generations[0].step]
        replace_text(path, "".join(earlier + lines))
    except (OSError, ValueError) as error:
        warn_once(f"{path} cannot be read or written ({error}): continuations are only shown")
