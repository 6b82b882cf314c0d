"""Whether a process of this machine has ended."""

import subprocess
import sys
import time

import psutil

from ds_trainer.processes import has_ended


def test_a_process_has_ended_before_and_after_its_parent_has_read_its_exit_code():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = psutil.Process(child.pid)
    assert not has_ended(process)
    child.kill()
    deadline = time.monotonic() + 10
    while not has_ended(process):
        assert time.monotonic() < deadline
    child.wait()
    assert has_ended(process)
