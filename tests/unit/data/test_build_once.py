"""One process builds, the others wait for as long as it takes, and none waits for the dead."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from ds_trainer.data.build_once import build_once
from ds_trainer.errors import DataError
from ds_trainer.launch import signals

spawn = multiprocessing.get_context("spawn")
fork = multiprocessing.get_context("fork")


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def build_slowly(folder: Path, check_stop) -> None:
    (folder / f"by-{os.getpid()}").touch()
    time.sleep(1.0)
    (folder / "complete").touch()


def build_for_ever(folder: Path, check_stop) -> None:
    (folder / "begun").touch()
    time.sleep(600)


def take_part(target: Path) -> None:
    build_once(target, build_slowly)
    assert (target / "complete").exists()


def build_until_stopped(folder: Path, check_stop) -> None:
    (folder / f"begun-by-{os.getpid()}").touch()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        check_stop()
        time.sleep(0.01)


def take_part_until_stopped(target: Path) -> None:
    with signals.listening():
        target.with_name(f"ready-{os.getpid()}").touch()
        build_once(target, build_until_stopped)


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

    def fail(folder, check_stop):
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
    def fail(folder, check_stop):
        raise DataError("found", "rule", "change")

    with pytest.raises(DataError):
        build_once(tmp_path / "data", fail)
    build_once(tmp_path / "data", lambda folder, _: (folder / "complete").touch())
    assert (tmp_path / "data" / "complete").exists()


def test_what_exists_is_not_built_again(tmp_path):
    build_once(tmp_path / "data", lambda folder, _: None)
    build_once(tmp_path / "data", lambda folder, _: pytest.fail("built again"))


@pytest.mark.parametrize("rank, says", [("0", True), ("1", False)])
def test_only_rank_0_says_that_it_waits_and_only_when_the_builder_is_slow(tmp_path, monkeypatch, capfd, rank, says):
    def take_part(patience):
        monkeypatch.setattr("ds_trainer.data.build_once.QUIET_WAIT_S", patience)
        monkeypatch.setenv("RANK", rank)
        target, begun = tmp_path / str(patience), threading.Event()

        def build(folder, check_stop):
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


@pytest.mark.case("F10")
@pytest.mark.parametrize("who", ["builder", "waiter"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_process_ends_all_that_build_or_wait_and_the_next_run_builds(tmp_path, who, number):
    target = tmp_path / "data"
    processes = [fork.Process(target=take_part_until_stopped, args=(target,)) for _ in range(3)]
    for process in processes:
        process.start()
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 3 and list(tmp_path.glob("data.part/begun-by-*")))
    (builder,) = (int(path.name.split("-")[-1]) for path in tmp_path.glob("data.part/begun-by-*"))
    waiter = next(process.pid for process in processes if process.pid != builder)
    time.sleep(0.5)  # the other two now wait
    began = time.monotonic()
    os.kill(builder if who == "builder" else waiter, number)
    for process in processes:
        process.join(20)
    assert time.monotonic() - began < 5
    assert [process.exitcode for process in processes] == [signals.EXIT_CODE] * 3
    assert not target.exists() and not target.with_suffix(".part").exists()
    build_once(target, lambda folder, check_stop: (check_stop(), (folder / "complete").touch()))
    assert (target / "complete").exists()
    assert not target.with_suffix(".stop").exists()


def build_deaf(folder: Path, check_stop) -> None:
    (folder / f"begun-by-{os.getpid()}").touch()
    time.sleep(1.5)


def take_part_deaf(target: Path) -> None:
    with signals.listening():
        build_once(target, build_deaf)
        assert target.is_dir()


@pytest.mark.case("F10")
def test_a_stop_that_comes_too_late_for_the_builder_leaves_all_with_the_whole_folder(tmp_path):
    """Else one process would leave, and the others would wait for it at their next consensus."""
    target = tmp_path / "data"
    processes = [fork.Process(target=take_part_deaf, args=(target,)) for _ in range(2)]
    for process in processes:
        process.start()
    wait_for(lambda: list(tmp_path.glob("data.part/begun-by-*")))
    (builder,) = (int(path.name.split("-")[-1]) for path in tmp_path.glob("data.part/begun-by-*"))
    time.sleep(0.5)
    os.kill(next(process.pid for process in processes if process.pid != builder), signal.SIGTERM)
    wait_for((tmp_path / "data.stop").exists, 5)
    for process in processes:
        process.join(20)
    assert [process.exitcode for process in processes] == [0, 0]


def build(folder: Path, check_stop) -> None:
    (folder / "numbers").write_bytes(b"0123456789")


def truncate(path):
    os.truncate(path, 4)


def empty(path):
    path.write_bytes(b"")


def remove(path):
    path.unlink()


@pytest.mark.parametrize("name", ["numbers", "sizes.json"])
@pytest.mark.parametrize("harm", [truncate, empty, remove])
def test_a_folder_that_lost_something_is_made_anew_and_that_is_said(tmp_path, capfd, harm, name):
    target = tmp_path / "data"
    build_once(target, build)
    harm(target / name)
    build_once(target, build)
    assert (target / "numbers").read_bytes() == b"0123456789"
    told = capfd.readouterr().err
    assert f"warning: {target / name} " in told and "it is rebuilt" in told
    build_once(target, lambda folder, _: pytest.fail("built again"))
