"""What a config names has to be there: models, data files, templates, trackers."""

import json

import pytest

from ds_trainer.config import path_rules
from ds_trainer.config.io import load_config
from ds_trainer.config.path_rules import check_files, missing_trackers, unknown_hub_ids
from ds_trainer.config.training_sections import LoggingConfig
from tests.helpers.table import table

CHAT = {"messages": [{"role": "user", "content": "no"}, {"role": "assistant", "content": "yes"}]}


@pytest.fixture
def found(tmp_path, monkeypatch):
    """The error that `config check` has about a config; None: nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))

    def found(**sections):
        errors = check_files(load_config(sections)[0])
        assert len(errors) < 2, errors
        return errors[0] if errors else None

    return found


def write(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


@pytest.mark.case("N14")
@pytest.mark.parametrize("path", ["llama", "./llama", "outputs/mine/model", "a--b/c", "a/b..c", "model.json"])
def test_what_is_neither_a_folder_nor_a_hub_id_is_refused(found, tmp_path, path):
    (tmp_path / "model.json").touch()
    error = found(model={"path": path})
    what = "it is a file" if path == "model.json" else f"there is no folder {tmp_path}/"
    assert error.found.startswith(f"model.path is {path}: {what}")
    assert "a hub id, owner/name" in error.rule


@pytest.mark.parametrize(
    "path", ["owner/name", "gpt2", "distilgpt2", "bert-base-uncased", "t5-small", "folder", "kept"]
)
def test_a_folder_and_a_hub_id_are_accepted(found, tmp_path, path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "hub" / "models--kept").mkdir(parents=True)
    assert found(model={"path": path}) is None


@pytest.mark.case("N14")
def test_a_hub_id_without_a_copy_here_is_said_to_be_one(found, tmp_path):
    (tmp_path / "hub" / "models--owner--kept").mkdir(parents=True)
    said = [list(unknown_hub_ids(load_config({"model": {"path": f"owner/{name}"}})[0])) for name in ("name", "kept")]
    assert said == [
        ["model.path is owner/name: no folder here, and no copy in the cache; the run will look for it on the hub"],
        [],
    ]


@pytest.mark.case("N14")
@table(
    ("files", "sections", "is_refused"),
    {
        "no template": ({}, {}, True),
        "a template of the run's own": ({"own.jinja": ""}, {"data": {"chat_template": "own.jinja"}}, False),
        "a template beside the tokenizer": ({"model/chat_template.jinja": ""}, {}, False),
        "a template in its settings": ({"model/tokenizer_config.json": '{"chat_template": "x"}'}, {}, False),
        "a tokenizer of its own code": ({}, {"model": {"trust_remote_code": True}}, False),
        "another tokenizer": ({"other/tokenizer_config.json": "{}"}, {"model": {"tokenizer": "other"}}, True),
    }.values(),
)
def test_conversations_need_a_template(found, tmp_path, files, sections, is_refused):
    write(tmp_path / "train.jsonl", CHAT)
    for name, text in {"model/tokenizer_config.json": "{}", **files}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    model, data = {"path": "model"} | sections.get("model", {}), {"train": "train.jsonl"} | sections.get("data", {})
    error = found(model=model, data=data)
    assert (error is not None) == is_refused
    if error:
        folder = model.get("tokenizer", "model")
        assert (
            error.found
            == f"data.train: train.jsonl holds conversations, and the tokenizer in {folder} has no chat template"
        )
        assert "set data.chat_template" in error.change


def test_text_needs_no_template(found, tmp_path):
    write(tmp_path / "train.jsonl", {"messages": None, "text": "yes"})
    write(tmp_path / "model" / "tokenizer_config.json", {})
    assert found(model={"path": "model"}, data={"train": "train.jsonl"}) is None


@pytest.mark.case("M3")
def test_a_folder_of_data_says_what_is_in_it(found, tmp_path):
    for name in ("b.jsonl", "a.JSONL", "notes.txt"):
        write(tmp_path / "data" / name, {"text": "yes"})
    error = found(data={"train": "data"})
    assert error.found == "data.train: data is a folder with data/a.JSONL, data/b.jsonl"
    assert error.change == 'set data.train to ["data/a.JSONL", "data/b.jsonl"]'
    (tmp_path / "empty").mkdir()
    assert found(data={"train": "empty"}).found == "data.train: empty is a folder without data files"
    assert found(data={"train": "data/a.JSONL"}) is None
    assert found(data={"train": "data/notes.txt"}).rule == "data files are .jsonl, .json, .parquet"


@pytest.mark.case("N14")
def test_a_tracker_that_is_not_installed_is_named_with_its_install(found, monkeypatch):
    monkeypatch.setattr(path_rules, "find_spec", lambda name: None if name == "wandb" else object())
    assert list(missing_trackers(LoggingConfig(report_to=("tensorboard", "mlflow")))) == []
    error = found(logging={"report_to": ["tensorboard", "wandb"]})
    assert error.found == "logging.report_to names wandb, not installed here" and "pip install wandb" in error.change
