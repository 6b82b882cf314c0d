"""The end of another process is known at once, and so is where it was."""

import errno
import os
import subprocess
import sys
import time

import pytest

from ds_trainer.health.local_peers import LocalPeers, PeerAddress
from ds_trainer.health.shared_status import SharedStatus
from ds_trainer.health.status import RankPosition

pytestmark = pytest.mark.alone

CHILD = """
import time
from ds_trainer.health.shared_status import SharedStatus
from ds_trainer.health.status import RankPosition
shared = SharedStatus()
for step in (1, 2, 3):
    shared.write(RankPosition(f"step {step}", step, "samples [3, 7]", guard_depth=1))
print(shared.fd, flush=True)
time.sleep(100)
"""


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    yield process, int(process.stdout.readline())
    process.kill()
    process.wait()


def peers_with(child, machine=None):
    process, status_fd = child
    mine = PeerAddress.of_this_process(SharedStatus().fd)
    return LocalPeers([mine, PeerAddress(machine or mine.machine, process.pid, status_fd)], rank=0)


def seconds_until(condition):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + 10
    return time.monotonic() - began


def forbidden(pid):
    raise OSError(errno.ENOSYS, "no such call")


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_a_process_that_is_killed_leaves_its_last_position(child, kernel, monkeypatch):
    if kernel == "old":
        monkeypatch.setattr(os, "pidfd_open", forbidden)
    peers = peers_with(child)
    peers.wait(0)
    assert peers.ended == {} and peers.local == {1}
    child[0].kill()
    assert seconds_until(lambda: peers.wait(0.1) or peers.ended) < 2
    assert peers.ended == {1: RankPosition("step 3", 3, "samples [3, 7]", guard_depth=1)}
    peers.close()


def test_a_process_that_ended_before_it_was_looked_for_is_known_to_have_ended(child):
    child[0].kill()
    child[0].wait()
    assert peers_with(child).ended == {1: None}


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
