"""Parameter groups, optimizer classes and the learning rate by step."""

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from ds_trainer.config.resolved import Machine, ResolvedConfig
from ds_trainer.config.schema import RunConfig
from ds_trainer.config.training_sections import OptimizerConfig, ScheduleConfig
from ds_trainer.errors import ConfigError
from ds_trainer.optim import build_optimizer, hand_over, lr_factor, make_optimizer, parameter_groups, warmup_steps


@pytest.fixture
def named():
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    return list(model.named_parameters())


def shapes(named):
    return {name: p.shape for name, p in named}


def resolved(implementation="torch", **optimizer):
    config = RunConfig(optimizer=OptimizerConfig(**optimizer))
    return ResolvedConfig(config, Machine(), dp_size=1, optimizer_implementation=implementation)


def test_norms_and_biases_do_not_decay(named):
    decayed, plain = parameter_groups(named, shapes(named), OptimizerConfig(weight_decay=0.1))
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert decayed["params"] == [dict(named)["0.weight"]]
    assert [id(p) for p in plain["params"]] == [id(p) for name, p in named if name != "0.weight"]


def test_everything_decays_where_it_is_asked_for(named):
    (group,) = parameter_groups(named, shapes(named), OptimizerConfig(weight_decay=0.1, decay_norms_and_biases=True))
    assert len(group["params"]) == 4 and group["weight_decay"] == 0.1


def test_groups_follow_the_full_shape_where_an_engine_has_left_an_empty_shard(named):
    full = shapes(named)
    for _, parameter in named:
        parameter.data = torch.empty(0)
    decayed, _ = parameter_groups(named, full, OptimizerConfig())
    assert decayed["params"] == [dict(named)["0.weight"]]


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion", "adafactor"])
def test_the_optimizer_has_the_values_of_its_section(named, name):
    options = {"betas": (0.8, 0.95)} if name in ("adamw", "adam", "lion") else {}
    options |= {"eps": 1e-4} if name in ("adamw", "adam") else {}
    options |= {"momentum": 0.7} if name == "sgd" else {}
    groups = parameter_groups(named, shapes(named), OptimizerConfig(weight_decay=0.3))
    optimizer = build_optimizer(groups, resolved(name=name, lr=0.25, **options))
    assert type(optimizer).__name__.lower() == name
    for group, decay in zip(optimizer.param_groups, (0.3, 0.0), strict=True):
        assert (group["lr"], group["weight_decay"]) == (0.25, decay)
        assert {key: group[key] for key in options} == options


def test_a_fused_optimizer_is_one_kernel(named):
    optimizer = build_optimizer(
        parameter_groups(named, shapes(named), OptimizerConfig()), resolved("torch_fused", name="adamw")
    )
    assert optimizer.param_groups[0]["fused"] is True


def test_an_optimizer_of_the_users_is_taken_only_if_it_updates_exactly_the_models_parameters(named):
    parameters = [p for _, p in named]
    theirs = torch.optim.SGD(parameters, lr=0.1)
    assert make_optimizer(named, shapes(named), resolved(), theirs) is theirs
    with pytest.raises(ConfigError, match="leaves out 1 trainable ones: 1.bias"):
        make_optimizer(named, shapes(named), resolved(), torch.optim.SGD(parameters[:-1], lr=0.1))
    with pytest.raises(ConfigError, match="updates 1 tensors that are not parameters of the model"):
        make_optimizer(
            named, shapes(named), resolved(), torch.optim.SGD([*parameters, nn.Parameter(torch.ones(1))], lr=0.1)
        )


def test_an_optimizer_of_the_users_follows_parameters_that_an_engine_has_replaced(named):
    before, after = dict(named), {name: nn.Parameter(p.detach().clone()) for name, p in named}
    theirs = torch.optim.SGD([{"params": [p], "lr": i} for i, p in enumerate(before.values())])
    hand_over(theirs, before, after)
    assert [id(group["params"][0]) for group in theirs.param_groups] == [id(p) for p in after.values()]
    assert make_optimizer(list(after.items()), shapes(named), resolved(), theirs) is theirs
    assert [group["lr"] for group in theirs.param_groups] == list(range(len(named)))


def test_an_optimizer_of_the_users_that_has_taken_a_step_cannot_follow(named):
    before = dict(named)
    theirs = torch.optim.AdamW(before.values())
    for parameter in before.values():
        parameter.grad = torch.ones_like(parameter)
    theirs.step()
    hand_over(theirs, before, before)
    with pytest.raises(ConfigError, match="has states already"):
        hand_over(theirs, before, {name: nn.Parameter(p.detach()) for name, p in named})


@pytest.mark.parametrize(
    ("name", "theirs"), [("linear", "linear"), ("cosine", "cosine"), ("constant", "constant_with_warmup")]
)
@pytest.mark.parametrize("warmup", [0, 3])
def test_schedules_are_transformers_own(name, theirs, warmup):
    total = 10
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = get_scheduler(theirs, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    config = ScheduleConfig(name=name, warmup_steps=warmup)
    for step in range(total + 1):
        assert lr_factor(config, step, total) == pytest.approx(optimizer.param_groups[0]["lr"]), step
        optimizer.step()
        scheduler.step()


def test_wsd_warms_up_stays_and_decays():
    config = ScheduleConfig(name="wsd", warmup_steps=2, decay_ratio=0.4, min_lr_ratio=0.1)
    factors = [lr_factor(config, step, 10) for step in range(11)]
    assert factors == pytest.approx([0, 0.5, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325, 0.1])


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
def test_every_schedule_ends_at_its_floor_and_stays_there(name):
    config = ScheduleConfig(name=name, min_lr_ratio=0.25)
    assert lr_factor(config, 7, 7) == lr_factor(config, 9, 7) == pytest.approx(0.25)


def test_a_warm_up_that_fills_the_run_never_divides_by_zero():
    config = ScheduleConfig(name="linear", warmup_steps=4)
    assert [lr_factor(config, step, 4) for step in range(5)] == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])


def test_a_warm_up_ratio_is_rounded_up():
    assert warmup_steps(ScheduleConfig(warmup_ratio=0.03), 100) == 3
    assert warmup_steps(ScheduleConfig(warmup_ratio=0.03), 101) == 4
    assert warmup_steps(ScheduleConfig(), 100) == 0
