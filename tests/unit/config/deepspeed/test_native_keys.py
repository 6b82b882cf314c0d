"""The shipped table of DeepSpeed's keys and types is that of the installed DeepSpeed, and values are held to it."""

import copy

import pytest
from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS

from ds_trainer.config.deepspeed.native_keys import (
    GONE,
    REFUSED,
    SECTIONS,
    TOP_LEVEL,
    ReadRecorder,
    check_native,
    unified_keys,
)
from ds_trainer.config.deepspeed.native_types import admits
from ds_trainer.config.keys import assign
from ds_trainer.engines.deepspeed.make_keys import TARGET, as_text, make_keys
from tests.helpers.table import table

KINDS = {
    f"{section}.{key}".removeprefix("."): kind for section, kinds in SECTIONS.items() for key, kind in kinds.items()
}
KINDS |= TOP_LEVEL
OF_A_WRONG_TYPE = {"boolean": 3.5, "integer": 3.5, "number": "x", "string": 3.5, "array": 3.5, "object": 3.5}


@pytest.mark.case("N2")
def test_the_shipped_table_is_made_of_the_installed_deepspeed():
    assert TARGET.read_text() == as_text(make_keys()), "make deepspeed-keys writes it"


def test_every_key_that_we_speak_of_is_one_of_deepspeeds():
    assert [key for key in [*REFUSED, *unified_keys()] if key not in KINDS] == []


def test_a_recorder_names_the_keys_that_nobody_read():
    recorder = ReadRecorder({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5})
    inner = copy.copy(recorder)
    assert inner.get("a") == 1 and inner["b"] == 2 and "c" in inner and "d" in inner.keys()  # noqa: SIM118
    assert recorder.unread() == ["e"]


def faults(key, item):
    tree = {}
    assign(tree, key, item)
    return list(check_native(tree))


@pytest.mark.case("N2")
@table(
    ("key", "item", "found", "rule", "change"),
    {
        "text for a count": (
            "steps_per_print",
            "10",
            '"10" (string)',
            "an integer, at least 1",
            "write 10, without quotes",
        ),
        "text for a switch": (
            "comms_logger.enabled",
            "True",
            '"True" (string)',
            "a boolean",
            "write true, without quotes",
        ),
        "a number for a switch": (
            "flops_profiler.enabled",
            1,
            "1 (integer)",
            "a boolean",
            "set it to a boolean, or remove it for DeepSpeed's own value",
        ),
        "a number for text": (
            "wandb.project",
            7,
            "7 (integer)",
            "a string",
            'write "7", with quotes',
        ),
        "a count out of bounds": (
            "zero_optimization.zenflow.topk_ratio",
            1.5,
            "1.5 (number)",
            "a number, above 0.0, below 1.0",
            "set it to a number, above 0.0, below 1.0, or remove it for DeepSpeed's own value",
        ),
        "a choice that is none": (
            "data_types.grad_accum_dtype",
            "fp8",
            '"fp8" (string)',
            'one of "fp32", "float32", "float", "torch.float32", "fp16", "float16", "half", "torch.float16", "bf16", '
            '"bfloat16", "torch.bfloat16"',
            None,
        ),
        "items of a list": (
            "torch_autocast.lower_precision_safe_modules",
            ["torch.nn.Linear", 3],
            '["torch.nn.Linear", 3] (array)',
            "an array of strings",
            None,
        ),
        "null where there is no null": ("dump_state", None, "null (null)", "a boolean", None),
        "a value for a section": ("comms_logger", True, "true (boolean)", "an object", None),
        "a section in a section": ("timers.throughput", 3, "3 (integer)", "an object", None),
        "an object for a value": ("steps_per_print.every", 3, "{} (object)", "an integer, at least 1", None),
    }.values(),
)
def test_a_value_of_a_type_that_deepspeed_does_not_take_is_refused(key, item, found, rule, change):
    (error,) = faults(key, item)
    named = "steps_per_print" if key == "steps_per_print.every" else key
    assert error.found == f"native.deepspeed.{named} is {found}"
    assert error.rule == f"DeepSpeed's {named} is {rule}"
    assert change in (None, error.change)


@pytest.mark.case("N2")
def test_every_key_that_is_passed_on_is_held_to_its_type():
    passed_on = [key for key in KINDS if key not in REFUSED and key.partition(".")[0] not in REFUSED]
    unchecked = [key for key in passed_on if not faults(key, OF_A_WRONG_TYPE[KINDS[key]["type"][0]])]
    assert len(passed_on) > 100 and unchecked == []


@pytest.mark.case("N2")
@pytest.mark.parametrize(
    ("key", "item"),
    {
        "a count in JSON's other spelling": ("zero_optimization.sub_group_size", 1e9),
        "a whole number for a number": ("gradient_predivide_factor", 2),
        "null where DeepSpeed has it": ("wandb.group", None),
        "a list of names": ("zero_optimization.leaf_module.classes", ["MixtralSparseMoeBlock"]),
        "one name for a list": ("zero_optimization.leaf_module.classes", "MixtralSparseMoeBlock"),
        "auto where DeepSpeed has a value of that name": ("zero_optimization.zenflow.select_strategy", "auto"),
    }.values(),
)
def test_what_deepspeed_takes_is_accepted(key, item):
    assert faults(key, item) == []


@pytest.mark.case("N2")
def test_a_misspelt_key_deep_in_a_section_is_no_key():
    (error,) = faults("comms_logger.enabeld", True)
    assert error.found == "native.deepspeed.comms_logger.enabeld is no key of DeepSpeed in comms_logger"
    assert error.change == "did you mean comms_logger.enabled?"


@pytest.mark.case("M3")
def test_a_feature_that_deepspeed_has_removed_is_named():
    removed = [*_REMOVED_TOP_LEVEL_CONFIG_KEYS, *(f"zero_optimization.{name}" for name in _REMOVED_ZERO_CONFIG_KEYS)]
    assert sorted(GONE) == sorted(removed)
    (error,) = faults("compression_training.weight_quantization", {"shared_parameters": {"enabled": True}})
    assert error.found == "native.deepspeed.compression_training is set"
    assert error.rule == "DeepSpeed no longer has its compression library"
    assert [faults(key, 1)[0].rule for key in GONE] == [f"DeepSpeed no longer has {what}" for what in GONE.values()]


@pytest.mark.case("M3")
@pytest.mark.parametrize("key", ["_comment", "//", "zero_optimization._comment", "comment"])
def test_a_remark_is_no_key(key):
    (error,) = faults(key, "as in the paper")
    assert error.change == "remove it: JSON has no comments, and every key is read"


def test_a_boolean_is_no_number_and_a_fraction_no_count():
    kind = {"type": ["integer"]}
    assert [admits(kind, item) for item in (1, 1.0, True, 1.5, "1", None, float("inf"))] == [True, True] + [False] * 5
