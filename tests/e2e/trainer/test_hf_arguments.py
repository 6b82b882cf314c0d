"""The one-line switch from transformers' Trainer, under torch's own launcher."""

import pytest

from ds_trainer.metrics import read_metrics
from tests.helpers.launch import ROOT, free_port, launch


@pytest.mark.slow
def test_training_arguments_and_ds_trainer_share_one_process_group(tmp_path):
    script = ROOT / "tests" / "e2e" / "scripts" / "by_hf_arguments.py"
    done = launch(
        *("torchrun", "--nproc_per_node", "2", "--master_port", str(free_port()), script, tmp_path),
        PYTHONPATH=str(ROOT),
    )
    assert done.code == 0, done.text
    assert done.text.count("TrainingArguments.neftune_noise_alpha is dropped") == 1, "once, from rank 0"
    assert "batch: 16 samples per step = micro 8 x accumulation 1 x data ranks 2" in done.text
    assert len([line for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" in line]) == 2
