"""Parameter groups are described as they were built, and compared with the optimizer that runs."""

import pytest
import torch

from ds_trainer.errors import EngineError
from ds_trainer.trainer.parameter_groups import GroupFacts, check_groups, describe_groups, groups_of, rates_of

DECAYED, PLAIN = GroupFacts(1e-3, 0.1, 3, 600), GroupFacts(1e-3, 0.0, 2, 40)


@pytest.mark.case("N6")
def test_groups_are_counted_by_full_shapes():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    groups = [{"params": [model[0].weight], "weight_decay": 0.1}, {"params": [model[0].bias, *model[1].parameters()]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0)
    named = list(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in named} | {"0.weight": (4, 6)}  # Of two tensor ranks.
    built = groups_of(optimizer, named, shapes)
    assert built == [GroupFacts(1e-3, 0.1, 1, 24), GroupFacts(1e-3, 0.0, 3, 9)]
    check_groups(built, [rates_of(group) for group in optimizer.param_groups], rank=0)


@pytest.mark.case("N6")
@pytest.mark.parametrize("live", [[(1e-3, 0.1)], [(1e-3, 0.1), (1e-3, 0.1)], [(1e-3, 0.1), (2e-3, 0.0)]])
def test_an_optimizer_with_other_groups_than_asked_for_is_refused(live):
    with pytest.raises(
        EngineError, match="rank 1: the parameter groups are lr 0.001, weight decay 0.1; lr 0.001, weig"
    ):
        check_groups([DECAYED, PLAIN], live, rank=1)


@pytest.mark.case("N6")
def test_the_groups_of_pipeline_stages_are_put_together():
    text = "6 tensors of 1,200 elements, lr 0.001, weight decay 0.1; 2 tensors of 40 elements, lr 0.001, weight decay 0"
    assert describe_groups([[DECAYED, PLAIN], [DECAYED]]) == text
