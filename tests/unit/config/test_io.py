"""Reading a run: places and their order, strict JSON, and every fault in one report."""

import json

import pytest

from ds_trainer.config.io import load_config, merge_native, read_config
from ds_trainer.config.keys import assign
from ds_trainer.config.schema import RunConfig
from ds_trainer.errors import ConfigError, ConfigErrors
from tests.helpers.table import table


def write(folder, name, content):
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def faults(raw, *overrides):
    with pytest.raises(ConfigErrors) as caught:
        load_config(raw, overrides)
    return caught.value.errors


@pytest.mark.case("M3")
@pytest.mark.parametrize("key", ["_comment", "//", "optimizer._comment"])
def test_a_remark_is_no_key(key):
    tree: dict = {}
    assign(tree, key, "as in the paper")
    (error,) = faults(tree)
    assert error.change == "remove it: JSON has no comments, and every key is read"


@pytest.mark.case("M2")
def test_a_run_with_a_byte_order_mark_reads_as_without_one(tmp_path):
    for name, encoding in (("plain", "utf-8"), ("marked", "utf-8-sig")):
        (tmp_path / name).write_text('{"run": {"max_steps": 3}}', encoding=encoding)
    assert load_config(tmp_path / "marked")[0] == load_config(tmp_path / "plain")[0]


@pytest.mark.case("A1")
def test_the_command_line_wins_over_the_file_and_the_table_says_what_it_replaced(tmp_path):
    path = write(tmp_path, "run.json", {"batch": {"micro_size": 2, "accumulation": 4}})
    config, origins = load_config(path, ["batch.accumulation=2"])
    assert config.batch.accumulation == 2
    assert origins["batch.accumulation"] == f"--set ({path} says 4)"
    assert origins["batch.micro_size"] == str(path)
    assert origins["batch.global_size"] == "default"


@pytest.mark.case("A1")
@pytest.mark.parametrize("key, one, other", [("optimizer.lr", 1e-4, 2e-4), ("optimizer.max_grad_norm", 1, 2)])
def test_two_values_for_one_key_on_the_command_line_are_refused_naming_both(key, one, other):
    with pytest.raises(ConfigError) as caught:
        load_config({}, [f"{key}={one}", f"{key}={other}"])
    assert key in caught.value.found and str(one) in caught.value.found and str(other) in caught.value.found


@pytest.mark.case("A1")
def test_a_deepspeed_file_that_differs_from_the_native_block_is_refused_naming_both_places(tmp_path):
    run = write(
        tmp_path, "run.json", {"native": {"deepspeed": {"zero_optimization": {"stage": 2}, "dump_state": True}}}
    )
    ds = write(tmp_path, "ds.json", {"zero_optimization": {"stage": 3}, "dump_state": True})
    with pytest.raises(ConfigErrors) as caught:
        load_config(run, deepspeed_config=ds)
    (error,) = caught.value.errors
    assert error.found == (f"zero_optimization.stage is 3 in {ds} and 2 in native.deepspeed of {run}")


def test_a_deepspeed_file_joins_the_native_block_without_changing_what_was_passed(tmp_path):
    ds = write(tmp_path, "ds.json", {"comms_logger": {"enabled": True}})
    raw = {"native": {"deepspeed": {"dump_state": True}}}
    merged = merge_native(raw, ds)
    assert merged["native"]["deepspeed"] == {"dump_state": True, "comms_logger": {"enabled": True}}
    assert raw == {"native": {"deepspeed": {"dump_state": True}}}
    _, origins = load_config(raw, deepspeed_config=ds)
    assert origins["native.deepspeed.comms_logger.enabled"] == str(ds)
    assert origins["native.deepspeed.dump_state"] == "config"


@pytest.mark.parametrize(
    "override, expected",
    [
        ("optimizer.lr=1e-5", 1e-5),
        ("model.path=owner/name", "owner/name"),
        ('data.train=["a.jsonl", "b.jsonl"]', ("a.jsonl", "b.jsonl")),
        ('optimizer={"lr": 3e-4}', 3e-4),
    ],
)
def test_an_overrides_value_is_json_or_else_a_string(override, expected):
    config, _ = load_config({}, [override])
    assert expected in (config.optimizer.lr, config.model.path, config.data.train)


def test_null_takes_a_key_or_a_section_out_of_the_file():
    config, origins = load_config({"zero": {"stage": 3}, "parallel": {"engine": "ddp"}}, ["zero=null"])
    assert config.zero == RunConfig().zero and origins["zero.stage"] == "default"


@pytest.mark.parametrize("text", ["lr", "=3", "optimizer..lr=1"])
def test_an_override_that_is_no_key_and_value_is_refused(text):
    with pytest.raises(ConfigError, match="key=value"):
        load_config({}, [text])


def test_an_override_inside_a_value_is_refused():
    with pytest.raises(ConfigError, match="batch is 3"):
        load_config({"batch": 3}, ["batch.micro_size=1"])


@pytest.mark.parametrize(
    "text, found",
    [
        ('{\n "run" 1}', "line 2, column 8"),
        ('{"run": {"seed": 1}, "run": {}}', "run occurs twice"),
        ('{"optimizer": {"lr": NaN}}', "NaN is not a number"),
        ("[1]", "holds array"),
    ],
)
def test_json_that_is_not_strict_is_refused_with_its_place(tmp_path, text, found):
    path = write(tmp_path, "run.json", text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(path) in caught.value.found and found in caught.value.found


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.json"):
        load_config(tmp_path / "nowhere.json")


def test_an_exponent_writes_an_integer_as_in_json_schema(tmp_path):
    config, _ = load_config(write(tmp_path, "run.json", '{"zero": {"reduce_bucket_size": 5e8}}'))
    assert config.zero.reduce_bucket_size == 500_000_000


def test_a_config_made_in_python_keeps_what_was_left_open():
    config, origins = load_config(RunConfig.model_validate_json('{"batch": {"micro_size": 2}}'))
    assert config.batch.micro_size == 2
    assert origins["batch.micro_size"] == "RunConfig" and origins["batch.accumulation"] == "default"


@pytest.mark.case("A6")
@table(
    "key, meant",
    [
        ("zero_optimisation", "zero"),
        ("gradient_cliping", "optimizer.max_grad_norm"),
        ("stage3_gather_16bit_weights_on_model_save", "checkpoint.export"),
        ("per_device_train_batch_size", "batch.micro_size"),
        ("train_micro_batch_size_per_gpu", "batch.micro_size"),
        ("gradient_accumulation_steps", "batch.accumulation"),
        ("learning_rate", "optimizer.lr"),
        ("lr_scheduler_type", "schedule.name"),
        ("num_train_epochs", "run.epochs"),
        ("bf16", "precision.dtype"),
        ("micro_size", "batch.micro_size"),
        ("precison", "precision"),
    ],
)
def test_an_unknown_key_is_refused_with_the_key_that_was_meant(key, meant):
    (error,) = faults({key: 1})
    assert key in error.found and meant in error.change


@pytest.mark.case("A6")
def test_an_unknown_key_in_a_section_is_refused_with_the_nearest(tmp_path):
    (error,) = faults({"zero": {"stge": 3}})
    assert error.found == "zero.stge is no key in config" and "zero.stage" in error.change


@table(
    "raw, key, spelling",
    [
        ({"batch": {"micro_size": "8"}}, "batch.micro_size", "write 8, without quotes"),
        ({"optimizer": {"lr": "1e-4"}}, "optimizer.lr", "write 1e-4, without quotes"),
        ({"checkpoint": {"export": "True"}}, "checkpoint.export", "write true, without quotes"),
        ({"zero": {"stage": "3"}}, "zero.stage", "write 3, without quotes"),
        ({"model": {"revision": 1}}, "model.revision", 'write "1", with quotes'),
        ({"optimizer": {"name": "AdamW"}}, "optimizer.name", "did you mean 'adamw'?"),
        ({"batch": {"micro_size": "auto"}}, "batch.micro_size", "leave batch.micro_size out"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas", "default [0.9, 0.999]"),
        ({"optimizer": {"lr": None}}, "optimizer.lr", "leave optimizer.lr out for its default, 2e-05"),
        ({"batch": 8}, "batch", "an object"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_its_right_spelling(raw, key, spelling):
    (error,) = faults(raw)
    assert error.found.startswith(f"{key} is ") and spelling in error.change


@pytest.mark.case("A5")
@pytest.mark.parametrize("key", ["reduce_bucket_size", "allgather_bucket_size", "sub_group_size"])
def test_an_empty_bucket_is_refused(key):
    assert any(f"zero.{key} is 0" in error.found for error in faults({"zero": {key: 0}}))


def test_all_faults_are_reported_together_and_a_wrong_keys_default_is_not_blamed():
    raw = {
        "zero": {"stage": "3", "offload_param": {"device": "cpu"}},
        "optimizer": {"betas": [0.9, 1.0]},
        "learning_rate": 1e-4,
        "model": {"pad_embeddings_to_multiple_of": 8},
    }
    found = [error.found for error in faults(raw)]
    assert len(found) == 4
    for key in ("zero.stage", "optimizer.betas", "learning_rate", "model.pad_embeddings_to_multiple_of"):
        assert any(key in text for text in found)


def test_what_could_be_read_is_kept_beside_the_faults():
    loaded = read_config({"batch": {"micro_size": "8", "accumulation": 2}})
    assert loaded.config.batch.accumulation == 2 and loaded.config.batch.micro_size is None
    assert len(loaded.errors) == 1


BEYOND = {
    "run.seed": (-1, 2**32),
    "run.max_steps": (0, 10**30),
    "run.epochs": (0, 10**30),
    "run.output_dir": ("",),
    "optimizer.lr": (0, 1e99, 1e300),
    "optimizer.eps": (0, 1e-40, 2),
    "optimizer.weight_decay": (-1, 1e99),
    "optimizer.max_grad_norm": (-1, 1e99),
    "data.train": ([], "", [""]),
    "data.max_length": (1, 10**30),
    "model.path": ("",),
    "batch.micro_size": (0, 10**30),
    "zero.reduce_bucket_size": (0, 10**30),
    "zero.stage3_max_live_parameters": (-1, 2**63),
    "zero.aio.block_size": (0, 2**31),
    "ddp.bucket_cap_mb": (0, 2**63),
    "precision.loss_scale.initial_scale_power": (-1, 2000),
}


@table("key, item", [(key, item) for key, items in BEYOND.items() for item in items])
def test_a_value_that_torch_or_deepspeed_would_choke_on_is_refused_naming_the_key(key, item):
    assert any(f"{key} is {json.dumps(item)}" in error.found for error in faults({}, f"{key}={json.dumps(item)}"))


def test_every_number_of_the_schema_has_two_ends():
    def ends(field):
        if "anyOf" in field:
            return all(ends(part) for part in field["anyOf"])
        low, high = {"minimum", "exclusiveMinimum"} & set(field), {"maximum", "exclusiveMaximum"} & set(field)
        return field.get("type") not in ("integer", "number") or "enum" in field or bool(low and high)

    sections = RunConfig.model_json_schema()["$defs"]
    open_ended = [
        (name, key) for name, part in sections.items() for key, f in part["properties"].items() if not ends(f)
    ]
    assert open_ended == []


@pytest.mark.parametrize("betas", [[0.9], [0.9, 0.99, 0.999]])
def test_a_list_of_another_length_is_told_how_many_numbers_it_takes(betas):
    (error,) = faults({"optimizer": {"betas": betas}})
    assert error.rule == "optimizer.betas must be a list of 2 numbers"


@pytest.mark.parametrize(
    "content, found",
    [
        ("[" * 100_000, "recursion"),
        ('{"run": {"seed": ' + "9" * 5000 + "}}", "digits"),
        ('{"run": {"output_dir": "\\ud800"}}', "Invalid JSON"),
    ],
)
def test_json_that_python_or_pydantic_would_stumble_over_is_a_config_error(tmp_path, content, found):
    with pytest.raises(ConfigError, match=found):
        load_config(write(tmp_path, "run.json", content))


def test_a_config_that_is_missing_or_no_utf8_says_so_once(tmp_path):
    with pytest.raises(ConfigError) as missing:
        load_config(tmp_path / "nope.json")
    assert missing.value.found == f"{tmp_path / 'nope.json'}: No such file or directory"
    path = tmp_path / "latin.json"
    path.write_bytes('{"a": "é"}'.encode("latin1"))
    with pytest.raises(ConfigError, match="is not UTF-8 text: byte 0xe9 at position 7") as latin:
        load_config(path)
    assert latin.value.change == f"save {path} as UTF-8"


@pytest.mark.parametrize(
    "override, stage, device",
    [("zero.stage=1", 1, "cpu"), ('zero={"stage": 1}', 1, "cpu"), ("zero=null", 2, "none"), ("zero={}", 2, "none")],
)
def test_an_object_on_the_command_line_sets_the_keys_it_names_and_null_empties_the_section(override, stage, device):
    config, _ = load_config({"zero": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}, [override])
    assert (config.zero.stage, config.zero.offload_optimizer.device) == (stage, device)


@pytest.mark.parametrize(
    "override", ['parallel.tp_plan={"a.*.b": "colwise"}', 'parallel={"tp": 2, "tp_plan": {"a.*.b": "colwise"}}']
)
def test_names_with_dots_inside_an_overrides_value_stay_whole_and_replace_the_files(override):
    config, origins = load_config({"parallel": {"tp": 2, "tp_plan": {"c.d": "rowwise"}}}, [override])
    assert config.parallel.tp_plan == {"a.*.b": "colwise"}
    assert origins["parallel.tp_plan"] == '--set (config says {"c.d": "rowwise"})'


def test_one_entry_of_a_mapping_of_names_cannot_be_set_by_its_own_key():
    with pytest.raises(ConfigError) as caught:
        load_config({}, ["parallel.tp_plan.a.b=colwise"])
    assert caught.value.change == """write --set 'parallel.tp_plan={"a.b": "..."}' with all entries"""


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ({"a.b": None}, 'parallel.tp_plan["a.b"] is null (null)'),
        ({"a.b": 3}, 'parallel.tp_plan["a.b"] is 3 (integer)'),
        ({"": "colwise"}, 'parallel.tp_plan[""] has no name'),
    ],
)
def test_a_wrong_entry_in_a_mapping_of_names_is_named_with_what_to_write(entry, found):
    parallel = {"tp": 2, "tp_plan": entry}
    for place, given in (("config", [{"parallel": parallel}]), ("--set", [{}, f"parallel={json.dumps(parallel)}"])):
        (error,) = faults(*given)
        assert error.found == f"{found} in {place}"
        assert "remove the entry" in error.change and '"colwise", "rowwise", "replicate"' in error.change
