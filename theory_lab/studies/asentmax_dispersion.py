"""Dispersion of softmax, scalable softmax and entmax along growing rows of three laws.

Source: ASEntmax (arXiv 2506.16640): softmax is completely dispersive for bounded logits, alpha-entmax is not as long as
its support stays small. What the support does depends on the law of the logits. For independent logits with a bounded
law whose density at its upper end is positive, the threshold lies a distance w below the end with n w^(1/(alpha-1)+1)
constant, so that the support grows as n^(1/alpha) and H / log n tends to 1/alpha, whatever the width. Only a law with
an atom at its upper end (or rows shorter than about (alpha / width)^(1 + 1/(alpha-1))) has a support of order n.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy import special

from theory_lab.attention.streaming import RowStatistics, row_statistics
from theory_lab.streams import Stream, Streams, cell_digest, open_uniform
from theory_lab.studies.base import Finding, Piece
from theory_lab.studies.rates import Trend, fit_trend

F32 = npt.NDArray[np.float32]

_CHUNK = 1 << 17
_ALPHA = 1.5
_SSMAX_SCALE = 0.43
_KEYS = 1 << 21
_MOST_ROWS = 128
#: Of an entropy that was summed over a row; the inequalities themselves need none.
_ROUNDING = 1e-12
#: Rows of a length: this many, but no more than _KEYS scores, and at least two.
DEFAULT_TRIALS = _MOST_ROWS
#: Trends are fitted from here on.
_FROM = 1 << 12
#: The atom makes every pass cost the full row, and nothing changes beyond.
LONGEST_ATOM = 1 << 20

LAWS: dict[str, Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]] = {
    "uniform": lambda u: 2.0 * u - 1.0,
    "gaussian": special.ndtri,
    "rademacher": lambda u: np.where(u < 0.5, -1.0, 1.0),
}


def draw_row(stream: Stream, law: str, n: int) -> list[F32]:
    """Chunks of one row. Scores are stored in float32, as a model would hold them: a row of 2^24 takes 64 MiB."""
    sizes = [min(_CHUNK, n - start) for start in range(0, n, _CHUNK)]
    return [LAWS[law](open_uniform(stream.words(size))).astype(np.float32) for size in sizes]


def measure(row: list[F32], mechanism: str, n: int) -> RowStatistics:
    """Streamed statistics of one row under ``softmax``, ``ssmax`` or ``entmax``."""
    return row_statistics(row, mechanism, alpha=_ALPHA, s=_SSMAX_SCALE, n=n)


def work(piece: Piece, seed: int) -> list[Finding]:
    """One law: rows of every length, each under every mechanism of interest."""
    law, lengths, trials = piece["law"], piece["lengths"], piece["trials"]
    mechanisms = {"uniform": ("softmax", "ssmax", "entmax"), "gaussian": ("ssmax", "entmax"), "rademacher": ("entmax",)}
    entropies: dict[str, list[list[float]]] = {m: [] for m in mechanisms[law]}
    findings = []
    measured = sorted({*lengths, *piece["between"]})
    for n in measured:
        # Keyed by law and length alone, so that asking for other lengths changes no draw.
        stream = Streams(cell_digest({"study": piece.study, "law": law}, seed), n)[0]
        rows = min(trials, max(2, _KEYS * trials // (_MOST_ROWS * n)))
        drawn: dict[str, list[RowStatistics]] = {m: [] for m in entropies}
        spans = []
        for _ in range(rows):
            row = draw_row(stream, law, n)
            spans.append(max(float(c.max()) for c in row) - min(float(c.min()) for c in row))
            for mechanism in drawn:
                drawn[mechanism].append(measure(row, mechanism, n))
        for mechanism, found in drawn.items():
            entropies[mechanism].append([r.entropy for r in found])
        if n in lengths:
            findings += _envelopes(law, n, spans, drawn)
    return findings + _trends(law, measured, entropies)


def _envelopes(law: str, n: int, spans: list[float], drawn: dict[str, list[RowStatistics]]) -> list[Finding]:
    """The inequalities that hold at every length, at their worst over the rows drawn."""
    if law == "rademacher":
        return []
    findings = []
    # Softmax and SSMax are softmax of logits with a spread of M - m, which SSMax multiplies by s log n.
    factors = {"softmax": 1.0, "ssmax": _SSMAX_SCALE * math.log(n)}
    for mechanism in ("softmax", "ssmax", "entmax"):
        found = drawn.get(mechanism, [])
        if not found or n < 2:
            continue
        share = [r.normalized_entropy for r in found]
        error = float(np.std(share, ddof=1)) / math.sqrt(len(share)) if len(share) > 1 else 0.0
        note = f"H / log n = {np.mean(share):.4f}" + (f" (standard error {error:.1g})" if error else "")
        if mechanism in factors:
            factor = factors[mechanism]
            excess = max(math.log(n) - r.entropy - factor * span for r, span in zip(found, spans, strict=True))
            method = "log n - H - (M - m), worst row"
            if mechanism == "ssmax":
                method = "log n - H - s log n (M - m), worst row"
        else:
            excess = max(r.entropy - math.log(r.support) for r in found)
            # One key in the support: both are 0.
            method = "H - log s, worst row"
            note += f", s = {np.mean([r.support for r in found]):.4g}"
        name = mechanism if mechanism in factors else f"entmax-{_ALPHA:g}"
        findings.append(
            Finding.certain(f"{name}, {law}", excess, _ROUNDING, length=n, trials=len(found), method=method, note=note)
        )
    return findings


def slope(lengths: list[int], entropies: list[list[float]], *, deficit: bool) -> tuple[Trend, int] | None:
    """Trend of mean H, or of log n - H, on log n from 2^12 on; and the rows it rests on."""
    kept = [(n, h) for n, h in zip(lengths, entropies, strict=True) if n >= _FROM]
    if len(kept) < 3:
        return None
    x = [math.log(n) for n, _ in kept]
    means = [float(np.mean(h)) for _, h in kept]
    spread = [float(np.std(h, ddof=1)) for _, h in kept if len(h) > 1]
    # A length with a single row borrows the spread of the longest length that has more.
    errors = [
        (float(np.std(h, ddof=1)) if len(h) > 1 else (spread[-1] if spread else 0.0)) / math.sqrt(len(h))
        for _, h in kept
    ]
    y = [a - m for a, m in zip(x, means, strict=True)] if deficit else means
    return fit_trend(x, y, errors), sum(len(h) for _, h in kept)


def _trends(law: str, lengths: list[int], entropies: dict[str, list[list[float]]]) -> list[Finding]:
    """The limits of H / log n as slopes, each with the bound that the statement implies."""
    limit = "slope of H on log n"
    plans: dict[tuple[str, str], list[tuple[bool, float, str, float | None, str]]] = {
        ("uniform", "softmax"): [
            (True, 0.01, "met", 0.0, "slope of log n - H on log n"),
            (False, 0.9, "not met: dense softmax, whose support is all n", 1.0, limit),
        ],
        ("uniform", "ssmax"): [(False, 0.85, "not met: a bounded law", 1.0, limit)],
        ("uniform", "entmax"): [(False, 0.75, "met", 1.0 / _ALPHA, limit)],
        ("gaussian", "ssmax"): [(False, 0.9, "met", None, limit)],
        ("gaussian", "entmax"): [(False, 0.5, "met", None, limit)],
        ("rademacher", "entmax"): [
            (False, 0.9, "not met: the support stays o(n); this law has an atom on top", 1.0, limit)
        ],
    }
    findings = []
    for mechanism, measured in entropies.items():
        for deficit, bound, assumptions, exact, method in plans[law, mechanism]:
            fitted = slope(lengths, measured, deficit=deficit)
            if fitted is None:
                continue
            trend, rows = fitted
            name = f"entmax-{_ALPHA:g}" if mechanism == "entmax" else mechanism
            findings.append(
                Finding(
                    f"{name}, {law}",
                    bound,
                    trend=trend,
                    estimate=trend.slope,
                    trials=rows,
                    method=method,
                    exact=exact,
                    assumptions=assumptions,
                )
            )
    return findings
