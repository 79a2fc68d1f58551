"""Dispersion of TRA and TDA, and Table 1 of the TDA paper (arXiv 2601.12145)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from theory_lab.claims.base import Point
from theory_lab.claims.tda import NOISE_ASSUMPTION, unmet_beta, unmet_noise
from theory_lab.errors import InputError
from theory_lab.estimation.base import Sample
from theory_lab.estimation.tail import draw_counts, draw_exceedances
from theory_lab.noise import ANY_LAW, default_families, get_family
from theory_lab.streams import F64, Streams
from theory_lab.studies.base import Finding, Piece, Request, Study
from theory_lab.studies.rates import fit_trend

I64 = npt.NDArray[np.int64]

# Purposes of streams, apart from those of the tail sampler that share a block with them.
_BOTH, _LONE = 48, 49

#: 2^4, 2^6, ... 2^12, then every power of 2 to 2^30: the limit is fitted to the latter.
RATE_LENGTHS = tuple(1 << k for k in (4, 6, 8, 10, *range(12, 31)))
#: The line is fitted to lengths from here on.
_FIT_FROM = 1 << 12
#: H / log n is said to tend to 0 if its fitted limit is at most this.
LIMIT = 0.05
_ROWS = 1 << 15
_MOST_VALUES = 1 << 18
_LEAST_ROWS = 8
_MOST_SURVIVORS = 4e6
#: Rows with more survivors than this have nearly the same entropy; their mean is judged by the central limit theorem.
_CROWDED = 64.0
_RELEVANT = 4
_POWER = 2.0


def row_entropies(owner: I64, weights: F64, rows: int, extra: F64) -> F64:
    """Entropy of each row of nonnegative weights, normalized to sum 1.

    Parameters
    ----------
    owner : ndarray, shape (m,)
        Row of each weight.
    weights : ndarray, shape (m,)
        Weights above or at 0; zeros count for nothing.
    rows : int
        Number of rows.
    extra : ndarray, shape (k,)
        Weights that every row has besides.

    Returns
    -------
    ndarray, shape (rows,)
        H in nats; 0 for a row without weight (a dead row).
    """
    log = np.log(weights, where=weights > 0, out=np.zeros_like(weights))
    total = np.bincount(owner, weights, minlength=rows) + extra.sum()
    weighted = np.bincount(owner, weights * log, minlength=rows) + (extra * np.log(extra)).sum()
    alive = total > 0
    safe = np.where(alive, total, 1.0)
    return np.where(alive, np.maximum(0.0, np.log(safe) - weighted / safe), 0.0)


def tra_rows(point: Point, rows: int, streams: Streams, relevant: F64) -> F64:
    """Entropies of TRA rows: n noise keys and some relevant ones with the given weights."""
    law = point.law()
    counts, values = draw_exceedances(streams, law, point.length, point.tau, rows)
    owner = np.repeat(np.arange(rows), counts)
    return row_entropies(owner, (values - point.tau) ** _POWER, rows, relevant)


def tda_rows(point: Point, lam: float, rows: int, first: Streams, second: Streams, relevant: F64) -> F64:
    """Entropies of |a1 - lambda a2| for two independent views of n noise keys, and some relevant ones.

    Keys are exchangeable, so it suffices to know which survivors of view 1 survive in view 2 (each with the tail
    probability) and how many others survive in view 2 alone.
    """
    law, tau = point.law(), point.tau
    p = law.tail(tau)
    counts, values = draw_exceedances(first, law, point.length, tau, rows)
    owner = np.repeat(np.arange(rows), counts)
    weight = (values - tau) ** _POWER
    # One uniform decides whether such a key survives in view 2 and, if so, is its conditional tail position.
    u = second[_BOTH].uniforms(owner.size)
    both = u < p
    weight[both] = np.abs(weight[both] - lam * (law.isf(u[both]) - tau) ** _POWER)
    # The n - N_1 other keys, row by row; rows with the same N_1 are drawn together.
    lone = np.zeros(rows, dtype=np.int64)
    for spent in np.unique(counts):
        same = np.flatnonzero(counts == spent)
        lone[same] = draw_counts(second, point.length - int(spent), p, same.size)
    scores = law.isf(p * second[_LONE].uniforms(int(lone.sum())))
    owner = np.concatenate([owner, np.repeat(np.arange(rows), lone)])
    weight = np.concatenate([weight, lam * (scores - tau) ** _POWER])
    return row_entropies(owner, weight, rows, relevant)


def _families(request: Request) -> Iterable[str]:
    names = request.noise if request.noise is not None else default_families()
    return [get_family(name).name for name in names if name != ANY_LAW]


_WORDS = {"lam": "lambda"}


def _check_crowd(point: Point) -> None:
    """Refuse rows with more survivors than can be drawn one by one."""
    expected = point.length * point.law().tail(point.tau)
    if expected > _MOST_SURVIVORS:
        allowed = f"at most {_MOST_SURVIVORS:.0e} survivors a row can be drawn"
        raise InputError("length", f"{point.length} leaves {expected:.3g} survivors with {point.noise} noise", allowed)


def _drawn(point: Point, rows: int, views: int) -> tuple[int, float]:
    """Rows that are drawn at a length, and how many survivors each is expected to have in a view."""
    expected = point.length * point.law().tail(point.tau)
    return int(min(rows, max(_LEAST_ROWS, _MOST_VALUES / max(1.0, views * expected)))), expected


def _cost(noise: str, constants: dict[str, Any], lengths: Sequence[int], rows: int, views: int) -> float:
    """Rough seconds of a piece: survivors' scores are quantiles, and those of Student's t are slow."""
    each = 4.5e-7 if noise.startswith("student-t") else 7e-8
    seconds = 0.01
    for length in lengths:
        count, expected = _drawn(Point(noise, length, **constants), rows, views)
        seconds += count * (views * (2e-8 + expected * each) + (5e-8 if expected else 0.0))
        if views == 2 and expected:
            seconds += 2e-3 * _distinct(expected, count)  # a table for each number of survivors in view 1
    return seconds


def _distinct(mean: float, draws: int) -> float:
    """How many different values so many draws of about Poisson's law will have, about."""
    middle, half = int(mean), int(6.0 * math.sqrt(mean)) + 6
    value = np.arange(max(0, middle - half), middle + half + 1, dtype=float)
    log_pmf = value * math.log(mean) - mean - special.gammaln(value + 1.0)
    return float(-np.expm1(-draws * np.exp(log_pmf)).sum())


def _plan(study: str, two_views: bool) -> Callable[[Request], list[Piece]]:
    def plan(request: Request) -> list[Piece]:
        grid = {
            "head_dim": request.head_dim or (64,),
            "kappa": request.kappa or (1.0,),
            "beta": request.beta or (1.0,),
            "sigma": request.sigma or (1.0,),
            "lam": (request.lam or (0.5,)) if two_views else (0.0,),
        }
        lengths, rows = tuple(sorted(set(request.length or RATE_LENGTHS))), request.trials or _ROWS
        varied = [name for name, values in grid.items() if len(set(values)) > 1]
        pieces = []
        for noise in _families(request):
            for values in itertools.product(*grid.values()):
                chosen = dict(zip(grid, values, strict=True))
                constants: dict[str, Any] = {k: v for k, v in chosen.items() if k != "lam"}
                _check_crowd(Point(noise, lengths[-1], **constants))
                # What varies has to be told apart by the finding's subject.
                told = [f"{_WORDS.get(name, name)} {chosen[name]:g}" for name in varied]
                pieces.append(
                    Piece.of(
                        study, _cost(noise, constants, lengths, rows, 1 + two_views), noise=noise,
                        identity=get_family(noise).identity, lengths=lengths, rows=rows,
                        subject=", ".join([noise, *told]), **chosen,
                    )
                )  # fmt: skip
        return pieces

    return plan


def _dispersion(piece: Piece, seed: int, views: int) -> list[Finding]:
    """Envelope at every length, and the fitted limit of H / log n."""
    findings, x, y, errors = [], [], [], []
    start = Point(piece["noise"], 2, piece["head_dim"], kappa=piece["kappa"], beta=piece["beta"], sigma=piece["sigma"])
    assumptions = "; ".join([*unmet_noise(start), *unmet_beta(start)]) or "met"
    constants = {"kappa": start.kappa, "beta": start.beta, "sigma": start.sigma, "head_dim": start.head_dim}
    if views == 2:
        constants["lambda"] = piece["lam"]
    for index, length in enumerate(piece["lengths"]):
        point = start.with_(length=length)
        rows, expected = _drawn(point, piece["rows"], views)
        # A relevant key exceeds the threshold by two standard deviations of the noise.
        relevant = np.full(_RELEVANT, (2.0 * math.sqrt(point.proxy)) ** _POWER)
        if views == 1:
            h = tra_rows(point, rows, piece.streams(seed, 2 * index), relevant)
        else:
            streams = piece.streams(seed, 2 * index), piece.streams(seed, 2 * index + 1)
            h = tda_rows(point, piece["lam"], rows, *streams, relevant)
        sample = Sample(
            "rows" if expected > _CROWDED else "bounded", rows, rows, float(h.sum()), float((h * h).sum()),
            ceiling=math.log(length + _RELEVANT),
        )  # fmt: skip
        findings.append(
            Finding(
                piece["subject"],
                math.log(1 + views * point.kappa + _RELEVANT),
                length,
                sample,
                trials=rows,
                assumptions=assumptions,
                note=f"H / log n = {sample.estimate / math.log(max(2, length)):.4g}",
                parameters=constants,
            )
        )
        if length >= _FIT_FROM:
            x.append(math.log(length))
            y.append(sample.estimate)
            errors.append(sample.standard_error)
    if len(x) >= 3:
        trend = fit_trend(x, y, errors)
        findings.append(
            Finding(
                piece["subject"], LIMIT, trend=trend, trials=len(x), assumptions=assumptions, parameters=constants,
                note=f"slope of E[H] on log n over {len(x)} lengths from 2^12 on: the limit of H / log n",
            )
        )  # fmt: skip
    return findings


def _tra_work(piece: Piece, seed: int) -> list[Finding]:
    return _dispersion(piece, seed, 1)


def _tda_work(piece: Piece, seed: int) -> list[Finding]:
    return _dispersion(piece, seed, 2)


def _table1_plan(request: Request) -> list[Piece]:
    from theory_lab.attention.registry import is_local, list_mechanisms

    return [replace(Piece.of("tda-table1", 0.3, mechanism=name), local=is_local(name)) for name in list_mechanisms()]


def _table1_work(piece: Piece, seed: int) -> list[Finding]:
    from theory_lab.attention.features import COLUMNS, PAPER, measure_features

    name = piece["mechanism"]
    try:
        features = measure_features(name, seed=seed)
    except Exception as error:
        # Someone's own mechanism may fail in any way; the others are measured all the same.
        why = " ".join(f"{type(error).__name__}: {error}".split())
        return [
            Finding(name, 0.0, trials=1, method="measured: all four features", note=f"it could not be measured: {why}")
        ]
    measured = dict(zip(COLUMNS, features.columns(), strict=True))
    margins = {column: getattr(features, column).margin for column in COLUMNS}
    words = {True: "yes", False: "no"}
    if name in PAPER:
        return [
            Finding.certain(
                f"{name}: {column.replace('_', ' ')}",
                float(measured[column] != said),
                0.0,
                method=f"measured: {column.replace('_', ' ')}",
                note=f"measured {words[measured[column]]} (margin {margins[column]:.3g}), paper says {words[said]}",
                trials=1,
            )
            for column, said in zip(COLUMNS, PAPER[name], strict=True)
        ]
    # The paper says that no other method has all four; of a method it does not print it says nothing else.
    have = ", ".join(column.replace("_", " ") for column in COLUMNS if measured[column]) or "none"
    return [
        Finding.certain(
            name,
            float(all(measured.values())),
            0.0,
            method="measured: all four features",
            note=f"measured: {have}",
            trials=1,
        )
    ]


_RATE_PARAMETERS = ("noise", "length", "head_dim", "kappa", "beta", "sigma")

STUDIES = (
    Study(
        id="tra-dispersion",
        kind="rate",
        paper="tda",
        source="TDA, section 4 (non-dispersion of TRA)",
        statement=(
            "TRA does not disperse: the entropy of a row stays bounded as it grows. With kappa expected survivors and "
            "R relevant keys E[H] <= log(1 + kappa + R), so E[H] / log n tends to 0. Checked with R = 4, p = 2."
        ),
        bound_text=f"E[H] <= log(1 + kappa + R); limit of E[H]/log n at most {LIMIT}",
        assumptions=(NOISE_ASSUMPTION, "beta >= sigma"),
        exact_text="none; the limit is the slope of E[H] on log n from n = 2^12 on",
        parameters=_RATE_PARAMETERS,
        plan=_plan("tra-dispersion", two_views=False),
        work=_tra_work,
    ),
    Study(
        id="tda-4.7",
        kind="rate",
        paper="tda",
        source="TDA, Corollary 4.7",
        statement=(
            "TDA does not disperse: for |a1 - lambda a2|, normalized over the row, E[H] <= log(1 + 2 kappa + R), so "
            "E[H] / log n tends to 0. Checked with R = 4, p = 2 and independent views."
        ),
        bound_text=f"E[H] <= log(1 + 2 kappa + R); limit of E[H]/log n at most {LIMIT}",
        assumptions=(NOISE_ASSUMPTION, "beta >= sigma", "the two views are independent (Assumption 4.5)"),
        exact_text="none; the limit is the slope of E[H] on log n from n = 2^12 on",
        parameters=(*_RATE_PARAMETERS, "lambda"),
        plan=_plan("tda-4.7", two_views=True),
        work=_tda_work,
    ),
    Study(
        id="tda-table1",
        kind="feature",
        paper="tda",
        source="TDA, Table 1",
        statement=(
            "TDA alone has exact zeros, signed weights, no sum-to-one and length awareness; TRA all but signed "
            "weights; softmax none. Each is measured on the mechanism itself."
        ),
        bound_text="disagreements with the paper = 0",
        assumptions=(),
        exact_text="none",
        parameters=(),
        plan=_table1_plan,
        work=_table1_work,
        needs_torch=True,
    ),
)
