"""Tokenised once, counted, checked."""

import json
import os

import datasets
import pytest

import ds_trainer.data.prepare as prepare_module
from ds_trainer.config.input_sections import DataConfig
from ds_trainer.data.prepare import prepare, read_chat_template
from ds_trainer.data.tokenized import ROWS_PER_BATCH, preview
from ds_trainer.errors import DataError, MachineError
from ds_trainer.launch import signals
from tests.helpers.tokenizers import MARKED_TEMPLATE, make_tokenizer

SHORT = {"prompt": "no", "completion": " yes"}  # <s> no yes </s>
LONG_PROMPT = {"prompt": "no " * 20, "completion": " yes"}


@pytest.fixture
def run(tmp_path):
    """Prepares with a cache of the test's own."""

    def run(source, tokenizer=None, *, max_positions=None, vocab_size=None, **keys):
        config = DataConfig(cache_dir=str(tmp_path / "cache"), **keys)
        tokenizer = tokenizer or make_tokenizer()
        return prepare(source, tokenizer, config, max_positions=max_positions, vocab_size=vocab_size)

    return run


@pytest.fixture
def encoded(monkeypatch):
    """The origins of all records that are tokenised from here on."""
    origins = []

    def spy(record, tokenizer, template, origin):
        origins.append(origin)
        return encode(record, tokenizer, template, origin)

    encode = prepare_module.encode
    monkeypatch.setattr(prepare_module, "encode", spy)
    return origins


def test_samples_come_back_as_they_were_tokenised(run):
    tokenizer = make_tokenizer()
    words = [f"cat {i}" for i in range(ROWS_PER_BATCH + 3)]
    dataset = run([{"text": word} for word in words], tokenizer)
    assert len(dataset) == len(words)
    for i in (0, 1, ROWS_PER_BATCH - 1, ROWS_PER_BATCH, ROWS_PER_BATCH + 2):
        sample = dataset[i]
        assert tokenizer.decode(sample["input_ids"]) == f"<s>{words[i]}</s>"
        assert sample["labels"] == sample["input_ids"]
    with pytest.raises(IndexError):
        dataset[len(words)]


def test_the_same_data_is_tokenised_once_and_any_change_tokenises_anew(run, encoded, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(SHORT))
    marked = tmp_path / "chat.jinja"
    marked.write_text(MARKED_TEMPLATE)

    def again(**keys):
        encoded.clear()
        dataset = run(str(file), keys.pop("tokenizer", None), **keys)
        return dataset, len(encoded)

    first, count = again()
    assert count == 1
    second, count = again()
    assert count == 0
    assert second[0] == first[0] and second.stats == first.stats
    assert again(max_length=8)[1] == 1
    assert again(chat_template=str(marked))[1] == 1
    assert again(tokenizer=make_tokenizer(vocab_size=290))[1] == 1
    file.write_text(json.dumps(SHORT | {"completion": " no"}))
    assert again()[1] == 1


def test_a_tokenizer_used_with_padding_in_between_is_still_the_same(run, encoded):
    tokenizer = make_tokenizer()
    run([SHORT], tokenizer)
    tokenizer(["a", "a b"], padding=True, truncation=True, max_length=4)
    run([SHORT], tokenizer)
    assert len(encoded) == 1


def test_datasets_objects_are_cached_by_their_content(run, encoded):
    for _ in range(2):
        run(datasets.Dataset.from_list([SHORT]))
    assert len(encoded) == 1


@pytest.mark.case("J5")
def test_truncated_and_emptied_samples_are_counted_and_kept(run):
    stats = run([SHORT] * 7 + [LONG_PROMPT] * 3, max_length=10).stats
    assert (stats.samples, stats.truncated, stats.emptied, stats.unsupervised, stats.affected) == (10, 3, 3, 3, 3)
    assert stats.eos_supervised == 7


@pytest.mark.case("J5")
def test_too_long_samples_are_dropped_or_refused_when_asked(run, tmp_path):
    stats = run([SHORT] * 7 + [LONG_PROMPT] * 3, max_length=10, on_too_long="drop").stats
    assert (stats.samples, stats.dropped, stats.truncated, stats.affected) == (7, 3, 0, 3)
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(SHORT) + "\n" + json.dumps(LONG_PROMPT))
    with pytest.raises(DataError, match=r"(?s)a\.jsonl:2 has \d+ tokens.*at most 10.*data\.on_too_long"):
        run(str(file), max_length=10, on_too_long="error")


@pytest.mark.case("J5")
def test_too_many_affected_samples_are_an_error(run):
    records = [SHORT] * 7 + [LONG_PROMPT] * 3
    with pytest.raises(DataError, match=r"(?s)3 of 10 records.*max_affected_fraction = 0\.2"):
        run(records, max_length=10, max_affected_fraction=0.2)
    assert len(run(records, max_length=10, max_affected_fraction=0.3)) == 10


def test_a_record_without_a_label_token_that_was_also_cut_counts_once(run):
    unsupervised = {"input_ids": [5] * 12, "labels": [-100] * 12}
    stats = run([SHORT, SHORT, unsupervised, {"text": ""}], max_length=10).stats
    assert (stats.truncated, stats.unsupervised, stats.empty, stats.affected, stats.samples) == (1, 1, 1, 2, 3)


@pytest.mark.case("B5")
@pytest.mark.parametrize(
    ("records", "keys", "reason"),
    [
        ([LONG_PROMPT] * 4, {"max_length": 10}, "4 were truncated and 0 dropped at 10 tokens"),
        ([LONG_PROMPT] * 4, {"max_length": 10, "on_too_long": "drop"}, "0 were truncated and 4 dropped at 10 tokens"),
        ([{"messages": [{"role": "user", "content": "no"}]}] * 4, {}, "no turn is the assistant's"),
        ([{"input_ids": [5, 2], "labels": [-100, -100]}] * 4, {}, "the labels are all -100"),
        ([{"text": ""}] * 4, {}, "all of them are empty"),
    ],
)
def test_nothing_to_learn_is_an_error_with_the_likely_reason(run, records, keys, reason):
    with pytest.raises(DataError, match="0 of 4 samples have supervised tokens") as caught:
        run(records, max_affected_fraction=1.0, **keys)
    assert reason in caught.value.found


def test_a_label_on_the_first_token_does_not_count_for_no_token_predicts_it(run):
    with pytest.raises(DataError, match="0 of 1 samples"):
        run([{"input_ids": [5, 6], "labels": [5, -100]}], max_affected_fraction=1.0)
    assert run([{"input_ids": [5, 6, 7]}]).stats.label_tokens == 2


def test_token_ids_need_no_tokenizer_and_text_does(run, tmp_path):
    config = DataConfig(cache_dir=str(tmp_path / "cache"))
    dataset = prepare([{"input_ids": [5, 6]}], None, config, max_positions=None, vocab_size=None)
    assert dataset[0] == {"input_ids": [5, 6], "labels": [5, 6]}
    assert preview(dataset, None, 1).splitlines()[1:] == ["  ⟦[5, 6]⟧", "eos supervised in 0 of 1 samples"]
    with pytest.raises(DataError, match=r"(?s)train sample 0: .*'text'.*model\.tokenizer"):
        prepare([{"text": "a"}], None, config, max_positions=None, vocab_size=None)


def test_an_empty_data_set_is_refused(run, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    for source in (str(tmp_path / "a.jsonl"), []):
        with pytest.raises(DataError, match="no records"):
            run(source)


def test_ids_beyond_the_embedding_name_the_record(run):
    with pytest.raises(DataError, match=r"(?s)train sample 1: token id 300.*300 rows.*resize_embeddings"):
        run([{"input_ids": [5, 299]}, {"input_ids": [5, 300]}], vocab_size=300)
    with pytest.raises(DataError, match="token id 400"):
        run([{"input_ids": [5, 6], "labels": [5, 400]}], vocab_size=300)
    with pytest.raises(DataError, match="token id -1"):
        run([{"input_ids": [5, -1]}])


def test_the_longest_sample_follows_the_config_then_the_model_and_the_tokenizer(run):
    text = [{"text": "cat " * 40}]
    lengths = [
        len(run(text, max_affected_fraction=1.0, max_positions=positions, max_length=length)[0]["input_ids"])
        for positions, length in [(20, None), (20, 10), (2048, None)]
    ]
    assert lengths[:2] == [20, 10]
    assert lengths[2] > 20
    shorter = make_tokenizer(model_max_length=15)
    assert len(run(text, shorter, max_affected_fraction=1.0, max_positions=20)[0]["input_ids"]) == 15


def test_a_length_beyond_the_models_positions_is_refused(run):
    with pytest.raises(DataError, match=r"data\.max_length is 30, the model has 20 positions"):
        run([SHORT], max_positions=20, max_length=30)


@pytest.mark.case("M2")
def test_a_byte_order_mark_is_no_part_of_a_chat_template(tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ messages }}", encoding="utf-8-sig")
    assert read_chat_template(str(tmp_path / "chat.jinja")) == "{{ messages }}"


def test_a_chat_template_from_a_file_replaces_the_tokenizers(run, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    tokenizer = make_tokenizer(chat_template=None)
    chat = [{"messages": [{"role": "user", "content": "no"}, {"role": "assistant", "content": "yes"}]}]
    assert tokenizer.decode(run(chat, tokenizer, chat_template=str(template))[0]["input_ids"]) == "[no][yes]"
    with pytest.raises(DataError, match=r"data\.chat_template: .*none\.jinja"):
        run(chat, tokenizer, chat_template=str(tmp_path / "none.jinja"))


@pytest.mark.case("J1")
def test_eos_stays_learned_where_it_doubles_as_pad_and_the_preview_says_in_how_many_samples(run):
    tokenizer = make_tokenizer(pad_token="</s>")
    dataset = run([SHORT, {"input_ids": [5, 6]}], tokenizer)
    assert dataset[0]["labels"][-1] == tokenizer.eos_token_id == tokenizer.pad_token_id
    assert preview(dataset, tokenizer, 0) == "eos supervised in 1 of 2 samples"


@pytest.mark.case("J2")
def test_the_preview_marks_what_is_learned(run):
    chat = {"messages": [{"role": "user", "content": "yes"}, {"role": "assistant", "content": "yes"}]}
    tokenizer = make_tokenizer()
    text = preview(run([SHORT, chat, SHORT], tokenizer), tokenizer, 2)
    assert "\n  <s>no⟦ yes</s>⟧\n" in text
    assert "\n  <|start|>assistant\n  ⟦yes<|end|>⟧\n" in text
    assert text.count("sample ") == 2


def test_a_cache_that_cannot_be_written_names_the_key(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MachineError, match=r"data\.cache_dir"):
        prepare(
            [SHORT],
            make_tokenizer(),
            DataConfig(cache_dir=str(tmp_path / "file")),
            max_positions=None,
            vocab_size=None,
        )


def test_a_negative_token_id_is_a_fault_of_the_record_and_not_of_the_embedding(run):
    with pytest.raises(DataError, match=r"token id -6") as caught:
        run([{"input_ids": [5, -6]}], vocab_size=10)
    assert "fix the record" in caught.value.change and "resize_embeddings" not in caught.value.change


def test_a_data_set_without_records_is_named_by_its_files(run, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("")
    with pytest.raises(DataError) as caught:
        run(str(file))
    assert caught.value.found == f"data.train ({file}) has no records" and str(file) in caught.value.change


@pytest.mark.parametrize("name", ["data.arrow", "stats.json"])
def test_a_cache_with_a_cut_file_is_tokenised_anew(run, encoded, tmp_path, capfd, name):
    records = [SHORT] * 3
    first = run(records)
    rows = [first[i] for i in range(3)]
    (path,) = (tmp_path / "cache").glob(f"*/{name}")
    os.truncate(path, path.stat().st_size // 2)
    encoded.clear()
    second = run(records)
    assert len(encoded) == 3
    assert [second[i] for i in range(3)] == rows
    assert second.stats == first.stats
    assert f"{path} has" in capfd.readouterr().err


@pytest.mark.case("F10")
def test_a_stop_that_is_asked_for_while_tokenising_ends_it_soon(run, encoded, tmp_path, monkeypatch):
    monkeypatch.setattr("ds_trainer.data.build_once.POLL_S", 0.0)
    monkeypatch.setattr(signals, "pending", lambda: len(encoded) >= 5)
    with pytest.raises(signals.StopRequested):
        run([SHORT] * 1000)
    assert len(encoded) == 5
    assert not any(path.is_dir() for path in (tmp_path / "cache").iterdir())
