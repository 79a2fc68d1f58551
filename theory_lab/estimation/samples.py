"""The pooled observations of many cells as columns, and their intervals.

Numbers are those of :class:`theory_lab.estimation.base.Sample` and :func:`theory_lab.estimation.intervals.interval`, to
the bit.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from theory_lab.estimation.base import Sample, Shape
from theory_lab.estimation.intervals import binomial_intervals, bounded_intervals, interval
from theory_lab.estimation.verdicts import Intervals
from theory_lab.streams import F64

I64 = npt.NDArray[np.int64]


class Samples:
    """Samples of many cells, in order.

    Parameters
    ----------
    shapes : sequence of Shape
        What each one's observations are.
    trials : sequence of int
        Rows (or weighted samples) drawn.
    total, total_sq : ndarray, shape (m,)
        Sums over the observations.
    """

    def __init__(self, shapes: Sequence[Shape], trials: Sequence[int], total: F64, total_sq: F64) -> None:
        columns: Iterable[Any] = zip(*shapes, strict=True) if shapes else ((),) * len(Shape._fields)
        models, self.notes, scale, ceiling, resolution, per_trial = columns
        self.models = np.array(models, dtype="U9")
        self.trials = list(trials)
        # Of long rows there are more keys than an int64 counts.
        self.sizes = list(map(operator.mul, self.trials, per_trial))
        self._size = np.array(self.sizes, dtype=float)
        self.total, self.total_sq = total, total_sq
        self.scale, self.ceiling, self.resolution = (np.array(x, dtype=float) for x in (scale, ceiling, resolution))

    def __len__(self) -> int:
        return len(self.trials)

    def __getitem__(self, index: int) -> Sample:
        return Sample(
            str(self.models[index]),  # type: ignore[arg-type]  # it was one
            self.trials[index],
            self.sizes[index],
            float(self.total[index]),
            float(self.total_sq[index]),
            float(self.scale[index]),
            float(self.ceiling[index]),
            self.notes[index],
            float(self.resolution[index]),
        )

    @cached_property
    def random(self) -> npt.NDArray[np.bool_]:
        """Whether there is anything to draw, shape (m,)."""
        return self.models != "certain"

    @cached_property
    def estimates(self) -> F64:
        """Point estimates of the expectations, NaN where nothing was drawn; shape (m,)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self._size > 0, self.scale * self.total / self._size, math.nan)

    @cached_property
    def variances(self) -> F64:
        """Sample variances of an observation, shape (m,)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = self.total / self._size
            spread = np.maximum(0.0, (self.total_sq - self._size * mean * mean) / (self._size - 1))
        found = np.where(self.models == "bernoulli", mean * (1.0 - mean), spread)
        return np.where(self.random & (self._size >= 2), found, 0.0)

    @cached_property
    def standard_errors(self) -> F64:
        """Standard errors of the estimates, shape (m,)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self._size > 0, self.scale * np.sqrt(self.variances / self._size), math.nan)

    @cached_property
    def _misses(self) -> F64:
        return np.array([size - int(hits) for size, hits in zip(self.sizes, self.total.tolist(), strict=True)], float)

    def intervals(self, rows: I64, error: float, looks: I64, priors: F64) -> Intervals:
        """Intervals of some of the samples.

        Parameters
        ----------
        rows : ndarray, shape (k,)
            Which samples; one may be asked for several times.
        error : float
            Probability that an interval misses.
        looks, priors : ndarray, shape (k,)
            Number of the look of a sequential run, 0 for others; and the guesses made before drawing.
        """
        low, high = np.empty(len(rows)), np.empty(len(rows))
        methods = np.empty(len(rows), dtype=object)
        model, drawn = self.models[rows], self._size[rows] > 0
        at = np.flatnonzero(model == "certain")
        low[at] = high[at] = self.estimates[rows[at]]
        methods[at] = "certain"
        left = model != "certain"
        at = np.flatnonzero((model == "bernoulli") & drawn & (looks == 0))
        if len(at):
            of = rows[at]
            least, most = binomial_intervals(np.trunc(self.total[of]), self._misses[of], error)
            low[at] = self.scale[of] * least
            high[at] = self.scale[of] * np.minimum(1.0, most + self.resolution[of])
            methods[at], left[at] = "clopper-pearson", False
        at = np.flatnonzero((model == "bounded") & drawn & (looks == 0))
        if len(at):
            of = rows[at]
            mean = self.total[of] / self._size[of]
            least, most = bounded_intervals(mean, self.variances[of], self._size[of], self.ceiling[of], error)
            low[at], high[at] = self.scale[of] * least, self.scale[of] * most
            methods[at], left[at] = "empirical-bernstein", False
        for i in np.flatnonzero(left).tolist():
            found = interval(self[int(rows[i])], error, int(looks[i]), float(priors[i]))
            low[i], high[i], methods[i] = found.low, found.high, found.method
        return Intervals(low, high, methods)
