"""What a thread is doing, read from its stack by another thread. Pure."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))
# A thread that stands still in one of these waits for other ranks. Autograd: backward waits for DDP's gradients.
_WAITS = tuple(f"{os.sep}{name}{os.sep}" for name in ("torch/distributed", "torch/autograd", "deepspeed"))
_OWN_WAITS = os.path.join(_PACKAGE, "parallel", "pipeline", "")
_DEBUGGERS = ("bdb.py", "pdb.py")
_SHOWN = 8


def frame_of(thread_id: int) -> FrameType:
    """The innermost frame of a thread, or of the main thread once that one has ended."""
    frames = sys._current_frames()
    try:
        # At the interpreter's end none of them has a frame; then this function's own frame serves.
        return frames.get(thread_id) or frames.get(threading.main_thread().ident or 0) or sys._getframe()
    finally:
        # This function's own frame is among them and refers to them: a cycle that would keep every thread's tensors.
        frames.clear()


def waits_for_ranks(frame: FrameType) -> bool:
    """Whether a thread that stands still at `frame` is inside a collective."""
    name = frame.f_code.co_filename
    if name.startswith(_PACKAGE):
        return name.startswith(_OWN_WAITS)
    return any(part in name for part in _WAITS)


def is_debugged(frame: FrameType) -> bool:
    """Whether this thread is being debugged."""
    return any(os.path.basename(f.f_code.co_filename) in _DEBUGGERS for f in _outwards(frame))


def call_site(frame: FrameType) -> str:
    """`file:line` of the innermost code outside of this package, which called into it."""
    return _place(_innermost(frame, lambda name: not name.startswith(_PACKAGE) and name != contextlib.__file__))


def doing(frame: FrameType) -> str:
    """`function() at file:line` of the innermost code that belongs to no library."""
    found = _innermost(frame, lambda name: not name.startswith((*_LIBRARIES, "<")))
    return f"{found.f_code.co_name}() at {_place(found)}"


def stack_text(frame: FrameType) -> str:
    """The innermost calls as a traceback shows them."""
    return "".join(traceback.format_list(traceback.extract_stack(frame)[-_SHOWN:]))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _innermost(frame: FrameType, wanted: Callable[[str], bool]) -> FrameType:
    return next((f for f in _outwards(frame) if wanted(f.f_code.co_filename)), frame)


def _place(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    return f"{path.removeprefix(os.getcwd() + os.sep)}:{frame.f_lineno}"
