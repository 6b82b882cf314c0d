"""What another thread is doing, read off its stack."""

import contextlib
import gc
import sys
import threading
import weakref
from importlib.util import find_spec

import pytest

from ds_trainer.health import stacks
from ds_trainer.health.expected_wait import expected_wait, in_expected_wait
from tests.helpers.table import table


@pytest.fixture
def sleeper():
    """A thread that stands still in `user_code`, below a function of a library."""
    stop = threading.Event()

    def user_code():
        stop.wait()

    thread = threading.Thread(target=user_code)
    thread.start()
    yield thread
    stop.set()
    thread.join()


def test_the_innermost_code_that_is_no_librarys_is_named(sleeper):
    frame = stacks.frame_of(sleeper.ident)
    assert stacks.doing(frame).startswith("user_code() at ") and "test_stacks.py:" in stacks.doing(frame)
    assert "in user_code\n    stop.wait()" in stacks.stack_text(frame)
    assert not stacks.waits_for_ranks(frame) and not stacks.is_debugged(frame)


def test_of_a_thread_that_has_ended_the_main_thread_is_looked_at():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert stacks.frame_of(thread.ident).f_back is sys._getframe()


def test_a_look_at_a_thread_keeps_nothing_of_it_alive():
    class Logits:
        """What a step has in a local variable."""

    alive = []
    ready, stop = threading.Event(), threading.Event()

    def step():
        logits = Logits()
        alive.append(weakref.ref(logits))
        ready.set()
        stop.wait()

    thread = threading.Thread(target=step)
    thread.start()
    ready.wait()
    gc.disable()
    try:
        assert "in step" in stacks.stack_text(stacks.frame_of(thread.ident))
        stop.set()
        thread.join()
        assert alive[0]() is None
    finally:
        gc.enable()


def frame_in(filename):
    """A frame of code that seems to come from a file."""
    scope = {}
    exec(compile("import sys\ndef f(): return sys._getframe()", filename, "exec"), scope)
    return scope["f"]()


@table(
    "filename, waits",
    [
        ("/lib/torch/distributed/distributed_c10d.py", True),
        ("/lib/torch/autograd/graph.py", True),
        ("/lib/deepspeed/comm/comm.py", True),
        ("/lib/torch/utils/data/dataloader.py", False),
        ("/home/me/train.py", False),
        (find_spec("ds_trainer.parallel.pipeline.runtime").origin, True),
        (find_spec("ds_trainer.engines.deepspeed.engine").origin, False),
        (find_spec("ds_trainer.config.deepspeed.arguments").origin, False),
    ],
)
def test_standing_still_in_a_collective_is_waiting_for_ranks(filename, waits):
    assert stacks.waits_for_ranks(frame_in(filename)) == waits


def test_a_person_at_a_debugger_is_seen():
    assert stacks.is_debugged(frame_in("/usr/lib/python3/bdb.py"))


def test_the_call_site_is_outside_of_the_package_and_of_context_managers():
    sites = []

    @contextlib.contextmanager
    def context():
        yield
        sites.append(stacks.call_site(frame_in(stacks.__file__)))

    with context():
        pass
    assert "test_stacks.py:" in sites[0]


def test_expected_waits_may_be_nested():
    with expected_wait(), expected_wait():
        assert in_expected_wait()
    assert not in_expected_wait()
