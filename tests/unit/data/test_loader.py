"""Padding by position, and micro-batches of a step."""

import time
from functools import partial

import datasets
import pytest
import torch

from ds_trainer.data.collate import pad_collate, padding_id
from ds_trainer.data.loader import BatchLoader
from ds_trainer.data.sampler import GlobalBatchSampler
from ds_trainer.errors import DataError
from tests.helpers.tokenizers import make_tokenizer

SAMPLES = [{"input_ids": [10 + i] * (i + 1), "labels": [-100] + [10 + i] * i} for i in range(5)]
collate = partial(pad_collate, pad_token_id=0)


def loader(dataset=SAMPLES, collate_fn=collate, *, dp_rank=0, dp_size=1, global_size=4, micro_size=2, **limits):
    sampler = GlobalBatchSampler(len(dataset), global_size, micro_size, dp_rank, dp_size, seed=0, shuffle=False)
    return BatchLoader(dataset, sampler, collate_fn, **limits)


@pytest.mark.case("J1")
def test_padding_is_masked_by_position_so_an_eos_that_is_also_pad_stays_learned():
    batch = pad_collate([{"input_ids": [1, 3, 4, 2]}, {"input_ids": [1, 2]}], pad_token_id=2)
    assert batch["input_ids"].tolist() == [[1, 3, 4, 2], [1, 2, 2, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[1, 3, 4, 2], [1, 2, -100, -100]]
    assert set(batch) == {"input_ids", "attention_mask", "labels"}


def test_padding_that_a_sample_brings_along_is_neither_seen_nor_learned():
    batch = pad_collate([{"input_ids": [1, 3, 2], "attention_mask": [1, 1, 0]}], pad_token_id=2)
    assert batch["attention_mask"].tolist() == [[1, 1, 0]]
    assert batch["labels"].tolist() == [[1, 3, -100]]


def test_the_padding_id_is_pad_else_eos_else_zero():
    assert padding_id(make_tokenizer(pad_token="<pad>")) == 0
    assert padding_id(make_tokenizer(pad_token=None)) == make_tokenizer().eos_token_id == 2
    assert padding_id(make_tokenizer(pad_token=None, eos_token=None)) == padding_id(None) == 0


def test_columns_that_the_built_in_collator_would_drop_are_refused():
    with pytest.raises(DataError, match=r"(?s)'text'.*data_collator"):
        collate([{"input_ids": [1], "text": "a"}])
    with pytest.raises(DataError, match="Tensor"):
        collate([torch.tensor([1])])


def test_ranks_share_out_a_step_and_one_without_samples_gets_a_filler_without_labels():
    full, filler = (list(loader(dp_rank=rank, dp_size=2).step(1)) for rank in range(2))
    assert len(full) == len(filler) == 1
    assert full[0]["input_ids"].tolist() == filler[0]["input_ids"].tolist() == [[14] * 5]
    assert (full[0]["labels"] != -100).sum() == 4
    assert (filler[0]["labels"] == -100).all()


class TorchDataset(torch.utils.data.Dataset):
    def __len__(self):
        return len(SAMPLES)

    def __getitem__(self, i):
        return {name: torch.tensor(values) for name, values in SAMPLES[i].items()}


@pytest.mark.parametrize(
    "dataset",
    [
        TorchDataset(),
        datasets.Dataset.from_list(SAMPLES),
        datasets.Dataset.from_list(SAMPLES).with_format("torch"),
        datasets.Dataset.from_list(SAMPLES).with_format("numpy"),
    ],
    ids=["torch", "datasets", "datasets-torch", "datasets-numpy"],
)
def test_any_map_style_data_set_gives_the_same_batches(dataset):
    for expected, batch in zip(loader().step(0), loader(dataset).step(0), strict=True):
        assert all(torch.equal(batch[name], expected[name]) for name in expected)


def test_a_data_collator_of_the_users_own_gets_the_samples_and_its_filler_is_silenced():
    def collator(features):
        assert isinstance(features, list)
        ids = torch.tensor([feature["input_ids"][0] for feature in features])[:, None]
        return {"input_ids": ids, "labels": ids.clone()}

    assert [b["labels"].tolist() for b in loader(collate_fn=collator).step(0)] == [[[10], [11]], [[12], [13]]]
    (filler,) = loader(collate_fn=collator, dp_rank=1, dp_size=2).step(1)
    assert filler["labels"].tolist() == [[-100]]


@pytest.mark.parametrize("step", [0, 1], ids=["samples", "filler"])
def test_a_batch_without_labels_is_refused(step):
    lone = loader(collate_fn=lambda features: {"pixels": torch.zeros(1)}, dp_rank=1, dp_size=2)
    with pytest.raises(DataError, match=r"returns no labels .* only \['pixels'\]"):
        next(lone.step(step))


def test_ids_beyond_the_embedding_and_sequences_beyond_the_positions_name_the_samples():
    with pytest.raises(DataError, match=r"samples \[2, 3\] have token id 13"):
        list(loader(vocab_size=13).step(0))
    with pytest.raises(DataError, match=r"samples \[2, 3\] have 4 tokens, the model has 3 positions"):
        list(loader(max_positions=3).step(0))
    assert len(list(loader(vocab_size=15, max_positions=5).step(1))) == 1


def test_the_input_wait_counts_reading_and_not_what_the_caller_does():
    class Slow(TorchDataset):
        def __getitem__(self, i):
            time.sleep(0.02)
            return super().__getitem__(i)

    slow = loader(Slow())
    for _ in slow.step(0):
        time.sleep(0.2)
    assert 0.08 <= slow.input_wait_s < 0.4
