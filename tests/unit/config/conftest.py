"""What the tests of rules across keys share."""

import json
import struct
from math import prod

import pytest

from ds_trainer.planning.checkpoint_spec import read_spec


@pytest.fixture
def checkpoint(tmp_path):
    """Writes a checkpoint of which only the headers are real: its file is sparse."""

    def write(config, tensors):
        header, end = {}, 0
        for name, shape in tensors.items():
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end := end + 2 * prod(shape)]}
        text = json.dumps(header).encode()
        (tmp_path / "config.json").write_text(json.dumps(config))
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
        return read_spec(str(tmp_path))

    return write
