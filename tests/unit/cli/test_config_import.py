"""`ds-trainer config import`: the kind is found, the report goes to stderr, and what is written is a run."""

import json
import subprocess
import sys

import hjson
import pytest
import yaml

from ds_trainer.cli import main
from ds_trainer.config.foreign_files import load_foreign_config
from ds_trainer.config.io import load_config
from ds_trainer.config.keys import assign, flatten
from ds_trainer.errors import ConfigErrors
from ds_trainer.interop.accelerate.importer import from_accelerate
from ds_trainer.interop.deepspeed.importer import from_deepspeed
from ds_trainer.interop.import_report import report
from ds_trainer.interop.import_result import LAUNCHERS, Imported
from tests.helpers.foreign_configs import ACCELERATE_FILES, DEEPSPEED_FILES, DEEPSPEED_TUTORIAL, HF_ZERO3


def exit_code(*argv):
    try:
        return main(["config", "import", *map(str, argv)])
    except SystemExit as stop:
        return stop.code


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.write_bytes(text) if isinstance(text, bytes) else path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("name", DEEPSPEED_FILES)
def test_a_deepspeed_json_is_known_by_its_keys_and_becomes_a_run(write, capsys, name):
    assert exit_code(write("ds.json", DEEPSPEED_FILES[name])) == 0
    out, err = capsys.readouterr()
    load_config(json.loads(out))
    counts, open_keys = err.splitlines()[-2:]
    assert " carried, " in counts and counts.endswith("dropped")
    assert open_keys == "left to you: model.path, data.train"


@pytest.mark.parametrize("name", ACCELERATE_FILES)
def test_an_accelerate_yaml_is_known_by_its_keys_and_becomes_a_run(write, capsys, name):
    assert exit_code(write("accelerate.yaml", ACCELERATE_FILES[name])) == 0
    out, err = capsys.readouterr()
    load_config(json.loads(out))
    assert "distributed_type" in err


@pytest.mark.parametrize(
    "name, text",
    [
        ("training_args.json", '{"output_dir": "out", "learning_rate": 1e-4, "bf16": true, "train_batch_size": 8}'),
        ("sft.yaml", "output_dir: out\nlearning_rate: 1.0e-4\nbf16: true\n"),
    ],
)
def test_training_arguments_are_known_by_their_fields(write, capsys, name, text):
    assert exit_code(write(name, text)) == 0
    run = json.loads(capsys.readouterr().out)
    assert run["optimizer"]["lr"] == 1e-4 and run["precision"]["dtype"] == "bf16"
    assert run["run"]["output_dir"] == "out"


def test_accelerates_json_is_known_too(write, capsys):
    path = write("default_config.json", '{"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU"}')
    assert exit_code(path) == 0
    assert json.loads(capsys.readouterr().out)["parallel"]["engine"] == "ddp"


@pytest.mark.parametrize("name", ["a.json", "config", "a.yaml"])
@pytest.mark.parametrize("text, kind", [(ACCELERATE_FILES["fsdp2"], "fsdp2"), (DEEPSPEED_TUTORIAL, "deepspeed")])
@pytest.mark.parametrize("option", [True, False])
def test_a_file_is_read_by_its_content_whatever_its_name_and_with_from_too(write, capsys, name, text, kind, option):
    kinds = {"fsdp2": "accelerate", "deepspeed": "deepspeed"}
    assert exit_code(write(name, text), *(["--from", kinds[kind]] if option else [])) == 0
    assert json.loads(capsys.readouterr().out)["parallel"]["engine"] == kind


def test_keys_of_a_yaml_are_texts_as_in_json_and_aliases_are_resolved(write):
    path = write("a", "1: a\nno: b\nbase: &base {x: 1}\nmore: {<<: *base, y: 2}")
    assert load_foreign_config(path) == {"1": "a", "no": "b", "base": {"x": 1}, "more": {"x": 1, "y": 2}}


def test_a_yaml_value_that_contains_itself_is_refused(write, capsys):
    assert exit_code(write("a.yaml", "deepspeed_config: &all {more: *all}")) == 2
    assert "Circular reference" in capsys.readouterr().err


def test_a_dash_is_stdin():
    command = [sys.executable, "-m", "ds_trainer", "config", "import", "-"]
    done = subprocess.run(command, input=ACCELERATE_FILES["fsdp2"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["parallel"]["engine"] == "fsdp2"


@pytest.mark.parametrize(
    "text, kind, parts",
    [
        (ACCELERATE_FILES["fsdp2"], "deepspeed", ["looks like an accelerate YAML", "--from accelerate"]),
        (ACCELERATE_FILES["fsdp2"], "hf", ["looks like an accelerate YAML", "--from accelerate"]),
        (DEEPSPEED_TUTORIAL, "accelerate", ["looks like a DeepSpeed JSON", "--from deepspeed"]),
        ('{"output_dir": "out"}', "deepspeed", ["looks like TrainingArguments", "--from hf"]),
        ('{"model": {}, "zero": {"stage": 2}}', "deepspeed", ["model, zero, of which a DeepSpeed JSON has none"]),
    ],
)
def test_a_file_of_another_kind_than_from_says_is_refused(write, capsys, text, kind, parts):
    assert exit_code(write("a", text), "--from", kind) == 2
    out, err = capsys.readouterr()
    assert not out and all(part in err for part in parts), err


@pytest.mark.parametrize("text", [DEEPSPEED_TUTORIAL, HF_ZERO3, ACCELERATE_FILES["fsdp2"], '{"output_dir": "out"}'])
def test_check_of_another_tools_file_points_to_the_import(write, capsys, text):
    path = write("other", text)
    with pytest.raises(SystemExit) as stop:
        main(["config", "check", str(path)])
    assert stop.value.code == 2 and f"ds-trainer config import {path}" in capsys.readouterr().err


def test_a_run_with_one_key_of_another_tool_is_still_told_what_the_key_is_here(write, capsys):
    assert main(["config", "check", str(write("run.json", '{"model": {}, "learning_rate": 1}'))]) == 2
    err = capsys.readouterr().err
    assert "learning_rate is called optimizer.lr here" in err and "config import" not in err


def test_a_refused_import_names_the_files_own_keys(write, capsys):
    path = write("ds.json", '{"steps_per_print": 5, "train_micro_batch_size_per_gpu": -2, "gradient_clipping": "much"}')
    assert exit_code(path) == 2
    err = capsys.readouterr().err
    assert "batch.micro_size is -2 (integer) in train_micro_batch_size_per_gpu of ds.json" in err
    last = err.rstrip().splitlines()[-1]
    assert f"in {path} change train_micro_batch_size_per_gpu (-> batch.micro_size)" in last
    assert "gradient_clipping (-> optimizer.max_grad_norm)" in last and "steps_per_print" not in last


def test_a_file_is_what_from_says(write, capsys):
    assert exit_code(write("ds.json", '{"steps_per_print": 5}'), "--from", "deepspeed") == 0
    assert json.loads(capsys.readouterr().out)["native"] == {"deepspeed": {"steps_per_print": 5}}


def test_out_is_a_new_file_that_the_other_commands_read(write, capsys, tmp_path):
    out = tmp_path / "run.json"
    assert exit_code(write("ds.json", HF_ZERO3), "--out", out) == 0
    assert capsys.readouterr().out == ""
    assert main(["config", "show", str(out), "--device", "cuda", "--world", "8"]) == 0


def test_a_file_that_exists_is_not_written_over(write, capsys):
    out = write("run.json", "mine")
    assert exit_code(write("ds.json", HF_ZERO3), "--out", out) == 2
    assert "overwrites nothing" in capsys.readouterr().err and out.read_text() == "mine"


def test_a_folder_that_does_not_exist_is_no_place_for_the_run(write, capsys, tmp_path):
    assert exit_code(write("ds.json", HF_ZERO3), "--out", tmp_path / "none" / "run.json") == 2
    assert "in a folder that exists" in capsys.readouterr().err


def test_an_outcome_that_breaks_a_rule_is_told_beneath_the_report_and_not_written(write, capsys, tmp_path):
    offload = {"offload_optimizer": {"device": "nvme"}, "reduce_bucket_size": -1}
    path = write("ds.json", json.dumps({"train_batch_size": 4, "zero_optimization": {"stage": 3, **offload}}))
    assert exit_code(path, "--out", tmp_path / "run.json") == 2
    out, err = capsys.readouterr()
    counts, beneath = err.partition("dropped\n")[0], err.partition("dropped\n")[2]
    assert "zero_optimization.offload_optimizer.device" in counts
    assert "zero.offload_optimizer.nvme_path" in beneath and "zero.reduce_bucket_size" in beneath
    assert "Nothing was written" in beneath and not out and not (tmp_path / "run.json").exists()


@pytest.mark.parametrize(
    "name, text, parts",
    [
        ("none.json", None, ["none.json: No such file"]),
        ("a.json", '{"a": 1', ["a.json, line 1, column"]),
        ("a.json", "[1, 2]", ["holds no keys", "mapping"]),
        ("a.json", "", ["is empty"]),
        ("a.json", "{}", ["holds no keys"]),
        ("a.json", "null", ["holds no keys, but null"]),
        ("a.json", '{"a": NaN}', ["NaN is not a number"]),
        ("a.json", '{"a": 8 "b": 2}', ["a.json, line 1, column 9"]),
        ("a.json", '{"a": 8 // an end', ["ends within an object"]),
        ("a.json", '{"train_batch_size": 1e400}', ["batch.global_size"]),
        ("a.json", '{"a":' * 100_000, ["recursion"]),
        ("a.json", "// a comment\n" + '{"a":' * 100_000, ["recursion"]),
        ("a.yaml", "- " * 5000 + "1", ["recursion"]),
        ("a.yaml", "a: 1\na: 2", ["a occurs twice"]),
        ("a.yaml", "a: 2026-02-31", ["day is out of range"]),
        ("a.yaml", "a: !!bool x", ["a.yaml, line 1, column 4", "the tag"]),
        ("a.yaml", "? {a: 1}\n: 2", ["a.yaml, line 1, column 3", "a key that is not a string"]),
        ("a.yaml", "# " * 10_000 + "\na: [", ["a.yaml, line 2"]),
        ("a.yaml", "a: \x07", ["at position 3"]),
        ("a.yaml", "a: 1\n---\na: 2", ["a.yaml, line 2"]),
        ("a.json", '{"a": 1, "a": 2}', ["a occurs twice"]),
        ("a.json", b'{"a": "\xff"}', ["not UTF-8"]),
        ("a.yaml", "a: [1\nb: {", ["a.yaml, line"]),
        ("a.yaml", "- 1", ["holds no keys, but a list"]),
        ("a.json", '{"model": {}, "zero": {}}', ["model, zero", "--from"]),
    ],
)
def test_a_file_that_is_no_config_is_refused(write, tmp_path, capsys, name, text, parts):
    path = tmp_path / name if text is None else write(name, text)
    assert exit_code(path) == 2
    err = capsys.readouterr().err
    for part in [*parts, "rule:", "change:"]:
        assert part in err


@pytest.mark.parametrize("kind", ["deepspeed", "accelerate"])
def test_whatever_stands_in_a_file_every_key_has_one_line(kind, tmp_path):
    """Each key of each file in turn holds something that makes no sense there."""
    files, parse = (DEEPSPEED_FILES, hjson.loads) if kind == "deepspeed" else (ACCELERATE_FILES, yaml.safe_load)
    for text in files.values():
        for key in (key for key in flatten(parse(text)) if not key.endswith("_config")):
            for item in (None, {}, [], "x", "auto", -1, 1.5, False, ["a"], {"y": 1}):
                native = parse(text)
                assign(native, key, item)
                try:
                    is_native = kind == "deepspeed"
                    found = from_deepspeed(native) if is_native else from_accelerate(native, tmp_path / "a.yaml")
                except ConfigErrors as refused:  # a word that the tool does not know
                    assert all(error.found.startswith(key) for error in refused.errors)
                    continue
                lines = [line.key for line in found.lines]
                assert len(lines) == len(set(lines)) and set(flatten(native)) <= set(lines), (key, item)
                assert report(found)


def test_the_report_has_a_line_for_each_key_aligned_and_counts_fates():
    found = Imported()
    found.carry("a.long.key", 1, {"zero.stage": 1, "optimizer.lr": 2})
    found.carry("b", "x", {}, "how", changed=True)
    found.drop("c", [1], "why")
    found.carry("d", None, {"run.seed": 3}, "a default")
    assert report(found).splitlines() == [
        "carried  a.long.key = 1  -> zero.stage, optimizer.lr",
        'changed  b = "x"         -> -                         how',
        "dropped  c = [1]         -> -                         why",
        "carried  d (left out)    -> run.seed                  a default",
        "2 carried, 1 changed, 1 dropped",
    ]


def test_what_is_the_launchers_stands_in_one_line_at_the_end():
    found = Imported()
    found.drop("num_machines", 2, LAUNCHERS)
    found.drop("c", 1, "why")
    found.drop("machine_rank", 0, LAUNCHERS)
    assert report(found).splitlines() == [
        "dropped  c = 1  -> -  why",
        f"the launcher's: num_machines = 2, machine_rank = 0: {LAUNCHERS}",
        "0 carried, 0 changed, 1 dropped, 2 the launcher's",
    ]


def test_on_a_narrow_terminal_the_notes_stand_below_their_lines():
    found = from_accelerate(yaml.safe_load(ACCELERATE_FILES["fsdp1"]), None)
    narrow = report(found, 80)
    assert all(len(line) <= 80 for line in narrow.splitlines())
    assert "changed fsdp_config.fsdp_version (left out) -> -\n    accelerate's default: 1;" in narrow
    assert report(found, 1000) == report(found)


def test_an_import_loads_no_torch(write):
    code = (
        "import sys; from ds_trainer.cli import main; assert main(sys.argv[1:]) == 0; "
        "assert not {'torch', 'transformers', 'deepspeed', 'accelerate'} & set(sys.modules)"
    )
    files = (
        write("ds.json", DEEPSPEED_TUTORIAL),
        write("a.yaml", ACCELERATE_FILES["fsdp2"]),
        write("args.json", '{"output_dir": "out"}'),
    )
    for path in files:
        subprocess.run([sys.executable, "-c", code, "config", "import", str(path)], check=True, capture_output=True)
