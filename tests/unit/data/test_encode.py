"""Which tokens of a record are learned."""

import pytest

from ds_trainer.data.encode import encode
from ds_trainer.errors import DataError
from ds_trainer.loss import IGNORE_INDEX
from tests.helpers.table import table
from tests.helpers.tokenizers import MARKED_TEMPLATE, make_tokenizer

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"


def turns(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def learned(record, tokenizer, template=None):
    """Runs of learned tokens, decoded, each run ended by a token that is not learned."""
    sample = encode(record, tokenizer, template, "here")
    runs, run = [], []
    for label in [*sample.labels, IGNORE_INDEX]:
        if label != IGNORE_INDEX:
            run.append(label)
        elif run:
            runs.append(tokenizer.decode(run))
            run = []
    return runs


def test_text_is_learned_whole_and_ends_in_eos():
    tokenizer = make_tokenizer()
    sample = encode({"text": "the cat"}, tokenizer, None, "here")
    assert sample.labels == sample.input_ids
    assert tokenizer.decode(sample.input_ids) == "<s>the cat</s>"


def test_a_text_that_ends_in_eos_already_gets_no_second_one():
    tokenizer = make_tokenizer()
    assert encode({"text": "the cat</s>"}, tokenizer, None, "here") == encode(
        {"text": "the cat"}, tokenizer, None, "here"
    )


def test_a_tokenizer_without_eos_appends_nothing():
    tokenizer = make_tokenizer(eos_token=None)
    assert tokenizer.decode(encode({"text": "the cat"}, tokenizer, None, "here").input_ids) == "<s>the cat"


def test_the_completion_and_eos_are_learned_and_the_prompt_is_not():
    tokenizer = make_tokenizer()
    assert learned({"prompt": "what is it?", "completion": " hello world"}, tokenizer) == [" hello world</s>"]


@pytest.mark.parametrize(("prompt", "completion"), [("foo(", ")"), ("hello w", "orld"), ("say ", "yes")])
def test_no_token_holds_text_of_both_prompt_and_completion(prompt, completion):
    tokenizer = make_tokenizer()
    sample = encode({"prompt": prompt, "completion": completion}, tokenizer, None, "here")
    head = tokenizer(prompt)["input_ids"]
    joined = tokenizer(prompt + completion)["input_ids"]
    assert joined[: len(head)] != head, "the test needs a merge across the boundary"
    assert sample.input_ids[: len(head)] == head
    assert learned({"prompt": prompt, "completion": completion}, tokenizer) == [completion + "</s>"]


@pytest.mark.case("J2")
@table("template", [None, MARKED_TEMPLATE], ids=["unmarked", "marked"])
@table(
    ("conversation", "expected"),
    [
        (turns((USER, "no"), (ASSISTANT, "yes")), ["yes<|end|>"]),
        (turns((USER, "no"), (ASSISTANT, "yes"), (USER, "no"), (ASSISTANT, "yes")), ["yes<|end|>", "yes<|end|>"]),
        (turns((USER, "yes"), (ASSISTANT, "yes")), ["yes<|end|>"]),
        (turns((USER, "no"), (ASSISTANT, "")), ["<|end|>"]),
        (turns((SYSTEM, "yes"), (USER, "yes"), (ASSISTANT, "yes no")), ["yes no<|end|>"]),
        (turns((ASSISTANT, "yes"), (USER, "no"), (ASSISTANT, "no")), ["yes<|end|>", "no<|end|>"]),
        (
            turns(
                (USER, "no"),
            ),
            [],
        ),
    ],
    ids=["one", "identical", "in-user-turn", "empty-answer", "system", "assistant-first", "no-assistant"],
)
def test_assistant_turns_are_learned_by_position_with_their_end_of_turn(conversation, expected, template):
    assert learned({"messages": conversation}, make_tokenizer(), template) == expected


@pytest.mark.parametrize("template", [None, MARKED_TEMPLATE], ids=["unmarked", "marked"])
def test_a_conversational_completion_is_learned_and_assistant_turns_of_the_prompt_are_not(template):
    prompt = turns((USER, "no"), (ASSISTANT, "yes"), (USER, "no"))
    record = {"prompt": prompt, "completion": turns((ASSISTANT, "hello"))}
    assert learned(record, make_tokenizer(), template) == ["hello<|end|>"]


def test_a_template_that_rewrites_earlier_turns_is_refused():
    rewriting = (
        "{% for m in messages %}<|start|>{{ m['role'] }} {% if loop.last or m['role'] == 'user' %}{{ m['content'] }}"
        "{% else %}gone{% endif %}<|end|>{% endfor %}"
    )
    conversation = turns((USER, "no"), (ASSISTANT, "yes"), (USER, "no"), (ASSISTANT, "yes"))
    with pytest.raises(DataError, match=r"(?s)here: the chat template renders the first 2 of 4.*data\.chat_template"):
        encode({"messages": conversation}, make_tokenizer(), rewriting, "here")


def test_a_template_that_refuses_the_conversation_is_quoted():
    with pytest.raises(DataError, match="here: the chat template fails on the conversation: user first"):
        encode({"messages": turns((ASSISTANT, "yes"))}, make_tokenizer(), "{{ raise_exception('user first') }}", "here")


def test_messages_without_a_chat_template_name_the_key():
    with pytest.raises(DataError, match=r"(?s)no chat template.*data\.chat_template"):
        encode({"messages": turns((USER, "no"))}, make_tokenizer(chat_template=None), None, "here")


def test_token_ids_are_taken_as_they_are_less_their_padding():
    record = {"input_ids": [9, 8, 2, 2], "labels": [-100, 8, 2, -100], "attention_mask": [1, 1, 1, 0]}
    sample = encode(record, make_tokenizer(), None, "here")
    assert (sample.input_ids, sample.labels) == ([9, 8, 2], [-100, 8, 2])
    sample = encode({"input_ids": [9, 8], "labels": None}, make_tokenizer(), None, "here")
    assert sample.labels == [9, 8]


@pytest.mark.parametrize(
    "record", [{"text": ""}, {"messages": []}, {"prompt": "", "completion": ""}, {"input_ids": []}], ids=str
)
def test_a_record_without_content_becomes_no_tokens(record):
    assert encode(record, make_tokenizer(), None, "here").input_ids == []


@table(
    ("record", "found"),
    [
        ({"question": "a"}, "the record has the keys ['question']"),
        ({"text": 3}, "text is an int"),
        ("text", "the record is a str"),
        ({"prompt": "a"}, "the record has the keys ['prompt']"),
        ({"prompt": "a", "completion": []}, "prompt is a str, completion a list"),
        ({"messages": "hello"}, "messages is a str"),
        ({"messages": ["hello"]}, "message 0 is a str"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]},
            "'content' of message 1 is a NoneType",
        ),
        ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids, 1 labels, 2 attention_mask"),
        ({"input_ids": [1, 2], "labels": []}, "2 input_ids, 0 labels, 2 attention_mask"),
        ({"input_ids": [[1], [2]]}, "no flat list of ints"),
        ({"input_ids": [1.5]}, "no flat list of ints"),
    ],
    ids=str,
)
def test_a_record_of_the_wrong_shape_says_where_and_what_was_found(record, found):
    with pytest.raises(DataError) as caught:
        encode(record, make_tokenizer(), None, "a.jsonl:7")
    assert caught.value.found.startswith("a.jsonl:7: ")
    assert found in caught.value.found
