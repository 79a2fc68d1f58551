"""Numbers and ranges as people type them: ``1,2,3``, ``2:2^20:x4``, ``100:500:+100``, ``1e6``."""

from __future__ import annotations

import math
import re

from theory_lab.errors import InputError

_MOST_VALUES = 100_000
_NUMBER = re.compile(r"^[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?$", re.IGNORECASE | re.ASCII)
_ALLOWED = (
    "finite numbers such as 64, 1e6 or 2^20, lists such as 1,2,4 and ranges such as 2:2^20:x4 or 1:9:+2 are allowed"
)


def parse_number(text: str, field: str) -> float:
    """Parse one number; ``^`` is a power. InputError otherwise."""
    base, caret, exponent = text.strip().partition("^")
    try:
        parts = [base, exponent] if caret else [base]
        if not all(_NUMBER.match(part.strip()) for part in parts):
            raise ValueError
        value = float(base) ** float(exponent) if caret else float(base)
        if isinstance(value, complex) or not math.isfinite(value):
            raise ValueError
    except (ValueError, OverflowError, ZeroDivisionError):
        raise InputError(field, text.strip() or "(empty)", _ALLOWED) from None
    return value


def parse_numbers(text: str, field: str) -> tuple[float, ...]:
    """Parse numbers and ranges, separated by commas.

    A range START:STOP:xFACTOR multiplies, START:STOP:+STEP adds; both ends are included.

    Raises
    ------
    InputError
        If the text is neither, or stands for more than 100,000 values.
    """
    values: list[float] = []
    for item in text.split(","):
        pieces = item.split(":")
        if len(pieces) == 1:
            values.append(parse_number(item, field))
        elif len(pieces) == 3:
            values += _range(pieces, item.strip(), field)
        else:
            raise InputError(field, item.strip(), _ALLOWED)
        if len(values) > _MOST_VALUES:
            raise InputError(field, text, f"at most {_MOST_VALUES:,} values are allowed")
    return tuple(values)


def parse_wholes(text: str, field: str) -> tuple[int, ...]:
    """Like :func:`parse_numbers`, for whole numbers; steps of a range are rounded."""
    values = parse_numbers(text, field)
    if ":" not in text:
        for value in values:
            if value != int(value):
                raise InputError(field, text, "whole numbers are allowed")
    return tuple(round(value) for value in values)


def _range(pieces: list[str], item: str, field: str) -> list[float]:
    start, stop = parse_number(pieces[0], field), parse_number(pieces[1], field)
    step = pieces[2].strip()
    if not step or step[0] not in "x*+":
        raise InputError(field, item, "a range ends in xFACTOR or +STEP")
    size = parse_number(step[1:], field)
    multiply = step[0] in "x*"
    if (multiply and (size <= 1 or start <= 0)) or (not multiply and size <= 0) or stop < start:
        raise InputError(field, item, "a range needs START <= STOP and a factor above 1 (START > 0) or a step above 0")
    span = math.log(stop / start) / math.log(size) if multiply else (stop - start) / size
    if span > _MOST_VALUES:
        raise InputError(field, item, f"at most {_MOST_VALUES:,} values are allowed")
    values = [start * size**k if multiply else start + k * size for k in range(math.floor(span + 1e-9) + 1)]
    if not math.isclose(values[-1], stop, rel_tol=1e-9):
        values.append(stop)
    return values


_BUDGET = re.compile(r"^\s*(.+?)\s*(s|sec|m|min|h)?\s*$")


def parse_budget(text: str) -> tuple[float, float]:
    """Parse ``30s``, ``5m``, ``1h`` (wall time) or ``1e9`` (trials).

    Returns
    -------
    trials, seconds : float
        One of them is infinite.
    """
    match = _BUDGET.match(text)
    number, unit = (match.group(1), match.group(2)) if match else (text, None)
    try:
        value = parse_number(number, "budget")
    except InputError:
        raise InputError("budget", text, "a time such as 30s, 5m or 1h, or a number of trials, is allowed") from None
    seconds = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
    return (math.inf, value * seconds[unit]) if unit else (value, math.inf)
