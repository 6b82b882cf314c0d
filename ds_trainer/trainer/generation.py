"""Generates text with the model in training, on any engine, without changing the training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from ds_trainer.data.collate import padding_id
from ds_trainer.data.prompts import encode_prompt
from ds_trainer.distributed.consensus import agree, consensus
from ds_trainer.distributed.process_groups import Mesh
from ds_trainer.errors import ConfigError, DataError
from ds_trainer.launch.signals import StopRequested
from ds_trainer.trainer.evaluation import eval_mode
from ds_trainer.trainer.run import Run

Messages = Sequence[dict[str, str]]


@dataclass(frozen=True)
class Decoding:
    """How the next token is chosen. None: the checkpoint's value, from its `generation_config.json`.

    Args:
        max_new_tokens: Longest continuation.
        do_sample: Draw the next token; False: the likeliest one.
        temperature: Divides the logits that are drawn from.
        top_k: Draw from so many likeliest tokens.
        top_p: Draw from the likeliest tokens that together have this probability.
        seed: Of the draws, which are the same on any number of ranks.
    """

    max_new_tokens: int
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


def require_generative(model: Any, tokenizer: Any, requested: str) -> None:
    """Refuses a model that cannot continue a text.

    Args:
        model: The model.
        tokenizer: The run's tokenizer; None: it has none.
        requested: What requests a text, for the error.

    Raises:
        ConfigError: The model does not generate, or only from another kind of input, or there is no tokenizer.
    """
    can_generate = hasattr(model, "can_generate") and model.can_generate()
    if not can_generate or model.config.is_encoder_decoder:
        why = "answers an encoder's input" if can_generate else "has no generate()"
        raise ConfigError(
            f"{requested}, and {type(model).__name__} {why}",
            "a prompt is continued by a causal language model of transformers",
            "set evaluation.generate_samples to 0, or train a causal language model",
        )
    if tokenizer is None:
        raise ConfigError(
            f"{requested}, and there is no tokenizer",
            "prompts are read and continuations written as text",
            "set model.tokenizer, or pass Trainer(processing_class=...)",
        )


def _require_no_pipeline(mesh: Mesh) -> None:
    if mesh.grid.pp_size > 1:
        raise ConfigError(
            f"Trainer.generate is called and parallel.pp is {mesh.grid.pp_size}",
            "a text is continued token by token, and the stages of a pipeline would run one after the other for each",
            "write the model with save_model() and generate from that folder, or set parallel.pp to 1",
        )


def require_positions(prompts: Sequence[list[int]], max_new_tokens: int, positions: int | None) -> None:
    """Refuses prompts whose continuations could outgrow the model.

    Args:
        prompts: Token ids.
        max_new_tokens: Longest continuation.
        positions: Longest sequence the model takes; None: any.

    Raises:
        DataError: One could.
    """
    for i, prompt in enumerate(prompts):
        if positions is not None and len(prompt) + max_new_tokens > positions:
            raise DataError(
                f"prompt {i} has {len(prompt)} tokens and may be continued by {max_new_tokens}, "
                f"the model has {positions} positions",
                "prompt and continuation together fit into the model's positions",
                "shorten the prompt, or lower max_new_tokens (evaluation.max_new_tokens)",
            )


def generate_texts(run: Run, prompts: Sequence[str | Messages], decoding: Decoding) -> list[str]:
    """Continues texts or conversations, without special tokens; see `generate`.

    Raises:
        UserError: Ranks have other prompts than rank 0, or the model cannot continue them.
    """
    mesh, tokenizer = run.mesh, run.tokenizer
    with consensus(mesh, "generate()"):
        _require_no_pipeline(mesh)
        require_generative(run.model, tokenizer, "Trainer.generate is called")
        ids = [encode_prompt(prompt, tokenizer, f"prompt {i}") for i, prompt in enumerate(prompts)]
        require_positions(ids, decoding.max_new_tokens, run.loaders.max_positions)
    calls = mesh.gather_over_world((ids, decoding))
    if others := [rank for rank, one in enumerate(calls) if one != calls[0]]:
        error = DataError(
            f"generate() is called with other prompts or options on ranks {others} than on rank 0",
            "every rank passes all prompts: ds_trainer distributes them over the ranks",
            "call it with the same prompts and options on every rank",
        )
        error.on_all_ranks = True
        raise error
    return [tokenizer.decode(new, skip_special_tokens=True) for new in generate(run, ids, decoding, "generate()")]


def generate(run: Run, prompts: Sequence[list[int]], decoding: Decoding, what: str) -> list[list[int]]:
    """Continues prompts with the model's own `generate`, each batch of them on one rank.

    Batches are the same for any number of ranks, so that padding, the rounding that depends on it, and draws are too.
    Every rank generates equally often, with a filler where it has no batch, and as long as any other one, since
    ZeRO-3 and FSDP2 gather parameters in every forward pass. Random numbers, mode and gradients of the training are
    left as they were.

    Args:
        run: Its model continues them, `evaluation.batch_size` at a time.
        prompts: Token ids, the same on every rank.
        decoding: How the next token is chosen.
        what: Name of the call, for error texts.

    Returns:
        The new tokens of each prompt, without the end token; the same on every rank.

    Comm: over the data-parallel ranks, a consensus per round of batches, one all-reduce of a number per token in each,
        and a gather of the results; and the parameters, as the engine gathers them.

    Raises:
        StopRequested: A signal requests the end of the run.
    """
    mesh, size = run.mesh, run.resolved.config.evaluation.batch_size
    assert size is not None
    settings = _settings(run.model, run.tokenizer, decoding)
    batches = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    rank, ranks = mesh.grid.dp_rank, mesh.grid.dp_size
    local = {}
    cuda = [mesh.device] if mesh.device.type == "cuda" else []
    with eval_mode(run.engine), torch.random.fork_rng(cuda), run.engine.autocast():
        for first in range(0, len(batches), ranks):
            place = f"round {first // ranks + 1} of {what}"
            mesh.monitor.at(place)
            if agree(mesh, place).stop:
                raise StopRequested
            number = first + rank
            torch.manual_seed(decoding.seed + number)
            if number < len(batches):
                local[number] = _continue(run.model, batches[number], settings, mesh)
            else:
                _continue(run.model, batches[first][:1], settings, mesh)
    gathered = {number: rows for of_rank in mesh.gather_over_dp(local) for number, rows in of_rank.items()}
    return [row for number in range(len(batches)) for row in gathered[number]]


def _settings(model: Any, tokenizer: Any, decoding: Decoding) -> GenerationConfig:
    """Settings of a generation; transformers takes the checkpoint's value for those that are None."""
    configured = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])} - {None}
    if decoding.do_sample:
        draws = {"temperature": decoding.temperature, "top_k": decoding.top_k, "top_p": decoding.top_p}
    else:  # The neutral values: transformers would warn about a checkpoint's values.
        draws = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
    return GenerationConfig(
        max_new_tokens=decoding.max_new_tokens,
        do_sample=decoding.do_sample,
        num_beams=1,
        use_cache=True,  # Off in the model's config while it is trained.
        disable_compile=True,  # Of a checkpoint's static cache: engines' hooks and collectives run inside the forward.
        eos_token_id=sorted(ends) or None,
        pad_token_id=padding_id(tokenizer),
        **draws,
    )


def _continue(model: Any, prompts: Sequence[list[int]], settings: GenerationConfig, mesh: Mesh) -> list[list[int]]:
    """The new tokens of one batch, whose prompts are padded on the left."""
    rows = [torch.tensor(prompt) for prompt in prompts]
    pad: dict[str, Any] = {"batch_first": True, "padding_side": "left"}
    ids_BT = pad_sequence(rows, padding_value=settings.pad_token_id, **pad).to(mesh.device)
    mask_BT = pad_sequence([torch.ones_like(row) for row in rows], **pad).to(mesh.device)
    out_BT = model.generate(ids_BT, attention_mask=mask_BT, generation_config=settings, synced_gpus=mesh.grid.world > 1)
    ends = settings.eos_token_id or []
    return [list(takewhile(lambda token: token not in ends, row)) for row in out_BT[:, ids_BT.shape[1] :].tolist()]
