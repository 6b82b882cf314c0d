"""A process that computes, reads, writes or waits for a disk is not idle; one that sleeps is."""

import os
import subprocess
import threading
import time

import pytest

from ds_trainer.health import activity
from ds_trainer.health.activity import Activity

pytestmark = pytest.mark.alone

SPIN = "import time\nend = time.monotonic() + 20\nwhile time.monotonic() < end: pass"


@pytest.fixture
def idle_after():
    """`idle_after(work)`: for how long this process seems idle after `work()` has run for a while in another thread."""

    def measure(work, seconds=0.6):
        stop = threading.Event()
        worker = threading.Thread(target=work, args=(stop,))
        watch = Activity()
        time.sleep(0.3)
        assert watch.idle_s() >= 0.3
        worker.start()
        time.sleep(seconds)
        idle_s = watch.idle_s()
        stop.set()
        worker.join()
        return idle_s

    return measure


def test_sleeping_is_idle(idle_after):
    assert idle_after(lambda stop: stop.wait()) >= 0.9


def test_a_loop_of_short_sleeps_is_idle(idle_after):
    def doze(stop):
        while not stop.is_set():
            time.sleep(0.1)

    assert idle_after(doze) >= 0.9


def test_computing_is_not(idle_after):
    def compute(stop):
        while not stop.is_set():
            sum(range(1000))

    assert idle_after(compute) == 0.0


def test_writing_is_not_however_little_it_computes(idle_after, tmp_path, monkeypatch):
    monkeypatch.setattr(activity, "_OWN_LOAD", 10.0)

    def write(stop):
        with (tmp_path / "file").open("wb", buffering=0) as file:
            while not stop.wait(0.05):
                file.write(bytes(10_000))

    assert idle_after(write) == 0.0


def test_a_child_that_goes_on_computing_keeps_its_parent_from_being_idle():
    child = subprocess.Popen(["python", "-c", SPIN])
    try:
        watch = Activity()
        for _ in range(3):
            time.sleep(0.4)
            idle_s = watch.idle_s()
        assert idle_s == 0.0
    finally:
        child.kill()
        child.wait()


def test_a_thread_that_waits_for_a_disk_look_after_look_is_not(monkeypatch):
    watch = Activity()
    monkeypatch.setattr(activity, "_waits_for_disk", lambda pid: pid == os.getpid())
    idle_s = []
    for _ in range(3):
        time.sleep(0.1)
        idle_s.append(watch.idle_s())
    assert idle_s[0] > 0.05 and idle_s[-1] == 0.0


def test_one_moment_of_work_or_of_waiting_for_a_disk_is_idle_all_the_same(monkeypatch):
    watch = Activity()
    began = time.monotonic()
    for look in range(4):
        time.sleep(0.5)
        monkeypatch.setattr(activity, "_waits_for_disk", lambda pid, look=look: pid == os.getpid() and look == 1)
        if look == 2:
            spin_until = time.process_time() + 0.005
            while time.process_time() < spin_until:
                pass
        idle_s = watch.idle_s()
    assert idle_s > 0.9 * (time.monotonic() - began)


def test_a_suspended_machine_says_nothing(monkeypatch):
    watch = Activity()
    clock = time.monotonic()
    monkeypatch.setattr(activity.time, "monotonic", lambda: clock + 3600)
    assert watch.idle_s() == 0.0
