"""The shipped lists of DeepSpeed's keys are those that the installed DeepSpeed reads."""

import copy

from ds_trainer.config.deepspeed.native_keys import REFUSED, SECTIONS, TOP_LEVEL, ReadRecorder, unified_keys
from tests.helpers.deepspeed_reads import recorded_keys


def test_the_shipped_lists_are_what_the_installed_deepspeed_reads():
    recorded = recorded_keys()
    assert sorted(TOP_LEVEL) == recorded.pop("")
    assert {section: sorted(keys) for section, keys in SECTIONS.items()} == recorded


def test_every_key_that_we_speak_of_is_one_of_deepspeeds():
    for key in [*REFUSED, *unified_keys()]:
        section, _, name = key.rpartition(".")
        assert name in (SECTIONS[section] if section else TOP_LEVEL), key


def test_a_recorder_names_the_keys_that_nobody_read():
    recorder = ReadRecorder({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5})
    inner = copy.copy(recorder)
    assert inner.get("a") == 1 and inner["b"] == 2 and "c" in inner and "d" in inner.keys()  # noqa: SIM118
    assert recorder.unread() == ["e"]
