"""What the commands share: exit codes, the error line, numbers as people type them."""

from __future__ import annotations

import re
from typing import Any

import click

from theory_lab.errors import InputError
from theory_lab.grids import parse_numbers
from theory_lab.outside import one_line

EXIT_HOLDS, EXIT_VIOLATED, EXIT_USAGE, EXIT_INCONCLUSIVE, EXIT_INTERNAL, EXIT_INTERRUPTED = 0, 1, 2, 3, 70, 130


def fail(message: str) -> None:
    """One line on standard error."""
    click.echo(f"theory-lab: error: {one_line(message, 2000)}", err=True)


def one_number(text: str, field: str) -> float:
    """A single number, such as 0.5 or 10^4; InputError for none or several."""
    values = parse_numbers(text, field)
    if len(values) != 1:
        raise InputError(field, text, "one number is allowed")
    return values[0]


def one_whole(text: str, field: str) -> int:
    """A single whole number; InputError otherwise."""
    if re.fullmatch(r"\s*\d{1,400}\s*", text, re.ASCII):
        return int(text)  # exact, where a float would round
    value = one_number(text, field)
    if value != int(value):
        raise InputError(field, text, "a whole number is allowed")
    return int(value)


def named(text: str, field: str) -> tuple[str, dict[str, Any]]:
    """A name and its parameters from ``name`` or ``name:key=value,key=value``; see :func:`pairs`."""
    name, _, inner = text.strip().partition(":")
    if not name:
        raise InputError(field, text, "a name, or a name with parameters as in tda:beta=0.8,eps=1e-2, is allowed")
    return name.strip(), pairs(inner, field)


def pairs(text: str, field: str) -> dict[str, Any]:
    """``key=value,key=value`` with numbers, true and false read as such; the rest stays text."""
    found: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key or not value:
            raise InputError(field, text, "key=value pairs, separated by commas, are allowed")
        if key in found:
            raise InputError(field, text, f"{key} once is allowed")
        found[key.replace("-", "_")] = _plain(value)
    return found


def _plain(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
