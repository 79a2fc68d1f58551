"""Estimators: each draws, pools and states its error. ``auto`` picks one for a cell."""

from __future__ import annotations

import math

from theory_lab.claims.base import Point, Statistic
from theory_lab.claims.tda import exact_consensus, exact_survivors
from theory_lab.errors import InputError, hint
from theory_lab.estimation.base import BlockSum, Cell, Estimator, Sample, never_exceeds
from theory_lab.estimation.device import ON_GPU
from theory_lab.estimation.direct import Direct
from theory_lab.estimation.importance import Importance
from theory_lab.estimation.tail import Tail
from theory_lab.noise import ANY_LAW

__all__ = [
    "CERTAIN",
    "ESTIMATORS",
    "SAMPLERS",
    "BlockSum",
    "Cell",
    "Estimator",
    "Sample",
    "choose",
    "default_trials",
    "sampler",
    "suits_gpu",
    "validate_estimator",
]

SAMPLERS: dict[str, Estimator] = {e.name: e for e in (Direct(), Tail(), Importance())}

#: Evaluators without randomness; see ``experiments``.
CERTAIN = ("exact", "worst-case")

ESTIMATORS = ("auto", *SAMPLERS, *CERTAIN)

_DIRECT_LENGTH = 128
_DIRECT_DRAWS = 1 << 27
_MOST_ROWS = 1 << 22
_ROWS = {"tail": 1 << 20, "importance": 1 << 18}
_CELL_SECONDS = 1.0
_ENOUGH_EVENTS = 1e4  # a relative error of 1%
_GPU_ROWS = 1 << 24
_GPU_EVENTS = 25.0  # a relative error of 20%


def validate_estimator(name: str) -> str:
    """Return ``name`` if it is an estimator or ``auto``; InputError, with the nearest name, otherwise."""
    if name not in ESTIMATORS:
        nearest = hint(str(name), ESTIMATORS, cutoff=0.4)
        raise InputError("estimator", name, f"{nearest}known: {', '.join(ESTIMATORS)}")
    return name


def _expected(statistic: Statistic, point: Point) -> float:
    value = exact_survivors(point) if statistic == "survivors" else exact_consensus(point)
    return 0.0 if value is None else value


def choose(statistic: Statistic, point: Point) -> str:
    """Pick an estimator for a cell.

    ``worst-case`` for the class of all laws; ``direct`` for rows of at most 128 keys whose event is frequent enough
    for a relative error of 1% within 2^27 draws; ``importance`` for events rarer than one in 20 rows, and for rows of
    dependent keys; ``tail`` else, and wherever no score can exceed the threshold.
    """
    if point.noise == ANY_LAW:
        return "worst-case"
    if never_exceeds(point):
        return "tail"
    if point.key_rho > 0 and point.tail <= 0.05:
        # The expectation is that of independent keys, by linearity; rows of dependent ones say little about it.
        return "importance"
    expected = _expected(statistic, point)
    if point.length <= _DIRECT_LENGTH and expected * _most_direct_rows(point) >= _ENOUGH_EVENTS:
        return "direct"
    return "importance" if expected < 0.05 else "tail"


def suits_gpu(statistic: Statistic, point: Point) -> bool:
    """Whether ``auto`` draws a cell in full on the GPU: 25 events or more are expected in the default trials."""
    if never_exceeds(point):
        return False
    trials = default_trials(Cell(statistic, point, "direct", 0, "cuda"))
    return _expected(statistic, point) * trials >= _GPU_EVENTS


def sampler(cell: Cell) -> Estimator:
    """What draws a cell."""
    return SAMPLERS[cell.estimator] if cell.device == "cpu" else ON_GPU


def _most_direct_rows(point: Point) -> int:
    per_draw = 16 if point.rho or point.key_rho else 1
    return min(_MOST_ROWS, _DIRECT_DRAWS // (per_draw * point.length))


def default_trials(cell: Cell) -> int:
    """Trials of a cell when none are asked for, at most about a second of one core, or of a GPU like the H200.

    ``direct``: 2^22 rows or 2^27 scores; ``tail``: 2^20 rows; ``importance``: 2^18 weighted samples. On a GPU: 2^24
    rows or a second's worth.
    """
    estimator = sampler(cell)
    if estimator.certain(cell):
        return 1
    wanted = _ROWS[cell.estimator] if cell.estimator in _ROWS else _most_direct_rows(cell.point)
    if cell.device != "cpu":
        wanted = _GPU_ROWS
    affordable = int(_CELL_SECONDS / estimator.seconds_per_trial(cell))
    return max(1, min(wanted, 1 << int(math.log2(max(1, affordable)))))
