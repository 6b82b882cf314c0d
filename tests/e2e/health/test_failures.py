"""A rank that fails under a real launcher: all end in time, and it, its step and its samples are what is told last."""

import time

import psutil
import pytest

from tests.helpers.launch import free_port, launch, run_folder, write_json
from tests.helpers.tiers import tiers

SCRIPT = "tests/e2e/scripts/fail_at_step_3.py"
LAUNCHERS = {
    "torchrun": ("torchrun", "--nproc_per_node", "2", "--master_port", "{port}"),
    "deepspeed": ("deepspeed", "--num_gpus", "2", "--master_port", "{port}"),
    "accelerate": (
        *("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "{port}"),
    ),
}
# Words of collectives that broke, which no rank is to write.
NOISE = ("gloo/transport", "Connection closed by peer", "DistNetworkError", "recvValue failed")
WHERE = "rank 1, step 3, samples ["


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The JSON of a run of six steps."""
    folder = tmp_path_factory.mktemp("run")
    config = run_folder(folder)
    config["run"] |= {"max_steps": 6}
    return write_json(folder / "run.json", config)


def fail(run, launcher, way):
    """What was written, and how long the end took from the failure on."""
    began = time.monotonic()
    command = [part.format(port=free_port()) for part in LAUNCHERS[launcher]]
    launched = launch(*command, SCRIPT, run, way)
    seconds = time.monotonic() - began - launched.when("failing now")
    assert launched.code > 0, launched.text
    assert not [noise for noise in NOISE if noise in launched.text], launched.text
    print(f"\n{launcher}: a rank that {way}: all gone after {seconds:.1f} s")
    return launched, seconds


@pytest.mark.case("F8")
@pytest.mark.parametrize("launcher", tiers(LAUNCHERS, slow=["torchrun", "deepspeed"]))
def test_the_traceback_of_a_rank_that_raises_ends_with_its_step_and_samples(run, launcher):
    launched, seconds = fail(run, launcher, "raises")
    # torch puts the rank before each line of a traceback.
    assert f"ValueError: boom\n{WHERE}" in launched.text.replace("[rank1]: ", "")
    assert launched.text.count("ValueError: boom") == 1
    assert seconds < 15


@pytest.mark.case("F8")
@pytest.mark.parametrize(
    ("launcher", "way"),
    tiers(
        [("torchrun", "exits"), ("torchrun", "is killed"), ("deepspeed", "exits"), ("accelerate", "is killed")],
        slow=[("torchrun", "is killed"), ("deepspeed", "exits")],
    ),
)
def test_a_rank_that_ends_without_a_word_is_named_by_the_other(run, launcher, way):
    launched, seconds = fail(run, launcher, way)
    assert launched.text.count(f"error: {WHERE}") == 1
    assert "its process ended without a word" in launched.text.partition(WHERE)[2]
    assert seconds < 15


@pytest.mark.case("F8")
@pytest.mark.parametrize(
    ("launcher", "way"),
    tiers([("torchrun", "sleeps in a loop"), ("deepspeed", "sleeps")], slow=[("torchrun", "sleeps in a loop")]),
)
def test_a_rank_that_sleeps_for_ever_is_named_with_default_keys(run, launcher, way):
    launched, seconds = fail(run, launcher, way)
    assert "error: rank 1 is stuck, " in launched.text and WHERE in launched.text
    assert f"{SCRIPT}:" in launched.text
    assert seconds < 30


@pytest.mark.slow
@pytest.mark.case("D6")
def test_a_save_by_one_rank_is_named_with_file_and_line_within_seconds(run):
    launched, seconds = fail(run, "torchrun", "saves alone")
    assert f"error: save_model() was entered by ranks [0] only, at {SCRIPT}:" in launched.text
    assert seconds < 10


def left_over(run):
    """Processes whose command line names the run."""
    return [p for p in psutil.process_iter(["cmdline"]) if str(run) in " ".join(p.info["cmdline"] or ())]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """The JSON of the same run as a pipeline of two stages."""
    folder = tmp_path_factory.mktemp("pipeline")
    config = run_folder(folder)
    config["run"] |= {"max_steps": 6}
    config |= {"parallel": {"pp": 2}, "zero": {"stage": 1}, "batch": {"global_size": 4, "micro_size": 1}}
    return write_json(folder / "run.json", config)


STAGE_FAILS = [
    ("torchrun", "raises in a forward pass", "ValueError: boom", 15),
    ("torchrun", "is killed in a forward pass", "its process ended without a word", 30),
    ("deepspeed", "is killed in a forward pass", "its process ended without a word", 30),
    ("torchrun", "sleeps in a forward pass", "is stuck, ", 30),
]


@pytest.mark.case("F8")
@pytest.mark.parametrize(("launcher", "way", "words", "limit_s"), tiers(STAGE_FAILS, slow=STAGE_FAILS[2:]))
def test_a_stage_that_fails_in_mid_step_is_named_and_ends_all(pipeline, launcher, way, words, limit_s):
    launched, seconds = fail(pipeline, launcher, way)
    text = launched.text.replace("[rank1]: ", "")
    assert words in text
    assert "rank 1 (stage 2 of 2), step 4, samples [" in text
    assert seconds < limit_s
    assert not left_over(pipeline), "processes of the run are still there"
