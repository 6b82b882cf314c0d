"""`ds-trainer config`: the table, the check, the native JSON, and what a wrong config looks like to a user."""

import json
import subprocess
import sys
import time

import pytest

from ds_trainer.cli import main
from ds_trainer.cli.config import COST_COLUMNS, cost_rows, json_schema, rows
from ds_trainer.config.io import load_config
from ds_trainer.config.keys import leaf_fields
from ds_trainer.config.resolve import resolve
from ds_trainer.config.resolved import Machine
from ds_trainer.errors import ConfigError
from ds_trainer.planning.memory import bytes_per_parameter


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def write(**sections):
        (tmp_path / "run.json").write_text(json.dumps(sections))
        return "run.json"

    return write


def exit_code(*argv):
    try:
        return main(argv)
    except SystemExit as stop:
        return stop.code


@pytest.mark.case("A1")
def test_show_prints_every_value_with_its_place_or_reason(write, capsys):
    path = write(batch={"micro_size": 4, "accumulation": 8}, zero={"stage": 3})
    assert exit_code("config", "show", path, "--world", "8", "--device", "cuda", "--set", "batch.accumulation=2") == 0
    text = capsys.readouterr().out
    line = {row.split("│")[1].strip(): row for row in text.splitlines() if row.count("│") == 4}
    assert "--set (run.json says 8)" in line["batch.accumulation"]
    assert "64" in line["batch.global_size"] and "8 data-parallel ranks" in line["batch.global_size"]
    assert "run.json" in line["zero.stage"] and "default" in line["optimizer.lr"]
    assert "zero.stage3_param_persistence_threshold" in line, "keys are never cut short"


def test_the_table_leaves_out_what_has_no_part_in_the_run():
    machine = Machine(2, "cpu", ("fp32",), "no bf16")
    on_ddp = {key for key, *_ in rows(resolve(*load_config({"parallel": {"engine": "ddp"}}), machine))}
    on_zero1 = {key for key, *_ in rows(resolve(*load_config({"zero": {"stage": 1}}), machine))}
    assert not any(key.startswith("zero.") for key in on_ddp) and "ddp.bucket_cap_mb" in on_ddp
    assert "zero.sub_group_size" not in on_zero1 and "zero.reduce_bucket_size" in on_zero1
    assert "ddp.bucket_cap_mb" not in on_zero1


@pytest.mark.case("N11")
def test_the_table_says_the_dtype_on_every_engine():
    machine = Machine(2, "cpu", ("fp32",), "no bf16")
    for parallel in ({"engine": "deepspeed"}, {"engine": "ddp"}, {"engine": "fsdp2"}):
        told = {key: value for key, value, _ in rows(resolve(*load_config({"parallel": parallel}), machine))}
        assert told["precision.dtype"] == '"fp32"'


def test_show_prints_what_each_stage_costs_and_marks_the_run():
    machine = Machine(2, "cuda", ("fp32", "bf16"), "Ampere")
    table = cost_rows(resolve(*load_config({"zero": {"stage": 2}, "optimizer": {"name": "lion"}}), machine))
    assert [row[:2] for row in table] == [
        ("0", "fp32"),
        ("1", "fp32"),
        ("1", "bf16"),
        ("2, this run", "fp32"),
        ("2", "bf16"),
        ("3", "fp32"),
        ("3", "bf16"),
    ]
    row = bytes_per_parameter(2, "bf16", "fp32", 2, "lion")
    numbers = (row.after_backward, row.after_step, 0, 0, row.paper)
    assert table[3] == ("2, this run", "fp32", *(f"{number:g}" for number in numbers), row.why)


def test_the_cost_table_offloads_where_a_stage_can():
    machine = Machine(2, "cuda", ("fp32", "bf16"), "Ampere")
    nvme = {"device": "nvme", "nvme_path": "/drive", "buffer_count": 8}
    table = cost_rows(resolve(*load_config({"zero": {"stage": 3, "offload_optimizer": nvme}}), machine))
    on_nvme = {row[0]: row[COST_COLUMNS.index("on NVMe")] for row in table}
    assert on_nvme == {"0": "0", "1": "0", "2": "0", "3, this run": "8", "3": "8"}


def test_show_prints_the_cost_table_with_the_papers_figure_and_why(write, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    path = write(zero={"stage": 3}, precision={"dtype": "fp32"})
    assert exit_code("config", "show", path, "--world", "2", "--device", "cpu") == 0
    (own,) = [line for line in capsys.readouterr().out.splitlines() if "this run" in line]
    row = bytes_per_parameter(3, "fp32", "fp32", 2)
    cells = [cell.strip() for cell in own.split("│")[1:-1]]
    assert cells == ["3, this run", "fp32", "10", "10", "0", "0", "8", row.why]


def test_a_run_of_another_engine_has_one_row():
    machine = Machine(2, "cpu", ("fp32",), "no bf16")
    (row,) = cost_rows(resolve(*load_config({"parallel": {"engine": "ddp"}}), machine))
    assert row[:4] == ("0, this run", "fp32", "16", "16")


def test_check_reports_every_kind_of_fault_at_once_and_exits_with_2(write, capsys):
    path = write(
        model={"path": "./no/such/folder"},
        data={"train": "missing.jsonl"},
        learning_rate=1,
        batch={"micro_size": "8", "global_size": 7},
        precision={"dtype": "fp16"},
    )
    assert exit_code("config", "check", path, "--world", "2", "--device", "cpu") == 2
    text = capsys.readouterr().err
    for part in ("./no/such/folder", "missing.jsonl", "learning_rate", "without quotes", "fp16", "batch.global_size 7"):
        assert part in text


def test_check_says_ok_for_a_config_that_runs(write, capsys, tmp_path):
    (tmp_path / "train.jsonl").write_text("{}\n")
    path = write(model={"path": "owner/name"}, data={"train": "train.jsonl"})
    assert exit_code("config", "check", path, "--world", "4", "--device", "cpu") == 0
    assert "run.json: ok for 4 x cpu" in capsys.readouterr().out


@pytest.mark.alone
def test_check_answers_in_under_two_seconds_and_loads_no_torch(write):
    path = write(batch={"micro_size": 1})
    code = (
        "import sys; from ds_trainer.cli import main; assert main(sys.argv[1:]) == 0; "
        "assert not {'torch', 'transformers', 'deepspeed'} & set(sys.modules)"
    )
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, "config", "check", path, "--device", "cpu"], check=True)
    assert time.perf_counter() - start < 2.0


def test_translate_prints_the_native_json(write, capsys):
    path = write(zero={"stage": 1}, batch={"micro_size": 2})
    assert exit_code("config", "translate", path, "--to", "deepspeed", "--world", "4", "--device", "cpu") == 0
    native = json.loads(capsys.readouterr().out)
    assert native["train_batch_size"] == 8 and native["zero_optimization"]["stage"] == 1


@pytest.mark.parametrize(
    "to, python, says",
    [
        ("deepspeed", False, '"stage": 3'),
        ("fsdp2", False, "reshard_after_forward=True"),
        ("accelerate", False, "zero_stage: 3"),
        ("accelerate", True, "DeepSpeedPlugin("),
        ("hf", False, '"per_device_train_batch_size": 2'),
        ("hf", True, "TrainingArguments("),
    ],
)
def test_one_run_is_translated_for_every_tool(write, capsys, to, python, says):
    path = write(zero={"stage": 3}, batch={"micro_size": 2}, run={"max_steps": 5})
    option = ["--python"] if python else []
    assert exit_code("config", "translate", path, "--to", to, "--world", "4", "--device", "cuda", *option) == 0
    assert says in capsys.readouterr().out


def test_without_a_target_a_run_is_translated_for_its_own_engine(write, capsys):
    assert exit_code("config", "translate", write(parallel={"engine": "ddp"}), "--device", "cpu") == 0
    assert "DistributedDataParallel(model, bucket_cap_mb=25" in capsys.readouterr().out


def test_a_default_stage_keeps_its_meaning_on_fsdp2(write, capsys):
    assert exit_code("config", "translate", write(), "--to", "fsdp2", "--device", "cpu") == 0
    assert "fully_shard(part, reshard_after_forward=False" in capsys.readouterr().out


def test_a_run_on_accelerate_is_translated_for_what_it_runs_on(write, capsys):
    path = write(parallel={"engine": "accelerate"}, accelerate={"backend": "ddp"})
    assert exit_code("config", "translate", path, "--to", "ddp", "--device", "cpu") == 0
    assert "DistributedDataParallel" in capsys.readouterr().out


def test_stage_0_is_what_ddp_does(write, capsys):
    assert exit_code("config", "translate", write(zero={"stage": 0}), "--to", "ddp", "--device", "cpu") == 0
    assert "DistributedDataParallel" in capsys.readouterr().out


@pytest.mark.case("M3")
def test_a_folder_that_cannot_be_read_is_still_a_folder(write, capsys, tmp_path):
    (tmp_path / "broken").mkdir()
    path = write(model={"path": "broken"}, parallel={"tp": 2})
    assert exit_code("config", "check", path, "--device", "cpu", "--world", "2") == 2
    found = capsys.readouterr()
    assert "there is no broken/config.json" in found.err and "no folder here" not in found.out


def test_check_says_what_is_left_to_a_script(write, capsys):
    path = write(model={}, data={})
    assert exit_code("config", "check", path, "--device", "cpu") == 0
    out = capsys.readouterr().out
    assert "warning: model.path is not set" in out and "warning: data.train is not set" in out


def test_translate_refuses_what_the_target_cannot_do(write, capsys):
    assert exit_code("config", "translate", write(zero={"stage": 3}), "--to", "ddp", "--device", "cpu") == 2
    assert "remove zero.stage" in capsys.readouterr().err
    assert exit_code("config", "translate", write(), "--to", "fsdp2", "--standalone", "--device", "cpu") == 2
    assert "remove --standalone" in capsys.readouterr().err


def test_what_a_target_cannot_say_is_noted_beside_the_file(write, capsys):
    path = write(optimizer={"weight_decay": 0.1}, schedule={"name": "constant"})
    assert exit_code("config", "translate", path, "--standalone", "--device", "cpu") == 0
    found = capsys.readouterr()
    assert "note: optimizer.weight_decay" in found.err and json.loads(found.out)["optimizer"]["type"] == "AdamW"


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2", "ddp", "accelerate", "all"])
def test_show_says_what_an_engine_does_with_every_key(write, capsys, engine):
    assert exit_code("config", "show", write(), "--backend", engine, "--device", "cpu") == 0
    lines = [line.replace("┃", "│").split("│") for line in capsys.readouterr().out.splitlines()]
    cells = {row[1].strip(): [cell.strip() for cell in row[3:-1]] for row in lines if len(row) > 3}
    assert set(leaf_fields()) <= set(cells)
    assert all(cells["zero.stage"]) and len(cells["zero.stage"]) == (4 if engine == "all" else 1)


def test_schema_prints_the_schema_with_a_doc_for_every_key(capsys):
    assert exit_code("config", "schema") == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == json_schema() and schema["additionalProperties"] is False
    for name, part in schema["$defs"].items():
        assert all("description" in field for field in part["properties"].values()), name


def test_a_deepspeed_json_joins_the_native_block(write, capsys, tmp_path):
    (tmp_path / "ds.json").write_text('{"comms_logger": {"enabled": true}}')
    path = write(zero={"stage": 1})
    assert exit_code("config", "translate", path, "--deepspeed_config", "ds.json", "--device", "cpu") == 0
    assert json.loads(capsys.readouterr().out)["comms_logger"] == {"enabled": True}


def test_a_wrong_config_is_a_text_without_a_traceback_unless_debug_asks_for_it(write, capsys):
    path = write(batch={"micro_size": "8"})
    assert exit_code("config", "show", path, "--device", "cpu") == 2
    text = capsys.readouterr().err
    assert "write 8, without quotes" in text and "Traceback" not in text
    with pytest.raises(ConfigError):
        main(["config", "show", path, "--debug"])


def test_an_option_is_not_guessed_from_its_first_letters(write, capsys):
    assert exit_code("config", "show", write(), "--wor", "2") == 2
    assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize("world", ["0", "-2", "two", "9" * 5000])
def test_a_number_of_ranks_that_is_none_is_refused(write, capsys, world):
    assert exit_code("config", "check", write(), "--world", world) == 2
    assert "is not a number of ranks: give 1 or more" in capsys.readouterr().err


def test_a_reader_that_stops_early_ends_the_command_without_a_word():
    command = [
        sys.executable,
        "-c",
        "import sys; from ds_trainer.cli import main; sys.exit(main(['config', 'schema']))",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer:
        writer.stdout.close()
        assert writer.stderr.read() == b""
    assert writer.returncode == 1


def test_show_folds_nothing_where_no_terminal_has_a_width(write, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    folder = "a-long-name/" * 20
    assert exit_code("config", "show", write(run={"output_dir": folder}), "--device", "cpu") == 0
    assert f'"{folder}"' in capsys.readouterr().out


def test_check_names_the_absolute_place_of_a_relative_path(write, capsys, tmp_path):
    (tmp_path / "a_file").touch()
    path = write(model={"path": "./nope"}, data={"train": ["a.jsonl", "a_file"]}, run={"output_dir": "a_file/outputs"})
    assert exit_code("config", "check", path, "--device", "cpu") == 2
    text = capsys.readouterr().err
    assert f"there is no folder {tmp_path}/nope" in text and f"no file a.jsonl ({tmp_path}/a.jsonl)" in text
    assert "run.output_dir is a_file/outputs, which cannot be written" in text
