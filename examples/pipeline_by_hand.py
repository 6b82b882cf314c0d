"""Splits a Llama into pipeline stages by hand, runs one step under a schedule, and compares it with the unsplit model.

torchrun --nproc_per_node 2 examples/pipeline_by_hand.py --schedule zbv

Runs on the CPU in seconds, on 2 or 4 ranks. `parallel.pp` does this for any model: docs/pipeline.md.
"""

import argparse
import copy
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from ds_trainer.parallel.pipeline.deferred_linear import enable_deferred_weight_gradients
from ds_trainer.parallel.pipeline.runtime import PipelineRuntime
from ds_trainer.parallel.pipeline.split import split_into_stages
from ds_trainer.parallel.tied_parameters import StageParameters
from ds_trainer.planning.pp_drawing import as_text
from ds_trainer.planning.pp_schedules import NAMES, default_virtual_stages, make_schedule
from ds_trainer.planning.pp_timeline import simulate

MICROBATCHES, LAYERS, VOCABULARY = 8, 8, 256
TOLERANCE = 1e-5


def main(arguments: Sequence[str] | None = None) -> None:
    """One step.

    Raises:
        SystemExit: There is no launcher, or the stages compute something else than the whole model.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", choices=NAMES, default="1f1b")
    name = parser.parse_args(arguments).schedule
    group = join()
    rank, ranks = group.rank(), group.size()

    torch.manual_seed(0)  # The same weights and micro-batches on every rank.
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": LAYERS}
    whole = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=True, **sizes))
    batches = [torch.randint(VOCABULARY, (2, 16 + 2 * i)) for i in range(MICROBATCHES)]  # Of any lengths.

    # 1. A schedule lists the passes of every rank: which micro-batch goes through which stage.
    schedule = make_schedule(name, ranks, default_virtual_stages(name), MICROBATCHES)
    say(group, [as_text(simulate(schedule), width=120)] if rank == 0 else [])

    # 2. A rank keeps the modules of its stages, under the names that they have in the whole model.
    length = LAYERS // schedule.num_stages
    ranges = tuple((length * stage, length * (stage + 1)) for stage in range(schedule.num_stages))
    model = copy.deepcopy(whole)
    staged = split_into_stages(model, ranges, schedule.stages_of(rank), schedule.rank_of)
    enable_deferred_weight_gradients(model)  # For schedules that have passes I and W, and not B.
    count = sum(parameter.numel() for parameter in model.parameters())
    say(group, [f"rank {rank} has {count:,} parameters, in stages {', '.join(map(str, staged.stages))}"])

    # 3. The runtime runs the rank's list; between passes it sends hidden states forward, and their gradients back.
    losses: dict[int, torch.Tensor] = {}

    def forward(stage: int, microbatch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        ids, is_last = batches[microbatch], stage == schedule.num_stages - 1
        labels = {"labels": ids} if is_last else {}
        outputs = model(pipeline_stage=stage, hidden_states=hidden, input_ids=ids, **labels)
        if not is_last:
            return outputs
        losses[microbatch] = outputs.loss.detach()
        return outputs.loss / MICROBATCHES

    PipelineRuntime(group, group, torch.device("cpu")).run(schedule, forward, [ids.shape for ids in batches])

    # 4. Embedding and head are one parameter. The first stage owns it, and receives the last stage's gradient.
    parameters = StageParameters(staged.shapes, staged.owners, staged.replicas, rank, group, group)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    parameters.sum_tied(gradients)

    # 5. The same on the whole model.
    expected = [whole(input_ids=ids, labels=ids).loss for ids in batches]
    (sum(expected) / MICROBATCHES).backward()
    pairs = [(losses[i], expected[i].detach()) for i in losses]
    pairs += [(gradients[name], whole.get_parameter(name).grad) for name in gradients if parameters.owns(name)]
    error = max(((got - wanted).abs().max() / wanted.abs().max()).item() for got, wanted in pairs)
    lines = [f"rank {rank}: losses and gradients differ from the whole model's by {error:.0e} of the largest number"]
    if losses:
        lines.append(f"losses of the pipeline:    {' '.join(f'{losses[i].item():.6f}' for i in sorted(losses))}")
        lines.append(f"losses of the whole model: {' '.join(f'{loss.item():.6f}' for loss in expected)}")
    say(group, lines)
    if not error < TOLERANCE:
        raise SystemExit(f"rank {rank} computes something else than the whole model")


def join() -> dist.ProcessGroup:
    """The group of all ranks.

    Raises:
        SystemExit: There is no launcher, or it has started another number of ranks.
    """
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise SystemExit("start it with: torchrun --nproc_per_node 2 examples/pipeline_by_hand.py")
        dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    if group.size() not in (2, 4):
        message = f"{LAYERS} layers make two equal stages on each of 2 or 4 ranks, not {group.size()}"
        raise SystemExit(message if group.rank() == 0 else 1)
    return group


def say(group: dist.ProcessGroup, lines: Sequence[str]) -> None:
    """Prints the lines of all ranks, in their order."""
    all_lines: list[Sequence[str]] = [[]] * group.size()
    dist.all_gather_object(all_lines, lines, group=group)
    if group.rank() == 0:
        print(*(line for lines in all_lines for line in lines), "", sep="\n", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # Ends gloo's threads before Python exits.
