"""The commands that people type, on a tiny checkpoint: all train the same, or say plainly what stands in the way."""

import socket
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ds_trainer.metrics import read_metrics
from tests.helpers.launch import (
    TRAIN,
    chats,
    deepspeed,
    free_port,
    launch,
    python,
    run_folder,
    write_json,
    write_jsonl,
)

SET = ("--set", "run.max_steps=1", "--set", "checkpoint.export=false", "--set", "logging.plots=false")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Folder of a run: `run.json`, a checkpoint and data."""
    folder = tmp_path_factory.mktemp("run")
    config = run_folder(folder)
    config["data"]["eval"] = write_jsonl(folder / "eval.jsonl", chats(3))
    write_json(folder / "run.json", config)
    return folder


@pytest.fixture(scope="module")
def on_two_ranks(run):
    """What `deepspeed --num_gpus 2` did with it; nothing was compiled before."""
    (run / "extensions").mkdir()
    return deepspeed(TRAIN, "--config", run / "run.json", TORCH_EXTENSIONS_DIR=str(run / "extensions"))


@pytest.fixture(scope="module")
def first_loss(run, on_two_ranks):
    assert on_two_ranks.code == 0, on_two_ranks.text
    return read_metrics(run / "out" / "metrics.jsonl")[0]["loss"]


def losses(folder):
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]


@pytest.mark.case("F11")
def test_deepspeed_on_two_ranks_trains_evaluates_draws_and_exports_without_compiling(run, on_two_ranks):
    assert on_two_ranks.code == 0, on_two_ranks.text
    assert "DeepSpeedEngine, ZeRO stage 2, 2 data rank(s)" in on_two_ranks.text
    seconds = on_two_ranks.when("step 1/3")
    print(f"\nfirst optimizer step {seconds:.1f} s after the deepspeed command")
    assert seconds < 60
    assert list((run / "extensions").iterdir()) == [], "nothing may be compiled for a run without offload"
    lines = read_metrics(run / "out" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 3]
    assert lines[-1]["eval_num_tokens"] > 0
    assert lines[2]["loss"] < lines[0]["loss"]
    for picture in ("loss.png", "training.png"):
        assert (run / "out" / picture).read_bytes().startswith(b"\x89PNG")
    check_exported(run)


def check_exported(run):
    exported = run / "out" / "model"
    model, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(info.values()), info
    before = AutoModelForCausalLM.from_pretrained(run / "checkpoint").state_dict()
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (exported, run / "checkpoint"))
    conversation = chats(1)[0]["messages"]
    assert ours.apply_chat_template(conversation) == theirs.apply_chat_template(conversation)


@pytest.mark.slow
@pytest.mark.case("F11")
@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ((sys.executable, TRAIN, "--config"), 1),
        (("ds-trainer", "train"), 1),
        (("torchrun", "--nproc_per_node", "2", "--master_port", "{port}", TRAIN, "--config"), 2),
    ],
    ids=["python", "ds-trainer", "torchrun"],
)
def test_any_other_way_to_start_takes_the_same_first_step(run, first_loss, tmp_path, command, ranks):
    command = [part.format(port=free_port()) for part in command]
    launched = launch(*command, run / "run.json", *SET, "--set", f"run.output_dir={tmp_path}")
    assert launched.code == 0, launched.text
    assert f"{ranks} data rank(s)" in launched.text
    assert losses(tmp_path) == pytest.approx([first_loss], rel=1e-6)


@pytest.mark.slow
def test_a_deepspeed_json_and_set_reach_the_engine(run, first_loss, tmp_path):
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "monitor"}
    native = write_json(tmp_path / "ds.json", {"csv_monitor": monitor})
    launched = deepspeed(
        TRAIN,
        *("--config", run / "run.json", "--deepspeed", "--deepspeed_config", native),
        *(*SET, "--set", "zero.stage=3", "--set", f"run.output_dir={tmp_path}"),
    )
    assert launched.code == 0, launched.text
    assert "ZeRO stage 3, 2 data rank(s)" in launched.text
    assert list((tmp_path / "monitor").glob("*.csv")), "DeepSpeed's own monitor writes files"
    assert losses(tmp_path) == pytest.approx([first_loss], rel=1e-6)


@pytest.mark.slow
@pytest.mark.case("F11")
def test_a_busy_port_is_named_with_the_option_that_chooses_another(run):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        launched = deepspeed(TRAIN, "--config", run / "run.json", port=port)
    refused(launched, f"rank 0 cannot join the process group at 127.0.0.1:{port}", "--master_port")


@pytest.mark.slow
@pytest.mark.case("F11")
def test_half_of_a_launchers_variables_is_refused_with_the_missing_ones(run):
    launched = python(TRAIN, "--config", run / "run.json", WORLD_SIZE="2")
    refused(launched, "sets WORLD_SIZE=2 but not RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT", "deepspeed, torchrun")


FAULTS = {
    "misspelt key": (["--set", "zero.stge=3"], "zero.stge is no key in --set", "did you mean zero.stage?"),
    "no model": (["--set", "model.path=./none"], "model.path is './none'", "set model.path"),
    "no data": (["--set", "data.train=none.jsonl"], "no file none.jsonl", "correct the path in data.train"),
}


@pytest.mark.slow
@pytest.mark.parametrize("arguments,found,change", FAULTS.values(), ids=FAULTS)
def test_under_a_launcher_a_fault_ends_all_ranks_with_one_voice(run, arguments, found, change):
    refused(deepspeed(TRAIN, "--config", run / "run.json", *arguments), found, change)


def refused(launched, found, change):
    """Ended by itself, by our exit code, with the three parts said once and without a traceback."""
    assert launched.code == 2, launched.text
    assert launched.text.count("error: ") == 1
    assert launched.text.count("  rule:   ") == launched.text.count("  change: ") == 1
    said = launched.text.partition("error: ")[2]
    assert found in said and change in said
    assert "Traceback" not in launched.text
