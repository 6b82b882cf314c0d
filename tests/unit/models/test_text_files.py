"""Text files of a checkpoint with a byte-order mark are read as those without one."""

from codecs import BOM_UTF8
from pathlib import Path

import pytest
import torch

from ds_trainer.config.input_sections import ModelConfig
from ds_trainer.models.pretrained import build_skeleton
from ds_trainer.models.text_files import without_byte_order_marks
from ds_trainer.models.tokenizer import load_tokenizer
from ds_trainer.planning.checkpoint_spec import read_spec
from tests.helpers.checkpoints import make_checkpoint


def read(folder):
    """All that is read of a checkpoint's text files."""
    config = ModelConfig(path=str(folder))
    model, tokenizer = build_skeleton(str(folder), config, torch.float32), load_tokenizer(config, str(folder))
    ids = tokenizer("the cat sat", add_special_tokens=False)["input_ids"]
    files = (model.config.to_dict(), model.generation_config.to_dict(), read_spec(str(folder)).config)
    return *files, ids, tokenizer.chat_template, model.config.name_or_path, tokenizer.name_or_path


@pytest.mark.case("M2")
def test_a_checkpoint_reads_alike_with_and_without_byte_order_marks(tmp_path):
    folder = Path(make_checkpoint(tmp_path / "checkpoint"))
    plain = read(folder)
    marked = [path for path in folder.iterdir() if path.suffix in (".json", ".jinja")]
    for path in marked:
        path.write_bytes(BOM_UTF8 + path.read_bytes())
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= {path.name for path in marked}
    assert read(folder) == plain
    assert all(path.read_bytes().startswith(BOM_UTF8) for path in marked), "the files stay as they are"


def test_without_a_mark_the_folder_is_itself(tmp_path):
    folder = Path(make_checkpoint(tmp_path / "checkpoint"))
    with without_byte_order_marks(str(folder)) as readable:
        assert readable == str(folder)
