"""One process builds, the others wait for as long as it takes, and none waits for the dead."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from ds_trainer.data import once
from ds_trainer.data.once import build_once
from ds_trainer.errors import DataError

spawn = multiprocessing.get_context("spawn")


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def build_slowly(folder: Path) -> None:
    (folder / f"by-{os.getpid()}").touch()
    time.sleep(1.0)
    (folder / "complete").touch()


def build_for_ever(folder: Path) -> None:
    (folder / "begun").touch()
    time.sleep(600)


def take_part(target: Path) -> None:
    build_once(target, build_slowly)
    assert (target / "complete").exists()


@pytest.mark.case("F7")
def test_of_several_processes_one_builds_and_all_see_the_whole_folder(tmp_path):
    target = tmp_path / "data"
    processes = [spawn.Process(target=take_part, args=(target,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(list(target.glob("by-*"))) == 1


@pytest.mark.case("F7")
def test_a_killed_builder_is_replaced_and_leaves_nothing_behind(tmp_path):
    target = tmp_path / "data"
    builder = spawn.Process(target=build_once, args=(target, build_for_ever))
    builder.start()
    wait_for((tmp_path / "data.part" / "begun").exists)
    waiter = threading.Thread(target=build_once, args=(target, build_slowly))
    waiter.start()
    time.sleep(0.5)
    assert waiter.is_alive() and not target.exists()
    os.kill(builder.pid, signal.SIGKILL)
    waiter.join(10)
    assert (target / "complete").exists()
    assert not (target / "begun").exists()
    builder.join()


def test_who_waited_for_a_failing_builder_gets_its_text_within_seconds_and_does_not_build(tmp_path):
    target, go, fault = tmp_path / "data", threading.Event(), DataError("found", "rule", "change")
    errors, builds = [], []

    def fail(folder):
        builds.append(folder)
        go.wait()
        raise fault

    def take_part():
        try:
            build_once(target, fail)
        except DataError as error:
            errors.append(error)

    threads = [threading.Thread(target=take_part) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: builds)
    time.sleep(0.3)  # the other two now wait
    go.set()
    for thread in threads:
        thread.join(10)
    assert [str(error) for error in errors] == [str(fault)] * 3
    assert len(builds) == 1
    assert not target.exists()


def test_a_later_call_tries_again_after_a_failure(tmp_path):
    def fail(folder):
        raise DataError("found", "rule", "change")

    with pytest.raises(DataError):
        build_once(tmp_path / "data", fail)
    build_once(tmp_path / "data", lambda folder: (folder / "complete").touch())
    assert (tmp_path / "data" / "complete").exists()


def test_what_exists_is_not_built_again(tmp_path):
    build_once(tmp_path / "data", lambda folder: None)
    build_once(tmp_path / "data", lambda folder: pytest.fail("built again"))


@pytest.mark.parametrize("rank, says", [("0", True), ("1", False)])
def test_only_rank_0_says_that_it_waits_and_only_when_the_builder_is_slow(tmp_path, monkeypatch, capfd, rank, says):
    def take_part(patience):
        monkeypatch.setattr(once, "PATIENCE_S", patience)
        monkeypatch.setenv("RANK", rank)
        target, begun = tmp_path / str(patience), threading.Event()

        def build(folder):
            begun.set()
            time.sleep(0.5)

        builder = threading.Thread(target=build_once, args=(target, build))
        builder.start()
        begun.wait()
        build_once(target, build)
        builder.join()
        return "waiting for another process" in capfd.readouterr().err

    assert take_part(0.1) == says
    assert not take_part(10.0)
