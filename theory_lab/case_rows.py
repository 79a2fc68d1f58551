"""Cases up for their verdicts, and as columns of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from theory_lab.cases import Cases, Evaluation, Group
from theory_lab.estimation.verdicts import VERDICTS, Decisions, Intervals
from theory_lab.streams import F64
from theory_lab.worklist import Worklist

I64 = npt.NDArray[np.int64]

#: Columns that hold a point's numbers.
_NUMBERS = ("length", "head_dim", "kappa", "beta", "sigma", "key_rho")


class CaseRows:
    """Some cases of a run with what is known of them now (:class:`theory_lab.estimation.verdicts.Tests`).

    Parameters
    ----------
    cases : Cases
        All of the run.
    worklist : Worklist
        Their cells.
    certain : mapping
        Index of a case without a cell -> what is known of it.
    chosen : ndarray of int, shape (m,)
        Indices of the cases, rising.
    """

    def __init__(self, cases: Cases, worklist: Worklist, certain: Mapping[int, Evaluation], chosen: I64) -> None:
        self._cases = cases
        self._certain = certain
        self._chosen = chosen
        self._of = worklist.cells.of_case[chosen]
        self._samples, self._looks = worklist.samples(), worklist.looks()
        self._seconds = worklist.seconds
        self._drawn = self._of >= 0
        bounds = [group.bounds for group in cases.groups]
        self.bounds: F64 = np.concatenate(bounds)[chosen] if bounds else np.empty(0)
        self.random: npt.NDArray[np.bool_] = self._drawn.copy()
        self.random[self._drawn] = self._samples.random[self._of[self._drawn]]

    def intervals(self, rows: I64, error: float) -> Intervals:
        """See :class:`theory_lab.estimation.verdicts.Tests`."""
        found = Intervals(np.empty(len(rows)), np.empty(len(rows)), np.empty(len(rows), dtype=object))
        at = np.flatnonzero(self._drawn[rows])
        of = self._of[rows[at]]
        for whole, part in zip(
            found, self._samples.intervals(of, error, self._looks[of], self.bounds[rows[at]]), strict=True
        ):
            whole[at] = part
        for i in np.flatnonzero(~self._drawn[rows]).tolist():
            known = self._certain[int(self._chosen[rows[i]])].interval
            found.low[i], found.high[i], found.methods[i] = known.low, known.high, known.method
        return found

    def columns(self, decisions: Decisions) -> dict[str, Any]:
        """The cases' part of each column, lists and arrays of numbers, by decisions that begin with theirs."""
        size = len(self._chosen)
        low, high, methods = (column[:size] for column in decisions.intervals)
        estimate, standard_error = np.empty(size), np.empty(size)
        at, of = np.flatnonzero(self._drawn), self._of[self._drawn]
        estimate[at], standard_error[at] = self._samples.estimates[of], self._samples.standard_errors[of]
        how, notes, trials, seconds = methods.tolist(), [""] * size, [0] * size, [0.0] * size
        for row, cell in zip(at.tolist(), of.tolist(), strict=True):
            trials[row], seconds[row] = self._samples.trials[cell], self._seconds[cell]
        for row in np.flatnonzero(~self._drawn).tolist():
            known = self._certain[int(self._chosen[row])]
            how[row], notes[row], seconds[row] = known.method, known.note, known.seconds
            # An exact value has no error; that of the worst law is nothing that was estimated.
            estimate[row], standard_error[row] = known.estimate, 0.0 if known.method == "exact" else math.nan
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            relative = standard_error / estimate
            slack = estimate / self.bounds
        nothing = estimate == 0
        relative[nothing] = np.where(methods[nothing] == "certain", 0.0, math.nan)
        unbound = ~(self.bounds > 0)
        slack[unbound] = np.where(estimate[unbound] == self.bounds[unbound], 0.0, math.nan)
        words = [str(verdict) for verdict in VERDICTS]
        return {
            **self._given(),
            "lambda": [None] * size,
            "trials": trials,
            "estimate": estimate,
            "standard_error": standard_error,
            "relative_error": relative,
            "ci_low": low,
            "ci_high": high,
            "ci_error": decisions.errors[:size],
            "method": how,
            "bound": self.bounds,
            "slack": slack,
            "verdict": [words[verdict] for verdict in decisions.verdicts[:size].tolist()],
            "note": notes,
            "seconds": seconds,
        }

    def _given(self) -> dict[str, list[Any]]:
        """What the cases say before anything is drawn."""
        parts = [_given(group) for group in self._cases.groups]
        every = {name: list(chain.from_iterable(part[name] for part in parts)) for name in (parts[0] if parts else ())}
        if len(self._chosen) == len(self._cases):
            return every
        return {name: [column[i] for i in self._chosen.tolist()] for name, column in every.items()}


def _given(group: Group) -> dict[str, list[Any]]:
    claim, points = group.claim, group.points
    size = len(points)
    joint = claim.statistic == "consensus"
    known = points.map(lambda point: (claim.exact(point), claim.unmet(point)), joint)
    return {
        "claim": [claim.id] * size,
        "noise": [points.noise] * size,
        **{name: points.values(name) for name in _NUMBERS},
        "rho": points.values("rho") if "rho" in claim.parameters else [None] * size,
        "estimator": group.estimators,
        "exact": [exact for exact, _ in known],
        "assumptions": ["; ".join(unmet) or "met" for _, unmet in known],
        "device": group.devices,
    }
