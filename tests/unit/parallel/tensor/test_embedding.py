"""An embedding cut by tokens is the whole one, of whichever class it is."""

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from ds_trainer.layout import TensorSharding
from ds_trainer.parallel.tensor.embedding import make_vocab_parallel
from tests.helpers.threads import Communication, fill, local_part, on_threads

H = 6
IDS = torch.tensor([[0, 3, 5, 5], [1, 4, 0, 2]])


def scaled(num, padding_idx=None):
    return Gemma3TextScaledWordEmbedding(num, H, padding_idx, embed_scale=3.0)


def plain(num, padding_idx=None):
    return nn.Embedding(num, H, padding_idx)


def parallel_on_rank(group, make, dense, padding_idx, ids, grad):
    module = make(dense.num_embeddings, padding_idx)
    sharding = TensorSharding.padded(tuple(dense.weight.shape), group.size())
    make_vocab_parallel(module, sharding, group)
    fill(module, dense, weight=sharding)
    y = module(ids)
    y.backward(grad)
    return y.detach(), module.weight.grad, isinstance(module, type(dense)), module.padding_idx


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("padding_idx", [None, 0, 5])
@pytest.mark.parametrize(("make", "num"), [(plain, 6), (plain, 7), (scaled, 7)], ids=["even", "odd", "scaled"])
@pytest.mark.case("I6")
def test_an_embedding_is_its_rows_and_all_ranks_get_the_sum(make, num, padding_idx, size, monkeypatch):
    dense, communication = make(num, padding_idx), Communication(monkeypatch)
    grad = torch.randn(*IDS.shape, H)
    y = dense(IDS)
    y.backward(grad)
    sharding = TensorSharding.padded((num, H), size)
    for rank, (got, of_weight, keeps_class, padding) in enumerate(
        on_threads(parallel_on_rank, size, make, dense, padding_idx, IDS, grad)
    ):
        torch.testing.assert_close(got, y.detach())
        torch.testing.assert_close(of_weight, local_part(dense.weight.grad, sharding, rank))
        assert keeps_class
        owns = padding_idx is not None and padding_idx // sharding.length == rank
        assert padding == (padding_idx % sharding.length if owns else None)
    assert communication.since_last() == [("all-reduce", y.nbytes)], "forward only"


@pytest.mark.parametrize("token", [-1, 8])
def test_a_token_that_the_embedding_lacks_is_an_error_and_not_a_zero(token):
    dense = plain(8)
    with pytest.raises(IndexError):
        on_threads(parallel_on_rank, 2, plain, dense, None, torch.tensor([[0, token]]), torch.ones(1, 2, H))


def test_whatever_other_ranks_rows_hold_stays_out_of_the_sum():
    dense = plain(8)
    dense.weight.data[0], dense.weight.data[4] = torch.nan, torch.inf
    ids = torch.tensor([[1, 5]])
    for y, *_ in on_threads(parallel_on_rank, 2, plain, dense, None, ids, torch.ones(1, 2, H)):
        torch.testing.assert_close(y, dense.weight[ids].detach())
