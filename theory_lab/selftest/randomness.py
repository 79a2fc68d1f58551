"""Tests of random words: is there anything by which they can be told from independent fair bits?

Each takes words, shape (N,), and gives a finding. They are the classical ones (Knuth, The Art of Computer Programming,
volume 2, section 3.3.2; Marsaglia's birthday spacings; L'Ecuyer and Simard's TestU01), applied both to one stream and
to words taken in turn from neighboring streams, which is how dependence between streams shows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import special

from theory_lab.selftest.base import Finding, chi_square, normal, poisson, said
from theory_lab.streams import U64, open_uniform

_CHUNK = 1 << 16
#: Birthdays of a replicate, and the logarithm of the number of days: 4 equal spacings are expected.
_BIRTHDAYS, _LOG_DAYS = 4096, 32


def bit_frequency(words: U64) -> Finding:
    """Ones at each of the 64 places."""
    ones = np.zeros(64)
    for start in range(0, len(words), _CHUNK):
        part = words[start : start + _CHUNK].astype("<u8", copy=False)
        ones += np.unpackbits(part.view(np.uint8).reshape(-1, 8), axis=1, bitorder="little").sum(axis=0)
    size = len(words)
    z = (ones - size / 2) / np.sqrt(size / 4)
    # The sum of the squares sees many places that are a little off, the largest one that is off alone.
    statistic, worst = float(z @ z), float(np.abs(z).max())
    low, high = float(special.chdtr(64, statistic)), float(special.chdtrc(64, statistic))
    p = 2.0 * min(2.0 * min(low, high), 64.0 * normal(worst))
    measured = f"chi-square {said(statistic)} on 64, largest |z| = {worst:.2f}"
    return Finding("bit frequency", size, "words", measured, min(1.0, p))


def byte_frequency(words: U64) -> Finding:
    """All bytes, as ``direct`` uses them."""
    counts = np.bincount(words.astype("<u8", copy=False).view(np.uint8), minlength=256)
    return _uniform("byte frequency", counts, len(words))


def pairs_within(words: U64) -> Finding:
    """Successive 16-bit lanes, as the tables of ``tail`` use them: every pair of neighboring bytes."""
    counts = np.bincount(words.astype("<u8", copy=False).view("<u2"), minlength=1 << 16)
    return _uniform("serial: pairs of bytes", counts, len(words))


def pairs_across(words: U64) -> Finding:
    """The leading bytes of successive words, two by two without overlap."""
    top = (words >> np.uint64(56)).astype(np.int64)
    pairs = (top[0 : len(top) // 2 * 2 : 2] << 8) | top[1::2]
    return _uniform("serial: pairs of words", np.bincount(pairs, minlength=1 << 16), len(words))


def runs(words: U64) -> Finding:
    """Runs up and down of the uniforms: (2N - 1)/3 expected, variance (16N - 29)/90 (Knuth, exercise 3.3.2-12)."""
    rising = np.diff(open_uniform(words)) > 0
    found = 1 + int(np.count_nonzero(rising[1:] != rising[:-1]))
    size = len(words)
    z = (found - (2 * size - 1) / 3) / np.sqrt((16 * size - 29) / 90)
    return Finding("runs up and down", size, "words", f"z = {z:+.2f}", normal(float(z)))


def birthday_spacings(words: U64) -> Finding:
    """Equal spacings between 4,096 birthdays in a year of 2^32 days: Poisson, 4 a year."""
    years = len(words) // _BIRTHDAYS
    days = (words[: years * _BIRTHDAYS] >> np.uint64(64 - _LOG_DAYS)).astype(np.int64).reshape(years, _BIRTHDAYS)
    days.sort(axis=1)
    spacings = np.diff(days, axis=1)
    spacings.sort(axis=1)
    equal = int(np.count_nonzero(np.diff(spacings, axis=1) == 0))
    mean = _BIRTHDAYS**3 / 2.0 ** (_LOG_DAYS + 2) * years
    return Finding(
        "birthday spacings", len(words), "words", f"{equal:,} equal spacings, {said(mean)} expected",
        poisson(equal, mean),
    )  # fmt: skip


def neighbors_differ(words: U64, lag: int = 1) -> Finding:
    """Bits in which a word differs from the one `lag` places on: Binomial(64 N, 1/2)."""
    differing = int(np.bitwise_count(words[:-lag] ^ words[lag:]).sum())
    size = 64 * (len(words) - lag)
    z = (differing - size / 2) / np.sqrt(size / 4)
    return Finding("bits shared with the next word", len(words), "words", f"z = {z:+.2f}", normal(float(z)))


def correlation(words: U64, lag: int = 1) -> Finding:
    """Correlation of the uniforms with their successors, times the square root of their number."""
    u = open_uniform(words) - 0.5
    z = 12.0 * float(u[:-lag] @ u[lag:]) / np.sqrt(len(u) - lag)
    return Finding("correlation with the next word", len(words), "words", f"z = {z:+.2f}", normal(float(z)))


def _uniform(name: str, counts: np.ndarray, words: int) -> Finding:
    expected = np.full(len(counts), counts.sum() / len(counts))
    statistic, degrees, p = chi_square(counts, expected)
    return Finding(name, words, "words", f"chi-square {said(statistic)} on {degrees:,}", p)


BATTERY: tuple[Callable[[U64], Finding], ...] = (
    bit_frequency,
    byte_frequency,
    pairs_within,
    pairs_across,
    runs,
    birthday_spacings,
    neighbors_differ,
    correlation,
)
