"""Where a sample's prompt ends, and that a user's prompt is tokenised as the training data is."""

import pytest
import torch

from ds_trainer.data.collate import pad_collate
from ds_trainer.data.encode import encode
from ds_trainer.data.loader import BatchLoader
from ds_trainer.data.prompts import Prompt, encode_prompt, first_prompts
from ds_trainer.data.sampler import GlobalBatchSampler
from ds_trainer.errors import DataError
from ds_trainer.loss import IGNORE_INDEX
from tests.helpers.tokenizers import MARKED_TEMPLATE, make_tokenizer

TWO_TURNS = {"input_ids": [3, 4, 5, 6, 7, 8], "labels": [IGNORE_INDEX, IGNORE_INDEX, 5, 6, IGNORE_INDEX, 8]}
NOTHING_LEARNED = {"input_ids": [9, 8], "labels": [IGNORE_INDEX, IGNORE_INDEX]}
CHAT = [
    {"role": "user", "content": "what is the capital of France?"},
    {"role": "assistant", "content": "Paris"},
]


def loader(rows, collate=lambda features: pad_collate(features, 0)):
    return BatchLoader(rows, GlobalBatchSampler(len(rows), 2, 2, shuffle=False), collate)


def test_a_prompt_ends_at_the_first_learned_token_and_its_answer_where_learning_pauses():
    assert first_prompts(loader([TWO_TURNS, NOTHING_LEARNED]), 8) == [
        Prompt(0, [3, 4], [5, 6]),
        Prompt(1, [9, 8], []),
    ]


def test_no_more_samples_are_taken_than_asked_for():
    assert [prompt.index for prompt in first_prompts(loader([TWO_TURNS] * 5), 3)] == [0, 1, 2]


def test_padding_belongs_to_neither_prompt_nor_answer():
    def to_eight(features):
        ids = torch.tensor([[0, 0, *f["input_ids"]] for f in features])
        labels = torch.tensor([[IGNORE_INDEX, IGNORE_INDEX, *f["labels"]] for f in features])
        return {"input_ids": ids, "attention_mask": ids != 0, "labels": labels}

    assert first_prompts(loader([TWO_TURNS], to_eight), 1) == [Prompt(0, [3, 4], [5, 6])]


def test_a_sample_that_is_learned_from_its_first_token_on_is_refused():
    with pytest.raises(DataError, match="sample 1 has no prompt"):
        first_prompts(loader([TWO_TURNS, {"input_ids": [3, 4]}]), 2)


@pytest.mark.parametrize("template", [None, MARKED_TEMPLATE])
def test_a_conversation_is_opened_by_the_tokens_that_the_training_puts_before_its_answer(template):
    tokenizer = make_tokenizer(**({} if template is None else {"chat_template": template}))
    sample = encode({"messages": CHAT}, tokenizer, None, "here")
    learned = next(i for i, label in enumerate(sample.labels) if label != IGNORE_INDEX)
    assert encode_prompt(CHAT[:1], tokenizer, "here") == sample.input_ids[:learned]


def test_a_text_is_opened_by_the_tokens_that_the_training_puts_before_its_completion():
    tokenizer = make_tokenizer()
    sample = encode({"prompt": "the cat ", "completion": "sat"}, tokenizer, None, "here")
    learned = next(i for i, label in enumerate(sample.labels) if label != IGNORE_INDEX)
    assert encode_prompt("the cat ", tokenizer, "here") == sample.input_ids[:learned]
