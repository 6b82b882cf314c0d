"""Parity with one process: a reference in plain torch, and a cell that any layout runs and compares with it."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from ds_trainer.callbacks.base import Callback
from ds_trainer.data.collate import pad_collate
from ds_trainer.data.sampler import GlobalBatchSampler
from ds_trainer.loss import CrossEntropy, shifted_labels
from tests.helpers.tiny import samples, tiny_llama

STEPS = 4
GLOBAL = 8
SEED = 3
CLIP = 0.5
GRADIENT_TOLERANCE = 1e-5
"""Of each tensor's largest element: the order in which fp32 sums over ranks and micro-batches are taken differs."""
LOSS_TOLERANCE = 1e-6
WEIGHT_TOLERANCE = {"sgd": 1e-6, "adamw": 1e-5}
"""Of each tensor's largest. Adam divides small gradients by themselves, so rounding grows there; eps 1e-4 bounds it."""
OPTIMIZERS = {
    "sgd": {"name": "sgd", "lr": 0.5, "momentum": 0.9},
    "adamw": {"name": "adamw", "lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1},
}


def rows(vocab: int) -> list[dict]:
    """14 samples, so that every second step is a short window of 6."""
    return samples(14, vocab=vocab)


def collate(features: list[dict]) -> dict[str, torch.Tensor]:
    """Pads with 0."""
    return pad_collate(features, 0)


def write_reference(folder: Path, optimizer: str, lr: float | None = None, **shape: Any) -> None:
    """Trains in this process with plain torch and writes checkpoint, losses, norms, gradients and final weights.

    Args:
        folder: Where to write it.
        optimizer: A key of `OPTIMIZERS`.
        lr: Instead of the optimizer's own.
        shape: Arguments of `tiny_llama`.
    """
    model = tiny_llama(**shape)
    model.save_pretrained(folder / "checkpoint")
    data = rows(model.config.vocab_size)
    sampler = GlobalBatchSampler(len(data), GLOBAL, GLOBAL, seed=SEED)
    step_size = _torch_optimizer(model, optimizer, lr)
    history: dict[str, list[float]] = {"losses": [], "norms": []}
    for step in range(STEPS):
        batch = collate([data[i] for i in sampler.global_batch(step)])
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100
        )
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        save_file(grads, folder / f"gradients-{step}.safetensors")
        # In fp64: torch's fp32 norm of a large tensor is off by 1e-4 on one CPU core.
        norm = torch.sqrt(sum((g.double() ** 2).sum() for g in grads.values()))
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, norm)
        assert norm > CLIP, "clipping must act"
        history["losses"].append(loss.item())
        history["norms"].append(norm.item())
        step_size.step()
        step_size.zero_grad()
    save_file({name: p.detach() for name, p in model.named_parameters()}, folder / "weights.safetensors")
    (folder / "history.json").write_text(json.dumps(history))


def write_bf16_reference(folder: Path, optimizer: str, autocast: bool, lr: float | None = None, **shape: Any) -> None:
    """As `write_reference`, computed in bf16 sample by sample, the gradients of samples summed in fp32.

    Args:
        folder: Where to write it.
        optimizer: A key of `OPTIMIZERS`.
        autocast: Whether parameters stay fp32 under autocast; else they are cast to bf16.
        lr: Instead of the optimizer's own.
        shape: Arguments of `tiny_llama`.
    """
    model = tiny_llama(**shape)
    model.save_pretrained(folder / "checkpoint")
    data = rows(model.config.vocab_size)
    sampler = GlobalBatchSampler(len(data), GLOBAL, GLOBAL, seed=SEED)
    step_size = _torch_optimizer(model, optimizer, lr)
    history: dict[str, list[float]] = {"losses": [], "norms": []}
    for step in range(STEPS):
        batches = [collate([data[i]]) for i in sampler.global_batch(step)]
        total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        computed = model if autocast else _with_bf16_parameters(model)
        sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        loss_sum = 0.0
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = computed(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            # Not torch's: where its last digit differs, gradients round to other numbers of bf16.
            loss = CrossEntropy().sum(logits, shifted_labels(batch["labels"]))
            (loss / total).backward()
            loss_sum += loss.item()
            for name, p in computed.named_parameters():
                sums[name] += p.grad.float()
                p.grad = None
        save_file(sums, folder / f"gradients-{step}.safetensors")
        norm = torch.sqrt(sum((g.double() ** 2).sum() for g in sums.values()))
        for name, p in model.named_parameters():
            p.grad = sums[name]
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, norm)
        assert norm > CLIP, "clipping must act"
        history["losses"].append(loss_sum / total)
        history["norms"].append(norm.item())
        step_size.step()
        step_size.zero_grad()
    save_file({name: p.detach() for name, p in model.named_parameters()}, folder / "weights.safetensors")
    (folder / "history.json").write_text(json.dumps(history))


def _with_bf16_parameters(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A copy; its buffers, such as rotary frequencies, stay fp32."""
    copy = deepcopy(model)
    for parameter in copy.parameters():
        parameter.data = parameter.data.bfloat16()
        parameter.grad = None
    return copy


def _torch_optimizer(model: LlamaForCausalLM, name: str, lr: float | None) -> torch.optim.Optimizer:
    keys = OPTIMIZERS[name] | ({} if lr is None else {"lr": lr})
    decay = keys.pop("weight_decay", 0.0)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    keys.pop("name")
    return {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name](groups, **keys)


def cell_config(
    reference: Path, out: Path, ranks: int, optimizer: str, lr: float | None = None, **sections: Any
) -> dict:
    """The JSON of one cell: accumulation 2 on 2 and 4 ranks, 4 on one."""
    micro = {1: 2, 2: 2, 4: 1}[ranks]
    keys = OPTIMIZERS[optimizer] | ({} if lr is None else {"lr": lr})
    return {
        "model": {"path": str(reference / "checkpoint")},
        "batch": {"global_size": GLOBAL, "micro_size": micro},
        "optimizer": {**keys, "max_grad_norm": CLIP},
        "schedule": {"name": "constant"},
        "precision": {"dtype": "fp32"},
        "run": {"max_steps": STEPS, "epochs": 10, "seed": SEED, "output_dir": str(out), "device": "cpu"},
        "checkpoint": {"export": False},
        "logging": {"plots": False, "progress_bar": False},
        **sections,
    }


class Recorder(Callback):
    """Compares each step's gradients, loss and norm with the reference as they come.

    Args:
        reference: What `write_reference` wrote.
    """

    loss_tolerance, norm_tolerance = LOSS_TOLERANCE, GRADIENT_TOLERANCE

    def gradient_tolerance(self, step: int, name: str) -> float:
        """Of the tensor's largest element."""
        return GRADIENT_TOLERANCE

    def __init__(self, reference: Path) -> None:
        self.reference = reference
        self.history = json.loads((reference / "history.json").read_text())
        self.largest_gradient_error = 0.0

    def on_pre_optimizer_step(self, trainer: Any) -> None:
        """Every gradient, whole."""
        step = trainer.state.global_step
        expected = load_file(self.reference / f"gradients-{step}.safetensors")
        seen = set()
        for name, grad in trainer.engine.full_gradients():
            seen.add(name)
            error = _relative_error(grad, expected[name])
            self.largest_gradient_error = max(self.largest_gradient_error, error)
            assert error <= self.gradient_tolerance(step, name), (
                f"step {step}: gradient of {name} is off by {error:.2e}"
            )
        assert seen == set(expected), f"gradients missing: {set(expected) - seen}"

    def on_step_end(self, trainer: Any) -> None:
        """Loss and norm."""
        step = trainer.state.global_step - 1
        for what, got in (("losses", trainer.state.loss), ("norms", trainer.state.grad_norm)):
            expected = self.history[what][step]
            tolerance = self.loss_tolerance if what == "losses" else self.norm_tolerance
            assert abs(got - expected) <= tolerance * abs(expected), f"step {step}: {what} {got!r} != {expected!r}"


def compare_weights(trainer: Any, reference: Path, optimizer: str, tolerance: float | None = None) -> float:
    """The largest relative error of the final weights; every tensor must have moved."""
    tolerance = WEIGHT_TOLERANCE[optimizer] if tolerance is None else tolerance
    expected = load_file(reference / "weights.safetensors")
    initial = load_file(reference / "checkpoint" / "model.safetensors")
    worst = 0.0
    for name, value in trainer.engine.full_parameters():
        error = _relative_error(value, expected.pop(name))
        assert error <= tolerance, f"weight {name} is off by {error:.2e}"
        assert not torch.equal(value, initial[name]), f"{name} did not move"
        worst = max(worst, error)
    assert not expected, f"weights missing: {sorted(expected)}"
    return worst


def _relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape
    return ((got - expected).abs().max() / expected.abs().max()).item()
