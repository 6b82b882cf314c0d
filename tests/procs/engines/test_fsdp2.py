"""What FSDP2 does beside the parity tests: ties, groups, formats, norms, passes without gradients, and failures."""

import os
import signal

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ds_trainer.callbacks.base import Callback
from ds_trainer.engines.introspect import local_shard
from ds_trainer.errors import ConfigError, EngineError
from tests.helpers.failing import due, run_ranks
from tests.helpers.runs import D8, largest_difference, make_trainer, weights
from tests.helpers.shards_witness import Collectives
from tests.helpers.tiny import oracle, samples, tiny_llama


def held(module):
    """Which share of its matrix a module has here."""
    return local_shard(module.weight).numel() / module.weight.numel()


@pytest.mark.case("D4", "I13")
def test_a_tied_matrix_stays_one_tensor_and_every_row_of_it_learns(world, tmp_path):
    initial = tiny_llama().model.embed_tokens.weight
    assert initial.shape[0] == 65, "not a multiple of the ranks"
    for tied, final in world(train_tied, 2, tmp_path):
        assert tied == [True] * 3
        assert (final != initial).any(dim=1).all()


def train_tied(out):
    rows = [{"input_ids": list(range(i, 65, 2))} for i in (0, 1) for _ in range(4)]
    rows = [row | {"labels": row["input_ids"]} for row in rows]
    trainer = make_trainer("fsdp2", out, model=tiny_llama(), rows=rows, run={"max_steps": 5, "epochs": 5})
    model, tied = trainer.run.model, []

    def look(*_):
        head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
        tied.append(head is embedding and local_shard(head).data_ptr() == local_shard(embedding).data_ptr())

    look()
    handle = model.model.norm.register_forward_hook(look)
    trainer.train_step()
    handle.remove()
    trainer.train()
    return [tied[0], tied[-1], model.lm_head.weight is model.model.embed_tokens.weight], weights(trainer)[
        "model.embed_tokens.weight"
    ]


def test_an_untied_embedding_and_head_are_whole_only_while_they_run(world, tmp_path):
    for seen in world(look_from_inside, 2, tmp_path):
        assert seen == {"embedding": {(1.0, 0.5)}, "block": {(0.5, 0.5)}, "head": {(0.5, 1.0)}}


def look_from_inside(out):
    # 64 rows come out even, so that a share is a half.
    trainer = make_trainer("fsdp2", out, model=tiny_llama(tied=False, vocab=64), rows=samples(8, vocab=64))
    model = trainer.run.model
    places = {"embedding": model.model.embed_tokens, "block": model.model.layers[0], "head": model.lm_head}
    seen = {name: set() for name in places}
    for name, module in places.items():
        look = lambda *_, name=name: seen[name].add((held(places["embedding"]), held(places["head"])))  # noqa: E731
        module.register_forward_pre_hook(look)
    trainer.train_step()
    return seen


@pytest.mark.parametrize("depth", [None, 2])
def test_prefetching_gathers_the_next_blocks_before_they_run(world, tmp_path, depth):
    # The embedding with the model, then a block, and as many blocks ahead.
    assert world(gathers_by_block, 2, tmp_path, depth) == [[2, 3, 4, 5] if depth is None else [4, 5, 5, 5]] * 2


def gathers_by_block(out, depth):
    fsdp = {} if depth is None else {"prefetch_depth": depth}
    trainer = make_trainer("fsdp2", out, model=tiny_llama(layers=4), fsdp=fsdp, batch={"micro_size": 4})
    collectives, counts = Collectives(), []
    for layer in trainer.run.model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda *_: counts.append(collectives.counts["c10d::_allgather_base_"])
        )
    with collectives:
        trainer.train_step()
    return counts


def test_a_pass_without_gradients_frees_everything_and_the_next_step_sees_new_weights(world, tmp_path):
    for freed, losses, expected in world(evaluate_and_train, 2, tmp_path):
        assert freed == {True}
        assert losses == pytest.approx(expected, rel=1e-6)


def evaluate_and_train(out):
    freed, losses, expected = set(), [], []
    model = tiny_llama()
    for reshard in (True, False):
        fsdp = {"reshard_after_forward": reshard}
        trainer = make_trainer("fsdp2", out, given={"eval_dataset": D8}, fsdp=fsdp, run={"max_steps": 2, "epochs": 2})
        for _ in range(2):
            losses.append(trainer.evaluate()["eval_loss"])
            model.load_state_dict(weights(trainer), strict=False)
            expected.append(oracle(model, D8)[0])
            freed.add(all(isinstance(p, DTensor) for p in trainer.run.model.parameters()))
            with torch.no_grad(), trainer.engine.autocast():
                trainer.run.model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False)
            freed.add(all(isinstance(p, DTensor) for p in trainer.run.model.parameters()))
            trainer.train_step()
        trainer.close()
    return freed, losses, expected


def test_blocks_compute_in_bf16_from_fp32_shards_and_buffers_keep_their_format_unless_told(world, tmp_path):
    for inside, owned, buffers in world(formats, 2, tmp_path):
        assert inside == {torch.bfloat16} and owned == {torch.float32}
        assert buffers == [torch.float32, torch.bfloat16]


def formats(out):
    inside, owned, buffers = set(), set(), []
    for fsdp in ({}, {"buffer_dtype": "bf16"}):
        trainer = make_trainer("fsdp2", out, precision={"dtype": "bf16"}, fsdp=fsdp)
        model = trainer.run.model
        model.model.layers[0].mlp.register_forward_hook(lambda m, *_: inside.add(m.up_proj.weight.dtype))
        trainer.train_step()
        owned |= {p.dtype for p in model.parameters()}
        buffers.append(model.model.rotary_emb.inv_freq.dtype)
        trainer.close()
    return inside, owned, buffers


@pytest.mark.case("G6")
@pytest.mark.parametrize(
    ("engine", "norm_type", "ranks", "replicate"),
    [("ddp", "inf", 2, 1), ("fsdp2", "inf", 2, 1), ("fsdp2", "l2", 4, 2), ("fsdp2", "inf", 4, 2)],
)
def test_the_update_is_clipped_to_the_limit_in_the_norm_asked_for(world, tmp_path, engine, norm_type, ranks, replicate):
    model = tiny_llama()
    _, _, gradients = oracle(model, D8)
    order = {"l2": 2, "inf": float("inf")}[norm_type]

    def norm(tensors):
        return torch.linalg.vector_norm(torch.cat([t.double().flatten() for t in tensors]), order).item()

    for got, final in world(clipped, ranks, engine, tmp_path, norm_type, replicate):
        assert got == pytest.approx(norm(gradients.values()), rel=1e-6), "the norm is that before clipping"
        update = norm(final[name] - p.detach() for name, p in model.named_parameters())
        assert update == pytest.approx(0.01, abs=1e-6)


def clipped(engine, out, norm_type, replicate):
    parallel = {"parallel": {"dp_replicate": replicate}} if replicate > 1 else {}
    optimizer = {"max_grad_norm": 0.01, "norm_type": norm_type}
    trainer = make_trainer(engine, out, optimizer=optimizer, batch={"micro_size": 1}, **parallel)
    return trainer.train().grad_norm, weights(trainer)


def test_a_loss_scale_leaves_no_trace_and_an_overflow_on_one_rank_halves_it_on_all(world, tmp_path):
    for difference, scales, unchanged in world(scaled, 2, tmp_path):
        assert difference == 0.0
        assert scales == [2.0**11, 2.0**10] and unchanged


def scaled(out):
    finals = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)):
        adamw = {"name": "adamw", "lr": 1e-2, "max_grad_norm": 0.1}
        run = {"max_steps": 4, "epochs": 4, "on_non_finite": "skip"}
        trainer = make_trainer("fsdp2", out, optimizer=adamw, run=run)
        if scaler is not None:
            trainer.engine._scaler = scaler  # The config allows fp16 on GPUs only.
        trainer.train_step()
        trainer.train_step()
        finals.append(weights(trainer))
    scales = [scaler.get_scale()]

    def overflow(module, inputs, output):
        if not trainer.is_world_process_zero:
            output.register_hook(lambda grad: grad * torch.inf)

    trainer.run.model.model.layers[0].mlp.up_proj.register_forward_hook(overflow)
    trainer.train_step()
    scales.append(scaler.get_scale())
    after, (plain, final) = weights(trainer), finals
    return largest_difference(plain, final), scales, largest_difference(after, final) == 0.0


def test_copies_that_differ_are_refused_before_the_first_step(world, tmp_path):
    for text in world(start_apart, 4, tmp_path):
        assert "ranks [2, 3] start with other parameters than rank 0" in text


def start_apart(out):
    from ds_trainer.engines.fsdp2.engine import FSDP2Engine

    load = FSDP2Engine.load

    def load_apart(engine, model, weights, split):
        load(engine, model, weights, split)
        if engine.mesh.grid.rank >= 2:
            local_shard(model.model.norm.weight).add_(1.0)

    FSDP2Engine.load = load_apart  # Of this process, which ends with the test.
    with pytest.raises(EngineError) as caught:
        make_trainer("fsdp2", out, batch={"micro_size": 1}, parallel={"dp_replicate": 2})
    return str(caught.value)


def test_a_group_that_was_set_up_otherwise_than_asked_is_an_error(world, tmp_path):
    for text in world(keep_what_should_be_freed, 2, tmp_path):
        assert "the config says fsdp.reshard_after_forward = True and FSDP2 set up False" in text


def keep_what_should_be_freed(out):
    from ds_trainer.engines.fsdp2.engine import FSDP2Engine

    load = FSDP2Engine.load

    def load_and_keep(engine, model, weights, split):
        load(engine, model, weights, split)
        model.set_reshard_after_forward(False)

    FSDP2Engine.load = load_and_keep  # Of this process, which ends with the test.
    with pytest.raises(EngineError) as caught:
        make_trainer("fsdp2", out)
    return str(caught.value)


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input_ids, **_):
        return {"logits": self.scale * input_ids}


def test_a_scalar_parameter_is_refused(world, tmp_path):
    for text in world(load_scalar, 2, tmp_path):
        assert text.startswith("scale is a scalar") and "(1,)" in text


def load_scalar(out):
    with pytest.raises(ConfigError) as caught:
        make_trainer("fsdp2", out, model=Scalar(), given={"compute_loss_func": lambda *_: 0})
    return str(caught.value)


class FailInForward(Callback):
    """In step 2 rank 1 ends inside of a block, while the others wait for its part of the next one."""

    def __init__(self, how):
        self.how = how

    def on_step_begin(self, trainer):
        if trainer.state.global_step == 1 and trainer.run.mesh.grid.rank == 1:
            trainer.run.model.model.layers[0].mlp.register_forward_hook(self.fail)

    def fail(self, *_):
        due()
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("boom")


def train_until_one_fails(out, how):
    make_trainer("fsdp2", out, given={"callbacks": [FailInForward(how)]}, run={"max_steps": 3, "epochs": 3}).train()


@pytest.mark.case("F8")
@pytest.mark.parametrize(("how", "code", "says"), [("raises", 1, "boom"), ("killed", -9, "ended without a word")])
def test_a_rank_that_ends_in_the_middle_of_a_gather_ends_all_in_its_name(tmp_path, how, code, says):
    ended = run_ranks(train_until_one_fails, 2, tmp_path, how, store="tcp")
    assert [end.code for end in ended] == [1, code]
    assert "rank 1, step 2, samples" in "".join(end.text for end in ended)
    assert says in "".join(end.text for end in ended)
    assert max(end.seconds for end in ended) < 15
