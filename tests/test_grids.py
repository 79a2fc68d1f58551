"""Numbers and ranges as people type them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from theory_lab.errors import InputError
from theory_lab.grids import parse_budget, parse_number, parse_numbers, parse_wholes


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("64", [64]),
        ("1e6", [1e6]),
        ("2^20", [2**20]),
        ("10^4", [10**4]),
        ("1,2,4", [1, 2, 4]),
        ("2:2^9:x4", [2, 8, 32, 128, 512]),
        ("2:2^10:x4", [2, 8, 32, 128, 512, 1024]),
        ("100:500:+100", [100, 200, 300, 400, 500]),
        ("1,10:20:+5", [1, 10, 15, 20]),
        ("5:5:x2", [5]),
    ],
)
def test_wholes(text: str, values: list[int]) -> None:
    assert parse_wholes(text, "length") == tuple(values)


def test_fractions() -> None:
    assert parse_numbers("0:1:+0.25", "rho") == (0, 0.25, 0.5, 0.75, 1)
    assert parse_numbers("-.5,+3.", "rho") == (-0.5, 3.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "nan",
        "inf",
        "-inf",
        "1:2",
        "1:2:3",
        "1:2:x1",
        "1:2:x0.5",
        "2:1:x2",
        "0:8:x2",
        "1:2:+0",
        "1:2:+-1",
        "1,,2",
        "1e999",
        "2^2000",
        "1:1e9:+1",
        "0x10",
        "1_000",
        "--1",
        "(-8)^0.5",
        "1:9:y2",
        "1:9:",
    ],
)
def test_nonsense_is_named(text: str) -> None:
    with pytest.raises(InputError, match=r"^length: "):
        parse_numbers(text, "length")


def test_fraction_where_whole() -> None:
    with pytest.raises(InputError, match=r"length: 1\.5"):
        parse_wholes("1.5", "length")


@given(st.text(max_size=30))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        values = parse_numbers(text, "kappa")
    except InputError as error:
        message, values = str(error), ()
    else:
        message = ""
    assert "\n" not in message
    assert all(math.isfinite(value) for value in values)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_round_trip(value: float) -> None:
    assert parse_number(repr(value), "beta") == value


@pytest.mark.parametrize(
    ("text", "trials", "seconds"),
    [
        ("30s", math.inf, 30),
        ("5m", math.inf, 300),
        ("1h", math.inf, 3600),
        ("1e9", 1e9, math.inf),
        ("2^10", 1024, math.inf),
    ],
)
def test_budget(text: str, trials: float, seconds: float) -> None:
    assert parse_budget(text) == (trials, seconds)


def test_budget_nonsense() -> None:
    with pytest.raises(InputError, match="budget: soon"):
        parse_budget("soon")
