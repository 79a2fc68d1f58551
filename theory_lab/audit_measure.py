"""Statements that the toolkit can measure: by a claim of its own, or by one of the small measurements below.

A measurement is a function of plain numbers and words with a name; data can call it by that name only. One that
cannot run here raises :class:`CannotMeasure`, which is no verdict about the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import pandas as pd

from theory_lab.audit_checks import (
    AGREES,
    COMPARISONS,
    CONTRADICTS,
    NOT_MEASURED,
    UNDECIDED,
    Check,
    Outcome,
    Tables,
    cells_text,
    every_true,
    numbers_of,
    read_expression,
    read_vector,
    settle,
)
from theory_lab.audit_data import Entry, Quantity, exact, pick
from theory_lab.errors import InputError

Result = float | str | list[float] | list[str]


class CannotMeasure(Exception):
    """The measurement cannot run here; the message says what it needs."""


class ClaimRunner(Protocol):
    """Gives the rows of a claim: those handed to the audit, or those of a small run of its own."""

    def __call__(self, claim: str, settings: dict[str, Any]) -> pd.DataFrame: ...


# --- Measurements ---


def eta_worked_example(
    *,
    want: str,
    reading: str = "weight",
    query: list[float],
    projection: list[float],
    bias: float,
    scores: list[float],
    slope: float,
    block: float = 1,
) -> Result:
    """ETA's steps for one query (arXiv 2609.20888): threshold, mask, weights, floor, pruning.

    ``reading`` is ``weight`` for the printed formula m exp(s) / sum m exp(s), or ``logit`` for softmax(m s), where a
    suppressed logit goes to 0. ``floor-ratio`` is the largest over the smallest weight of the suppressed keys: 1
    for a uniform floor.
    """
    tau = 1 / (1 + math.exp(-(math.fsum(q * w for q, w in zip(query, projection, strict=True)) + bias)))
    mask = [1 / (1 + math.exp(-slope * (s - tau))) for s in scores]
    exponentials = [math.exp(s) for s in scores]
    if reading == "weight":
        numerators = [m * e for m, e in zip(mask, exponentials, strict=True)]
    elif reading == "logit":
        numerators = [math.exp(m * s) for m, s in zip(mask, scores, strict=True)]
    else:
        raise ValueError("reading is 'weight' or 'logit'")
    total = math.fsum(numerators)
    weights = [a / total for a in numerators]
    suppressed = [a for a, s in zip(weights, scores, strict=True) if s < tau]
    tops = [max(scores[i : i + int(block)]) for i in range(0, len(scores), int(block))]
    results: dict[str, Result] = {
        "threshold": tau,
        "mask": mask,
        "exponential": exponentials,
        "numerator": numerators,
        "total": total,
        "weight": weights,
        "survives": ["yes" if s >= tau else "no" for s in scores],
        "block-kept": ["yes" if top >= tau else "no" for top in tops],
        "blocks-kept-share": sum(top >= tau for top in tops) / len(tops),
        "suppressed-mass": math.fsum(suppressed),
    }
    if want == "floor-ratio":
        if not suppressed:
            raise CannotMeasure("a key below the threshold")
        return max(suppressed) / min(suppressed)
    if want not in results:
        raise ValueError(f"want is one of {', '.join((*results, 'floor-ratio'))}")
    return results[want]


def entmax_support_trend(*, alpha: float, temperatures: list[float], keys: float = 2048, seed: float = 0) -> Result:
    """Which way the support of alpha-entmax(z / theta) goes as theta grows, for 8 rows of standard normal z.

    ``larger`` or ``smaller`` if the support never goes the other way between two temperatures in any row and
    differs between the first and the last in all; else ``neither``.
    """
    import numpy as np

    from theory_lab.attention.streaming import row_statistics

    if len(temperatures) < 2 or any(b <= a for a, b in pairwise(temperatures)):
        raise ValueError("temperatures must rise, and be at least two")
    rng = np.random.default_rng(int(seed))
    supports = np.array(
        [
            [row_statistics(z, "entmax", alpha=alpha, temperature=theta).support for theta in temperatures]
            for z in rng.standard_normal((8, int(keys)))
        ]
    )
    steps, ends = np.diff(supports, axis=1), supports[:, -1] - supports[:, 0]
    if (steps >= 0).all() and (ends > 0).all():
        return "larger"
    return "smaller" if (steps <= 0).all() and (ends < 0).all() else "neither"


def entmax_largest_gap(*, alpha: float, to: str, keys: float = 64) -> Result:
    """|difference| in entropy (in nats) between alpha-entmax and softmax or sparsemax of normal scores, at worst."""
    import numpy as np

    from theory_lab.attention.streaming import row_statistics

    if to not in ("softmax", "sparsemax"):
        raise ValueError("to is 'softmax' or 'sparsemax'")
    worst = 0.0
    for z in np.random.default_rng(0).standard_normal((8, int(keys))):
        if to == "softmax":
            p = np.exp(z - z.max())
            p /= p.sum()
        else:  # Euclidean projection on the simplex, by sorting (Martins and Astudillo, 2016)
            down = np.sort(z)[::-1]
            cuts = (np.cumsum(down) - 1) / np.arange(1, len(z) + 1)
            p = np.maximum(z - cuts[np.flatnonzero(down > cuts)[-1]], 0)
        entropy = -math.fsum(float(x) * math.log(x) for x in p if x > 0)
        worst = max(worst, abs(entropy - row_statistics(z, "entmax", alpha=alpha).entropy))
    return worst


def fisher_p_value(*, first: float, second: float, trials: float) -> Result:
    """Two-sided p-value of Fisher's exact test for two success rates (percent) of ``trials`` trials each."""
    import numpy as np
    from scipy.stats import fisher_exact

    a, b, n = round(first * trials / 100), round(second * trials / 100), int(trials)
    return float(fisher_exact(np.array([[a, n - a], [b, n - b]])).pvalue)


def consensus_over_bound(*, rho: float, length: float, head_dim: float = 64) -> Result:
    """E[C_i] over the bound kappa^2/n of TDA's Theorem 4.6, exactly, for Gaussian views that correlate by ``rho``."""
    from theory_lab.claims import Point, get_claim

    claim = get_claim("tda-4.6")
    point = Point("gaussian", int(length), head_dim=int(head_dim), rho=rho)
    value = claim.exact(point)
    if value is None:
        raise CannotMeasure("an exact value of tda-4.6")
    return value / claim.bound(point)


@cache
def _features(mechanism: str) -> tuple[bool, bool, bool, bool]:
    if find_spec("torch") is None:
        raise CannotMeasure("PyTorch: pip install 'theory-lab[torch]'")
    from theory_lab.attention.features import measure_features

    return measure_features(mechanism).columns()


def mechanism_features(*, mechanism: str) -> Result:
    """The four columns of TDA's Table 1, measured on the mechanism itself."""
    return ["yes" if holds else "no" for holds in _features(mechanism)]


def mechanisms_with_all_features(*, mechanisms: list[str]) -> Result:
    """How many of the mechanisms have all four columns of TDA's Table 1, by measurement."""
    return float(sum(all(_features(name)) for name in mechanisms))


@dataclass(frozen=True)
class Measurement:
    """A function that data may call, with the types and the defaults of its arguments."""

    run: Callable[..., Result]
    required: dict[str, str]
    optional: dict[str, str]


MEASUREMENTS: dict[str, Measurement] = {
    "eta-worked-example": Measurement(
        eta_worked_example,
        {"want": "word", "query": "numbers", "projection": "numbers", "bias": "number", "scores": "numbers",
         "slope": "number"},
        {"reading": "word", "block": "number"},
    ),
    "entmax-support-trend": Measurement(
        entmax_support_trend, {"alpha": "number", "temperatures": "numbers"}, {"keys": "number", "seed": "number"}
    ),
    "entmax-largest-gap": Measurement(entmax_largest_gap, {"alpha": "number", "to": "word"}, {"keys": "number"}),
    "fisher-p-value": Measurement(
        fisher_p_value, {"first": "number", "second": "number", "trials": "number"}, {}
    ),
    "consensus-over-bound": Measurement(
        consensus_over_bound, {"rho": "number", "length": "number"}, {"head_dim": "number"}
    ),
    "mechanism-features": Measurement(mechanism_features, {"mechanism": "word"}, {}),
    "mechanisms-with-all-features": Measurement(mechanisms_with_all_features, {"mechanisms": "words"}, {}),
}  # fmt: skip


# --- The kind "measured" ---


def read_measured(entry: Entry, tables: Tables) -> Check:
    """One of ``claim`` (an id and an expected verdict), ``measurement`` (by name), or ``needs`` alone."""
    if entry.has("claim") and entry.has("measurement"):
        raise entry.error("claim", "claim and measurement", "one of them is allowed")
    if entry.has("claim"):
        return _claim(entry)
    if entry.has("measurement"):
        return _measurement(entry, tables)
    needs = entry.text("needs")
    return Check("no measurement yet", lambda _: Outcome(NOT_MEASURED, "", "", f"needs {needs}"))


_SETTINGS = {"noise": "words", "length": "wholes", "rho": "floats", "kappa": "floats", "beta": "floats",
             "sigma": "floats", "head_dim": "wholes", "trials": "whole"}  # fmt: skip


def _claim(entry: Entry) -> Check:
    claim = entry.text("claim")
    expect = entry.choice("expect", ("HOLDS", "VIOLATED"))
    settings = {}
    if entry.has("settings"):
        part = entry.inside("settings")
        for name, kind in _SETTINGS.items():
            if part.has(name):
                settings[name] = _setting(part, name, kind)
        part.done()

    def run(runner: ClaimRunner) -> Outcome:
        try:
            rows = runner(claim, settings)
        except CannotMeasure as error:
            return Outcome(NOT_MEASURED, "", "", f"needs {error}")
        except InputError as error:
            raise entry.error("settings", str(settings), str(error)) from None
        met = rows[rows["assumptions"] == "met"] if "assumptions" in rows else rows
        if met.empty:
            return Outcome(NOT_MEASURED, "", "", f"needs rows of {claim} that meet its assumptions")
        counts = {name: int((met["verdict"] == name).sum()) for name in ("HOLDS", "VIOLATED")}
        words = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        other = len(met) - sum(counts.values())
        computed = f"of {len(met)} settings: " + ", ".join(filter(None, (words, f"{other} open" if other else "")))
        if counts["VIOLATED"]:
            found = "VIOLATED"
        elif other:
            return Outcome(UNDECIDED, "", computed, "the toolkit's run is not conclusive")
        else:
            found = "HOLDS"
        return Outcome(AGREES if found == expect else CONTRADICTS, "", computed)

    return Check(f"claim {claim} is {expect}", run)


def _setting(part: Entry, name: str, kind: str) -> Any:
    value = part.take(name)
    items = value if isinstance(value, list) else [value]
    good: tuple[type, ...] = {"words": (str,), "floats": (int, float)}.get(kind, (int,))
    if not items or not all(isinstance(x, good) and not isinstance(x, bool) for x in items):
        raise part.error(name, value, f"{'strings are' if kind == 'words' else 'numbers are'} needed")
    if kind == "whole":
        if isinstance(value, list):
            raise part.error(name, value, "one whole number is needed")
        return value
    return items


class _Argument(NamedTuple):
    value: Any
    cells: tuple[str, ...] = ()


def _argument(entry: Entry, name: str, kind: str, tables: Tables) -> _Argument:
    if kind == "word":
        return _Argument(entry.text(name))
    if kind == "words":
        return _Argument(entry.texts(name))
    if kind == "number":
        expression = read_expression(entry, name, tables)
        return _Argument(expression.value.middle, expression.cells)
    value = entry.take(name)
    if isinstance(value, list):
        if not value or not all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in value):
            raise entry.error(name, value, "a list of numbers, or the table and column of several cells, is needed")
        return _Argument([float(x) for x in value])
    part = entry.inside(name)
    found, missing = numbers_of(read_vector(part, tables), part)
    part.done()
    if missing:
        raise entry.error(name, missing, "every cell must be printed")
    where = part.text("column" if part.has("column") else "row")
    return _Argument([quantity.middle for quantity in found.values()], (cells_text(where, found),))


def _measurement(entry: Entry, tables: Tables) -> Check:
    name = pick(entry.text("measurement"), list(MEASUREMENTS), entry, "measurement")
    measurement = MEASUREMENTS[name]
    given = entry.inside("arguments")
    read = {key: _argument(given, key, kind, tables) for key, kind in measurement.required.items()}
    read |= {key: _argument(given, key, kind, tables)
             for key, kind in measurement.optional.items() if given.has(key)}  # fmt: skip
    given.done()
    arguments = {key: argument.value for key, argument in read.items()}
    sign = entry.choice("op", tuple(COMPARISONS), "==")
    right = _right(entry, tables)
    # A measurement held against a constant shows the printed figures that went into it.
    inputs = "; ".join(cell for argument in read.values() for cell in argument.cells)
    words = ", ".join(v for v in arguments.values() if isinstance(v, str))

    def run(_: Any) -> Outcome:
        try:
            result = measurement.run(**arguments)
        except CannotMeasure as error:
            return Outcome(NOT_MEASURED, "", "", f"needs {error}")
        except ValueError as error:
            raise entry.error("arguments", str(arguments), str(error)) from None
        found = result if isinstance(result, list) else [result]
        if [isinstance(x, str) for x in found] != [isinstance(x, str) for _, x in right.cells]:
            raise entry.error("right", right.formula, f"what the measurement gives is needed: {result}")
        if sign != "==" and isinstance(found[0], str):
            raise entry.error("op", sign, "words can only be compared by ==")
        outcome = _against(found, right.cells, sign)
        return outcome if right.printed else outcome._replace(printed=inputs)

    return Check(f"{name}{f' ({words})' if words else ''} {sign} {right.formula}", run)


class _Right(NamedTuple):
    formula: str
    cells: list[tuple[str, Quantity | str]]
    printed: bool


def _right(entry: Entry, tables: Tables) -> _Right:
    """The right-hand side: the cells of a column or row, or one expression."""
    value = entry.take("right")
    if isinstance(value, dict) and ("column" in value) != ("row" in value):
        part = entry.inside("right")
        cells = [(name, cell) for name, cell in read_vector(part, tables) if cell is not None]
        part.done()
        if len(cells) < len(read_vector(part, tables)):
            raise entry.error("right", value, "every cell must be printed")
        return _Right(f"[{value.get('column') or value.get('row')}]", cells, True)
    expression = read_expression(entry, "right", tables)
    return _Right(expression.formula, [("", expression.value)], bool(expression.cells))


def _against(found: list[Any], right: list[tuple[str, Quantity | str]], sign: str) -> Outcome:
    truths, shown = [], []
    for ours, (name, printed) in zip(found, right, strict=True):
        start = f"{name}: " if name else ""
        if isinstance(printed, str):
            truths.append(ours == printed)
            shown.append((f"{start}{printed}", f"{start}{ours}"))
        else:
            truths.append(COMPARISONS[sign](exact(Fraction(ours)), printed))
            against = "" if name else f" against {printed.show()}"
            shown.append((f"{start}{printed.text or printed.show()}", f"{start}{ours:.4g}{against}"))
    # A long vector is shown where it fails; one that agrees is shown whole.
    if False in truths:
        shown = [pair for pair, truth in zip(shown, truths, strict=True) if truth is False]
    return settle(every_true(truths), "; ".join(a for a, _ in shown), "; ".join(b for _, b in shown))
