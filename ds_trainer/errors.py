"""The exception tree. Every text has three parts: what was found, the rule, and the key to change."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ds_trainer.log import local_rank


class DsTrainerError(Exception):
    """Base of all errors of this package.

    Args:
        found: What was found, with the offending values.
        rule: The rule it breaks.
        change: Which key, file or command to change, and to what.
    """

    exit_code = 1
    is_reported = False
    """Whether its text has been written."""

    def __init__(self, found: str, rule: str, change: str) -> None:
        self.found, self.rule, self.change = found, rule, change
        super().__init__(f"{found}\n  rule:   {rule}\n  change: {change}")

    def __reduce__(self) -> tuple:
        return type(self), (self.found, self.rule, self.change), self.__dict__  # notes too


class RankFailedError(DsTrainerError):
    """Another rank died, is stuck or never came; one rank prints it without a traceback, exit code 1."""


class UserError(DsTrainerError):
    """A fault that the user can fix: printed without a traceback, exit code 2."""

    exit_code = 2
    on_all_ranks = False
    """Whether every rank raises this same error, so that one per node prints it."""


class DesyncError(UserError):
    """Ranks are at different places of the run: some made a call that all have to make."""

    @classmethod
    def entered_by_some(cls, place: str, ranks: list[int], site: str, others: str) -> DesyncError:
        """The error of a place that some ranks entered.

        Args:
            place: Its name, such as "save_model()".
            ranks: The ranks that entered it.
            site: file:line of their call.
            others: What the other ranks do, as text.
        """
        return cls(
            f"{place} was entered by ranks {ranks} only, at {site}; {others}",
            "all ranks have to enter it, since they wait for one another there",
            "make this call on every rank; rank 0 alone writes what there is to write",
        )


class ConfigError(UserError):
    """A key, a value, or a combination of keys in the run's JSON is wrong."""


class ConfigErrors(ConfigError):
    """Every fault of one config, reported together.

    Args:
        errors: The single faults, in the order of the config.
    """

    def __init__(self, errors: list[ConfigError]) -> None:
        self.errors = errors
        Exception.__init__(self, "\n\n".join(str(e) for e in errors))

    def __reduce__(self) -> tuple:
        return type(self), (self.errors,), self.__dict__


class DataError(UserError):
    """A data file, a record or a token is wrong."""


class ModelError(UserError):
    """A checkpoint is missing, unreadable, or does not fit the run."""


class MachineError(UserError):
    """The machine lacks something: a compiler, libaio, disk, memory, a device."""


class CheckpointError(UserError):
    """A checkpoint is damaged, or belongs to another run or layout."""


class EngineError(UserError):
    """What the engine set up is not what the config sets."""


class NonFiniteError(UserError):
    """A loss or a gradient became NaN or infinite; raised before the weights were touched."""


@contextmanager
def exit_on_user_error(debug: bool = False) -> Iterator[None]:
    """Turns an error of this package into its text on stderr and its exit code: 2 for a `UserError`, else 1.

    An error that all ranks raise is printed once per node.

    Args:
        debug: Let the traceback through instead.
    """
    try:
        yield
    except DsTrainerError as error:
        if debug:
            raise
        report_error(error)
        sys.exit(error.exit_code)


def one_of(choices: Iterable[object]) -> str:
    """Choices as text after `set KEY to`: the only one, or `one of` several."""
    texts = [str(choice) for choice in choices]
    return texts[0] if len(texts) == 1 else f"one of {', '.join(texts)}"


def report_error(error: DsTrainerError) -> None:
    """Writes an error's text to stderr, once; if all ranks raise it, only on the first rank of each node."""
    same_everywhere = isinstance(error, ConfigError) or (isinstance(error, UserError) and error.on_all_ranks)
    if not error.is_reported and (not same_everywhere or local_rank() == 0):
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", []))
        print(f"\nerror: {error}{notes}", file=sys.stderr, flush=True)
    error.is_reported = True
