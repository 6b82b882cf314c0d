"""The Python that a run is translated to cuts and wraps as the engine does."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ds_trainer.config.io import load_config
from ds_trainer.config.resolve import resolve
from ds_trainer.config.resolved import Machine
from ds_trainer.interop.torch.snippet import ddp_snippet, fsdp2_snippet
from tests.helpers.runs import collate, make_trainer
from tests.helpers.tiny import samples, tiny_llama

SECTIONS = {
    "blocks": {},
    "untied": {},
    "size": {"fsdp": {"auto_wrap_policy": "size_based_wrap", "min_num_params": 3000}},
    "derived size": {"fsdp": {"auto_wrap_policy": "size_based_wrap"}},
    "keep": {"zero": {"stage": 2}},
    "prefetch": {"fsdp": {"prefetch_depth": 1, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}},
    "whole": {"fsdp": {"auto_wrap_policy": "no_wrap"}},
}
SECTIONS["prefetch"]["fsdp"]["auto_wrap_policy"] = "transformer_based_wrap"


def parts(model) -> dict[str, bool]:
    """Name of every module that is gathered by itself -> whether it frees its parameters after the forward pass."""
    return {
        name: module._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info is not None
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule) and module._get_fsdp_state()._fsdp_param_group is not None
    }


def both(out, engine, snippet, tied, sections):
    """Loss and gradients of one micro-batch by the engine, and by the snippet's `wrap`."""
    trainer = make_trainer(engine, out, model=tiny_llama(tied=tied), **sections)
    namespace = {}
    exec(snippet(trainer.run.resolved), namespace)  # noqa: S102
    model = namespace["wrap"](tiny_llama(tied=tied).train())
    rank = dist.get_rank()
    batch = collate(samples(8)[4 * rank : 4 * rank + 4])
    labels = batch.pop("labels")
    found = []
    for call, back in (
        (trainer.engine.forward, trainer.engine.backward),
        (model, lambda loss: (loss * (2 if engine == "ddp" else 1)).backward()),
    ):
        logits = call(**batch).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
        back(loss)
    for module in (trainer.run.model, model.module if engine == "ddp" else model):
        grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in module.parameters()]
        found.append((parts(module) if engine == "fsdp2" else None, grads))
    trainer.close()
    (ours, our_grads), (theirs, their_grads) = found
    assert ours == theirs
    for a, b in zip(our_grads, their_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    return ours


def all_kinds(out):
    return {kind: both(out, "fsdp2", fsdp2_snippet, kind != "untied", SECTIONS[kind]) for kind in SECTIONS}


def test_the_snippet_for_fsdp2_cuts_as_the_engine_does(world, tmp_path):
    for found in world(all_kinds, 2, tmp_path):
        for kind, modules in found.items():
            assert (len(modules) > 1) == (kind != "whole")
            assert {frees for name, frees in modules.items() if name not in ("", "lm_head")} == {
                "keep": {False},
                "whole": set(),
            }.get(kind, {True})


def groups(snippet_of_engine):
    """The ranks over which each snippet's model is cut or reduced, with two tensor ranks to a model."""
    found = {}
    for engine, snippet in snippet_of_engine.items():
        raw = {"parallel": {"engine": engine, "tp": 2}, "precision": {"dtype": "fp32"}}
        namespace = {}
        exec(snippet(resolve(*load_config(raw), Machine(4))), namespace)  # noqa: S102
        model = namespace["wrap"](tiny_llama())
        is_ddp = engine == "ddp"
        group = model.process_group if is_ddp else next(model.parameters()).device_mesh.get_group()
        found[engine] = dist.get_process_group_ranks(group)
    return found


def test_under_tensor_parallelism_the_snippets_cut_and_reduce_over_the_data_ranks(world):
    found = world(groups, 4, {"fsdp2": fsdp2_snippet, "ddp": ddp_snippet})
    assert found == [dict.fromkeys(("fsdp2", "ddp"), [rank % 2, rank % 2 + 2]) for rank in range(4)]


def test_the_snippet_for_ddp_gives_the_engines_gradients(world, tmp_path):
    world(both, 2, tmp_path, "ddp", ddp_snippet, True, {"ddp": {"bucket_cap_mb": 1}})
