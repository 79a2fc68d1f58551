"""What the commands share: exit codes, the error line, numbers as people type them."""

from __future__ import annotations

import re

import click

from theory_lab.errors import InputError
from theory_lab.grids import parse_numbers

EXIT_HOLDS, EXIT_VIOLATED, EXIT_USAGE, EXIT_INCONCLUSIVE, EXIT_INTERNAL, EXIT_INTERRUPTED = 0, 1, 2, 3, 70, 130


def fail(message: str) -> None:
    """One line on standard error."""
    click.echo(f"theory-lab: error: {' '.join(message.split())}", err=True)


def one_number(text: str, field: str) -> float:
    """A single number, such as 0.5 or 10^4; InputError for none or several."""
    values = parse_numbers(text, field)
    if len(values) != 1:
        raise InputError(field, text, "one number is allowed")
    return values[0]


def one_whole(text: str, field: str) -> int:
    """A single whole number; InputError otherwise."""
    if re.fullmatch(r"\s*\d+\s*", text, re.ASCII):
        return int(text)  # exact, where a float would round
    value = one_number(text, field)
    if value != int(value):
        raise InputError(field, text, "a whole number is allowed")
    return int(value)
