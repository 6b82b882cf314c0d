"""`ds-trainer plan schedule`: what it prints, draws and refuses."""

import json
import subprocess
import sys

import pytest

from ds_trainer.cli import main
from tests.helpers.tiny import tiny_llama


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def write(batch=None, **parallel):
        parallel = {"engine": "ddp", "pp": 4, **parallel}
        (tmp_path / "run.json").write_text(json.dumps({"parallel": parallel, "batch": batch or {"accumulation": 8}}))
        return "run.json"

    return write


def exit_code(*argv):
    try:
        return main(("plan", "schedule", *argv, "--device", "cpu"))
    except SystemExit as stop:
        return stop.code


def cells(text: str) -> dict[str, list[str]]:
    """The rows of the comparison, by schedule."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    return {row[0]: row[1:] for row in rows}


def test_it_prints_the_timeline_and_what_is_to_be_read_from_it(write, capsys):
    assert exit_code(write()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1f1b: 4 ranks, 8 micro-batches, bubble 27.3%, at most 4 of them in flight on a rank"
    assert lines[2] == "rank 0  F0F1F2F3............B0- F4B1- F5B2- F6B3- F7B4- ..B5- ..B6- ..B7-"
    assert [line[:6] for line in lines[2:6]] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert lines[7:14] == [
        "F: forward; B: backward, twice as long; dots: idle",
        "micro-batches  8 (batch.accumulation: run.json)",
        "bubble         27.3% of the ranks' time in a step",
        "in flight      4, 3, 2, 1 micro-batches at most, by rank, whose activations it holds",
        "passes         8 F + 8 B on each rank",
        "step           takes 33 forward passes through 1/4 of the model; 24 without a bubble",
        "stages         taken as equally long: model.path is no folder here that shows its layers",
    ]


def test_it_compares_the_schedules_that_the_run_could_have(write, capsys):
    assert exit_code(write(schedule="zbv"), "--set", "batch.accumulation=16") == 0
    assert cells(capsys.readouterr().out) == {
        "gpipe": ["1", "15.8%", "16", "57", ""],
        "1f1b": ["1", "15.8%", "4", "57", ""],
        "interleaved_1f1b": ["2", "8.6%", "5.5", "52.5", ""],
        "interleaved_zero_bubble": ["2", "3.0%", "4", "49.5", ""],
        "zbv": ["2", "3.0%", "4", "49.5", "this run"],
        "dualpipev": ["2", "3.0%", "4.5", "49.5", ""],
    }


def test_a_number_of_stages_goes_for_every_schedule_that_can_have_it(write, capsys):
    assert exit_code(write(schedule="interleaved_1f1b", virtual_stages=3)) == 0
    found = {name: row[0] for name, row in cells(capsys.readouterr().out).items()}
    assert found == dict(zip(found, ["1", "1", "3", "3", "2", "2"], strict=True))


def test_it_says_what_a_schedule_needs_that_the_run_could_not_have(write, capsys):
    assert exit_code(write({"accumulation": 6})) == 0
    text = capsys.readouterr().out
    assert cells(text)["dualpipev"] == ["2", "", "", "", "refused"]
    assert text.splitlines()[-1] == (
        "dualpipev needs at least as many micro-batches as the pipeline has stages: set batch.accumulation to 8 or more"
    )


def test_stages_are_as_long_as_their_layers_and_head_where_the_checkpoint_is_here(write, tmp_path, capsys):
    model = tiny_llama(layers=6, tied=False, vocab=65)
    model.save_pretrained(tmp_path / "model")
    run = write({"accumulation": 8}, pp=2)
    assert exit_code(run, "--set", "model.path=model", "--set", "parallel.pp_split=[3,3]") == 0
    even = cells(capsys.readouterr().out)
    assert exit_code(run, "--set", "model.path=model", "--set", "parallel.pp_split=[1,5]") == 0
    text = capsys.readouterr().out
    uneven = cells(text)
    layer = sum(p.numel() for p in model.model.layers[0].parameters() if p.dim() == 2) + (128 + 1) / 2 * 32
    head = model.lm_head.weight.numel()
    assert f"the longest takes {2 * (5 * layer + head) / (6 * layer + head):.2f} times the mean, by FLOPs" in text
    assert float(uneven["1f1b"][3]) > 1.4 * float(even["1f1b"][3])
    assert uneven["zbv"] == even["zbv"], "a split is of the run's own stages"


def test_more_stages_than_layers_are_refused_in_the_comparison(write, tmp_path, capsys):
    tiny_llama(layers=3).save_pretrained(tmp_path / "model")
    assert exit_code(write(pp=2), "--set", "model.path=model") == 0
    text = capsys.readouterr().out
    assert cells(text)["interleaved_1f1b"][-1] == "refused"
    assert "zbv has 4 stages here, and the model 3 layers" in text


def test_the_number_of_ranks_counts_where_micro_batches_follow_from_the_size_of_a_step(write, capsys):
    run = write({"global_size": 64, "micro_size": 1})
    assert exit_code(run, "--world", "16") == 0
    assert "16 micro-batches" in capsys.readouterr().out
    assert exit_code(run) == 0
    assert "64 micro-batches" in capsys.readouterr().out


def test_a_picture_is_drawn_where_it_is_asked_for(write, tmp_path, capsys):
    assert exit_code(write(), "--output", "timeline.png") == 0
    assert (tmp_path / "timeline.png").stat().st_size > 10_000
    assert capsys.readouterr().out.endswith("picture: timeline.png\n")


@pytest.mark.parametrize(
    ("parallel", "argv", "says"),
    [
        ({"pp": 1}, (), "set parallel.pp to 2 or more"),
        ({}, ("--output", "timeline.gif"), "a picture is a .png, .pdf or .svg"),
        ({}, ("--output", "nowhere/timeline.png"), "nowhere is no folder"),
        ({}, ("--set", "batch.accumulation=3"), "batch.accumulation to 4 or more"),
        ({"schedule": "zbv", "virtual_stages": 3}, (), "zbv has exactly 2 stages on each rank"),
    ],
)
def test_what_cannot_be_drawn_is_an_error_that_names_what_to_change(write, capsys, parallel, argv, says):
    assert exit_code(write(**parallel), *argv) == 2
    out, err = capsys.readouterr()
    assert says in err and "Traceback" not in err and not out


def test_it_loads_no_torch(write):
    code = (
        "import sys; from ds_trainer.cli import main; code = main(); "
        "sys.exit(code or ' '.join({'torch', 'transformers', 'matplotlib'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code, "plan", "schedule", write(), "--device", "cpu"], check=True)


def test_a_reader_that_stops_early_ends_the_command_without_a_word(write):
    command = [sys.executable, "-m", "ds_trainer", "plan", "schedule", write(), "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer:
        writer.stdout.close()
        assert writer.stderr.read() == b""
    assert writer.returncode == 1
