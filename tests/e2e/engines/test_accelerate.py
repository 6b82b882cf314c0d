"""`accelerate launch` starts the accelerate engine, from command line and from the file that a run is translated to."""

import pytest
import yaml

from ds_trainer.config.accelerate.arguments import to_accelerate_yaml
from ds_trainer.config.io import load_config
from ds_trainer.config.resolve import resolve
from ds_trainer.config.resolved import Machine
from ds_trainer.metrics import read_metrics
from tests.helpers.launch import free_port, launch, run_folder, write_json

pytestmark = pytest.mark.slow


def accelerate_launch(*arguments):
    return launch("accelerate", "launch", "--main_process_port", str(free_port()), *arguments)


def config_of(folder, out, engine, **sections):
    config = run_folder(folder) | {"parallel": engine}
    config["run"]["output_dir"] = str(out)
    config["checkpoint"] = {"export": False}
    return {key: value for key, value in (config | sections).items() if value is not None}


def losses(out):
    return [line["loss"] for line in read_metrics(out / "metrics.jsonl")]


@pytest.mark.case("A7")
def test_ddp_and_zero3_through_accelerate_take_the_same_steps_under_accelerate_launch(tmp_path):
    through = {"engine": "accelerate"}
    ddp = config_of(
        tmp_path,
        tmp_path / "ddp",
        through,
        accelerate={"backend": "ddp"},
        zero=None,
        logging={"report_to": ["tensorboard"]},
    )
    launched = accelerate_launch(
        "--multi_gpu", "--num_processes", "2", "-m", "ds_trainer", "train", write_json(tmp_path / "ddp.json", ddp)
    )
    assert launched.code == 0, launched.text
    assert launched.text.count("DistributedDataParallel through accelerate, 2 data rank(s)") == 1
    assert list((tmp_path / "ddp").glob("tensorboard/**/events*")), "accelerate's trackers work beside its engine"

    zero3 = config_of(tmp_path, tmp_path / "zero3", through, zero={"stage": 3})
    file = tmp_path / "accelerate.yaml"
    file.write_text(yaml.safe_dump(to_accelerate_yaml(resolve(*load_config(zero3), Machine(2)))))
    launched = accelerate_launch(
        "--config_file", file, "-m", "ds_trainer", "train", write_json(tmp_path / "zero3.json", zero3)
    )
    assert launched.code == 0, launched.text
    assert launched.text.count("DeepSpeedEngine through accelerate, ZeRO stage 3, 2 data rank(s)") == 1
    assert len(losses(tmp_path / "ddp")) == 3
    assert losses(tmp_path / "zero3") == pytest.approx(losses(tmp_path / "ddp"), rel=1e-5)


@pytest.mark.case("A7")
def test_an_fsdp_file_that_says_something_else_stops_the_run(tmp_path):
    config = config_of(tmp_path, tmp_path / "out", {"engine": "fsdp2"}, zero=None)
    content = to_accelerate_yaml(resolve(*load_config(config), Machine(2)))
    content["fsdp_config"] |= {"fsdp_reshard_after_forward": False, "fsdp_activation_checkpointing": True}
    file = tmp_path / "accelerate.yaml"
    file.write_text(yaml.safe_dump(content))
    run = write_json(tmp_path / "run.json", config)
    launched = accelerate_launch("--config_file", file, "-m", "ds_trainer", "train", run)
    assert launched.code == 1
    assert launched.text.count("FSDP_RESHARD_AFTER_FORWARD=false, and fsdp.reshard_after_forward is true") == 1
    assert "FSDP_ACTIVATION_CHECKPOINTING=true, and model.gradient_checkpointing is false (default)" in launched.text
    assert "engine:" not in launched.text
