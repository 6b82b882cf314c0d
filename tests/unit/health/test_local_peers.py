"""The end of another process is known at once, and so is where it was."""

import errno
import os
import subprocess
import sys
import time

import pytest

from ds_trainer.health.local_peers import Introduction, Peers
from ds_trainer.health.rank_position import Whereabouts
from ds_trainer.health.shared_status import BlackBox

CHILD = """
import time
from ds_trainer.health.shared_status import BlackBox
from ds_trainer.health.rank_position import Whereabouts
box = BlackBox()
for step in (1, 2, 3):
    box.write(Whereabouts(f"step {step}", step, "samples [3, 7]", guarded=1))
print(box.fd, flush=True)
time.sleep(100)
"""


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    yield process, int(process.stdout.readline())
    process.kill()
    process.wait()


def peers_with(child, machine=None):
    process, box = child
    mine = Introduction.of_this_process(BlackBox().fd)
    return Peers([mine, Introduction(machine or mine.machine, process.pid, box)], rank=0)


def seconds_until(condition):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + 10
    return time.monotonic() - began


def forbidden(pid):
    raise OSError(errno.ENOSYS, "no such call")


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_a_process_that_is_killed_leaves_its_last_words(child, kernel, monkeypatch):
    if kernel == "old":
        monkeypatch.setattr(os, "pidfd_open", forbidden)
    peers = peers_with(child)
    peers.wait(0)
    assert peers.gone == {} and peers.local == {1}
    child[0].kill()
    assert seconds_until(lambda: peers.wait(0.1) or peers.gone) < 2
    assert peers.gone == {1: Whereabouts("step 3", 3, "samples [3, 7]", guarded=1)}
    peers.close()


def test_a_process_that_ended_before_it_was_looked_for_is_gone(child):
    child[0].kill()
    child[0].wait()
    assert peers_with(child).gone == {1: None}


def test_processes_of_other_machines_are_not_looked_for(child):
    peers = peers_with(child, machine="another")
    assert peers.local == set()


def test_waiting_ends_when_woken_and_when_the_time_is_over(child):
    peers = peers_with(child)
    peers.wake()
    began = time.monotonic()
    peers.wait(5)
    assert time.monotonic() - began < 1
    peers.wait(0.2)
    assert time.monotonic() - began >= 0.2
    peers.close()
