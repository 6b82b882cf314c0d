"""What commands have in common that print and are done."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable


def print_until_closed(command: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Runs a command that prints; it ends without a word, and with 1, where its reader (`| head`) has seen enough."""
    try:
        code = command(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
