"""``importance``: rare events by importance sampling, with weights bounded by construction.

Every draw lands beyond the threshold, and its weight is the density ratio of the law to the proposal:

- one score, or two independent views: the proposal is tau plus an exponential whose rate is that of the law's own
  density at tau (a Pareto tail for Student's t). For a log-concave density the weight then falls from
  density(tau) / rate and is bounded by it. The estimate rests on the density, not on the tail function that
  ``direct``, ``tail`` and the exact value use.
- correlated views: the same in the latent normals, with the rates of the exponential tilting that moves the mean of
  the pair onto the corner (a, a), the most likely point of the region.
- laws made of atoms: the atoms above tau are drawn 9 times in 10, instead of with their own probability.

Where the event is not rare (probability above 0.05) scores are drawn from the law itself.
"""

from __future__ import annotations

import math

import numpy as np

from theory_lab.estimation.base import BlockSum, Cell, Estimator, Shape, never_exceeds
from theory_lab.noise import Law
from theory_lab.noise.continuous import StudentTLaw
from theory_lab.noise.copula import latent_threshold
from theory_lab.streams import F64, Stream, Streams

_BLOCK_SAMPLES = 1 << 15
_RARE = 0.05
_ATOM_SHARE = 0.9
_VIEW = (32, 33)


class _Proposal:
    """Draws weights W >= 0 with E[W] = P(X > tau) and W <= ceiling."""

    def __init__(self, law: Law, tau: float, probability: float) -> None:
        self._law = law
        self._tau = tau
        self.probability = probability
        if self.probability > _RARE or (not law.discrete and not law.log_concave and not _is_t(law)):
            self.kind, self.ceiling = "law", 1.0
        elif law.discrete:
            self.kind, self.ceiling = "atoms", self.probability / _ATOM_SHARE
        elif isinstance(law, StudentTLaw):
            self.kind = "pareto"
            # density / proposal rises with x; its limit is the ratio of the two tails' constants.
            self.ceiling = float(self._pareto_weight(np.array([tau * 1e12]))[0]) * (1 + 1e-9)
        else:
            self.kind = "exponential"
            self._rate = law.tail_rate(tau)
            if not self._rate > 0:  # a flat density: the uniform law
                self.kind = "flat"
                self.ceiling = float(np.exp(law.log_pdf(np.array([tau])))[0]) * (law.upper - tau)
            else:
                self.ceiling = float(np.exp(law.log_pdf(np.array([tau])))[0]) / self._rate

    def _pareto_weight(self, x: F64) -> F64:
        assert isinstance(self._law, StudentTLaw)
        nu = self._law.nu
        log_proposal = math.log(nu / self._tau) - (nu + 1) * np.log(x / self._tau)
        return np.exp(self._law.log_pdf(x) - log_proposal)

    def draw(self, stream: Stream, size: int) -> F64:
        """Draw ``size`` weights, shape (size,)."""
        u = stream.uniforms(size)
        if self.kind == "law":
            return (self._law.isf(u) > self._tau).astype(float)
        if self.kind == "atoms":
            return np.where(u < _ATOM_SHARE, self.ceiling, 0.0)
        if self.kind == "pareto":
            assert isinstance(self._law, StudentTLaw)
            return self._pareto_weight(self._tau * u ** (-1.0 / self._law.nu))
        if self.kind == "flat":
            x = self._tau + u * (self._law.upper - self._tau)
            return np.exp(self._law.log_pdf(x)) * (self._law.upper - self._tau)
        step = -np.log(u)
        x = self._tau + step / self._rate
        return np.minimum(np.exp(self._law.log_pdf(x) + step) / self._rate, self.ceiling)


def _is_t(law: Law) -> bool:
    return isinstance(law, StudentTLaw)


class _Corner:
    """Draws weights for P(Z_1 > a, Z_2 > a) of normals with correlation ``rho``."""

    def __init__(self, a: float, rho: float) -> None:
        self._rho = rho
        tilt = a / (1.0 + rho)  # both entries of (inverse covariance) (a, a)
        self._rate = max(tilt, 1.0)
        self._drift = self._rate - tilt
        log_corner = -a * a / (1.0 + rho) - math.log(2 * math.pi) - 0.5 * math.log((1 - rho) * (1 + rho))
        self._log_scale = log_corner - 2 * math.log(self._rate)
        # drift (x + y) - quadratic form / 2 is concave and symmetric: largest on the diagonal, at drift (1 + rho).
        self.ceiling = math.exp(self._log_scale + self._drift**2 * (1.0 + rho))

    def draw(self, first: Stream, second: Stream, size: int) -> F64:
        """Draw ``size`` weights, shape (size,)."""
        x = -np.log(first.uniforms(size)) / self._rate
        y = -np.log(second.uniforms(size)) / self._rate
        r = self._rho
        form = (x * x - 2 * r * x * y + y * y) / ((1 - r) * (1 + r))
        return np.minimum(np.exp(self._log_scale + self._drift * (x + y) - 0.5 * form), self.ceiling)


class Importance(Estimator):
    """Estimate the probability that one key survives, and multiply by the number of keys (by linearity)."""

    name = "importance"

    def block_trials(self, cell: Cell) -> int:
        return _BLOCK_SAMPLES

    def seconds_per_trial(self, cell: Cell) -> float:
        return 1.5e-7

    def shape(self, cell: Cell) -> Shape:
        point = cell.point
        scale = float(point.length)
        if never_exceeds(point):
            return Shape("certain", "no score of this law can exceed tau")
        if cell.statistic == "consensus" and point.rho != 0:
            return Shape("bounded", "tilted latent pair", scale, self._corner(cell).ceiling)
        proposal = _Proposal(point.law(), point.tau, point.tail)
        ceiling = proposal.ceiling ** (2 if cell.statistic == "consensus" else 1)
        return Shape("bounded", f"proposal: {proposal.kind}", scale, ceiling)

    @staticmethod
    def _corner(cell: Cell) -> _Corner:
        a = latent_threshold(cell.point.tail)
        return _Corner(a, cell.point.rho)

    def run_block(self, cell: Cell, block: int, trials: int, streams: Streams) -> BlockSum:
        point = cell.point
        law = point.law()
        if never_exceeds(point):
            return BlockSum(block, trials, 0.0, 0.0)
        if cell.statistic == "consensus" and point.rho != 0:
            weights = self._corner(cell).draw(streams[_VIEW[0]], streams[_VIEW[1]], trials)
        else:
            proposal = _Proposal(law, point.tau, point.tail)
            weights = proposal.draw(streams[_VIEW[0]], trials)
            if cell.statistic == "consensus":
                weights = weights * proposal.draw(streams[_VIEW[1]], trials)
        return BlockSum(block, trials, float(weights.sum()), float((weights * weights).sum()))
