"""Errors that a user can act on: one line that names the field, the value and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from theory_lab.outside import one_line

#: Characters of a message's parts: what holds more comes from outside.
_MOST_FIELD, _MOST_VALUE, _MOST_ALLOWED, _MOST_MESSAGE = 300, 120, 1400, 1900


def hint(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """``did you mean '...'? `` with the nearest known name, or nothing."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"did you mean '{near[0]}'? " if near else ""


class TheoryLabError(Exception):
    """Base of every error raised on purpose; ``exit_code`` is what the command line returns for it."""

    exit_code = 2

    def __str__(self) -> str:
        # Names and texts of users' files are in it: whatever they hold, it is one line that does nothing.
        return one_line(super().__str__(), _MOST_MESSAGE)


class InputError(TheoryLabError, ValueError):
    """A value that cannot be used.

    Parameters
    ----------
    field : str
        Name of the argument, option or file column at fault.
    value : object
        What was received. Long values are shortened in the message.
    allowed : str
        What would have been accepted.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        shown = one_line(value if isinstance(value, str) else _repr(value), _MOST_VALUE)
        super().__init__(f"{one_line(field, _MOST_FIELD)}: {shown}; {one_line(allowed, _MOST_ALLOWED)}")

    def __reduce__(self) -> tuple[type[InputError], tuple[str, object, str]]:
        # Errors cross process boundaries; the default would replay the formatted message alone.
        return (type(self), (self.field, self.value, self.allowed))


def _repr(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # an integer of more digits than Python prints
        return f"a value of type {type(value).__name__}"


class WorkerError(TheoryLabError):
    """A worker process ended without an answer."""


class DeviceError(TheoryLabError):
    """A GPU that does not do what it is asked for (no memory left, a driver too old)."""


class StoreError(TheoryLabError):
    """A results folder that cannot be read or written (full disk, permissions, another version)."""
