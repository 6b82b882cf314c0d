"""Output of commands whose reader may close the pipe early."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable


def print_until_closed(command: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Runs a command that prints; returns 1, silently, where its reader (`| head`) closes the pipe."""
    try:
        code = command(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
