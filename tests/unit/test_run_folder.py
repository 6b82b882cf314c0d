"""One run at a time in an output folder, and nothing of an earlier run's metrics lost."""

import pytest

from ds_trainer.errors import MachineError
from ds_trainer.run_folder import claimed, set_aside_earlier_run


def test_a_second_run_in_a_folder_that_is_in_use_is_refused(tmp_path):
    with claimed(tmp_path):
        with pytest.raises(MachineError, match="another run is writing") as caught, claimed(tmp_path):
            pass
        assert "run.output_dir" in caught.value.change
    with claimed(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_metrics_of_every_earlier_run_are_kept(tmp_path):
    for run in ("first", "second", "third"):
        set_aside_earlier_run(tmp_path)
        (tmp_path / "metrics.jsonl").write_text(run)
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert texts == {"metrics.1.jsonl": "first", "metrics.2.jsonl": "second", "metrics.jsonl": "third"}


def test_what_one_run_left_is_kept_under_one_number(tmp_path):
    for run, files in (("first", ["metrics"]), ("second", ["metrics", "generations"]), ("third", [])):
        set_aside_earlier_run(tmp_path)
        for name in files:
            (tmp_path / f"{name}.jsonl").write_text(run)
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert texts == {"metrics.1.jsonl": "first", "metrics.2.jsonl": "second", "generations.2.jsonl": "second"}
