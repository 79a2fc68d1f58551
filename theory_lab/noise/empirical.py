"""A file of scores as a noise family.

``file:PATH`` centers the scores and rescales them so that their estimated proxy is the requested one, like every
other family: it asks whether the theorem holds for noise of that *shape*. ``file:PATH,raw`` uses the scores as they
are, not centered and not scaled: it asks whether it holds for *these scores* at the given head dimension.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from theory_lab.errors import InputError
from theory_lab.noise.base import Family, Law, Scale
from theory_lab.noise.discrete import AtomLaw
from theory_lab.streams import F64

_SUFFIXES = (".npy", ".csv", ".parquet")


@dataclass(frozen=True)
class ProxyEstimate:
    """An estimated variance proxy with its bootstrap interval (percentile, 95%)."""

    value: float
    ci_low: float
    ci_high: float
    resamples: int


def empirical_proxy(scores: F64, weights: F64 | None = None) -> float:
    """Optimal proxy of the empirical law: sup over t of 2 log mean(exp(t (x - mean))) / t^2.

    Parameters
    ----------
    scores : ndarray, shape (m,)
        Scores; they are centered here.
    weights : ndarray, shape (m,), optional
        Nonnegative multiplicities (bootstrap counts).
    """
    w = np.full(scores.shape, 1.0 / scores.size) if weights is None else weights / weights.sum()
    x = scores - w @ scores
    sd = math.sqrt(w @ (x * x))
    if sd == 0:
        return 0.0
    x = x / sd
    log_w = np.log(np.where(w > 0, w, np.finfo(float).tiny))

    def curve(t: float) -> float:
        z = log_w + t * x
        top = z.max()
        return 2.0 * (top + math.log(np.exp(z - top).sum())) / (t * t)

    # The curve tends to the variance (1 here) at t -> 0 and to 0 at infinity; a log grid of both signs brackets the
    # maximum and a golden-section search refines it.
    from scipy import optimize

    grid = np.geomspace(1e-2, 60.0, 49)
    best = 1.0
    for sign in (-1.0, 1.0):
        values = [curve(sign * t) for t in grid]
        k = int(np.argmax(values))
        lo, hi = grid[max(k - 1, 0)], grid[min(k + 1, len(grid) - 1)]
        found = optimize.minimize_scalar(lambda t, s=sign: -curve(s * t), bounds=(lo, hi), method="bounded")
        best = max(best, values[k], -float(found.fun))
    return best * sd * sd


def bootstrap_proxy(scores: F64, seed: int = 0, resamples: int = 100) -> ProxyEstimate:
    """Estimate the proxy with a percentile bootstrap interval.

    Files of more than 4,000 scores are grouped first: the 500 smallest and largest stand for themselves, the others in
    3,000 groups of neighbors for their mean. Resampling draws how often each group occurs, by its size.
    """
    x = np.sort(scores)
    sizes = np.ones(x.size)
    if x.size > 4000:
        edges = np.unique(np.linspace(500, x.size - 500, 3001).round().astype(int))
        starts = np.concatenate([np.arange(500), edges[:-1], np.arange(x.size - 500, x.size)])
        sizes = np.diff(np.append(starts, x.size)).astype(float)
        x = np.add.reduceat(x, starts) / sizes
    rng = np.random.Generator(np.random.Philox(key=seed))
    total = int(sizes.sum())
    counts = rng.multinomial(total, sizes / total, size=resamples)
    spread = [empirical_proxy(x, draw.astype(float)) for draw in counts]
    low, high = np.quantile(spread, [0.025, 0.975])
    return ProxyEstimate(empirical_proxy(scores), float(low), float(high), resamples)


def read_scores(path: str | Path) -> F64:
    """Read a one-dimensional set of scores from ``.npy``, ``.csv`` or ``.parquet``.

    Raises
    ------
    InputError
        If the file is missing, of another type, holds text, NaN or infinities, or fewer than two distinct values.
    """
    path = Path(path)
    field = f"noise file {path}"
    if path.suffix.lower() not in _SUFFIXES:
        raise InputError(field, path.suffix or "no suffix", f"one of {', '.join(_SUFFIXES)} is allowed")
    if not path.is_file():
        raise InputError(field, "not found", "name an existing file of scores")
    try:
        raw = _load(path)
    except InputError:
        raise
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise InputError(field, f"unreadable ({error})", "a plain numeric file is allowed") from None
    if raw.dtype.kind not in "iuf":
        kind = "text" if raw.dtype.kind in "OSUT" else f"{raw.dtype} values"
        raise InputError(field, f"holds {kind}", "real numbers only are allowed")
    scores = np.asarray(raw, dtype=np.float64).reshape(-1)
    bad = int((~np.isfinite(scores)).sum())
    if bad:
        raise InputError(field, f"{bad} of {scores.size} scores are NaN or infinite", "finite scores are allowed")
    if scores.size < 2 or float(scores.min()) == float(scores.max()):
        raise InputError(field, f"{scores.size} score(s), all equal", "at least two different scores are needed")
    if float(np.abs(scores).max()) > 1e100 or not float(scores.std()) > 1e-100:
        raise InputError(field, "scores of extreme size", "scores up to 1e100 with a spread above 1e-100 are allowed")
    return scores


def _load(path: Path) -> np.ndarray:
    if path.suffix.lower() == ".npy":
        return np.load(path, allow_pickle=False)
    import pandas as pd

    if path.suffix.lower() == ".parquet":
        table = pd.read_parquet(path)
    else:
        table = pd.read_csv(path, header=None, comment="#", skip_blank_lines=True)
        if len(table) and not pd.api.types.is_number(table.iloc[0, 0]):
            table = pd.read_csv(path, comment="#", skip_blank_lines=True)  # a header line
    if table.shape[1] != 1 and "score" in table.columns:
        table = table[["score"]]
    if table.shape[1] != 1:
        raise InputError(
            f"noise file {path}", f"{table.shape[1]} columns", "one column, or one named 'score', is allowed"
        )
    return table.iloc[:, 0].to_numpy()


class Empirical(Family):
    """The empirical law of a file of scores."""

    def __init__(self, path: str, raw: bool = False) -> None:
        self._take(read_scores(path), name=f"file:{path}" + (",raw" if raw else ""), raw=raw)
        self.summary = f"{self._scores.size} scores from {path}"

    def _take(self, scores: F64, name: str, raw: bool) -> None:
        """Become the law of these scores."""
        self._scores = scores
        self.raw = raw
        self.name = name
        digest = hashlib.blake2b(np.sort(self._scores).tobytes(), digest_size=16).hexdigest()
        self._identity = f"empirical:{digest}" + (",raw" if raw else "")

    @property
    def identity(self) -> str:
        # The content, not the path: a moved file keeps its cells, a changed one gets new ones.
        return self._identity

    @cached_property
    def proxy(self) -> float:
        """Optimal proxy of the centered empirical law (score units squared)."""
        return empirical_proxy(self._scores)

    @cached_property
    def mean(self) -> float:
        """Mean of the scores as they are."""
        return float(self._scores.mean())

    @property
    def is_shifted(self) -> bool:
        """Whether the mean differs from 0 by more than 3.3 of its standard errors (one time in 1000 by chance)."""
        return abs(self.mean) > 3.3 * float(self._scores.std()) / math.sqrt(self._scores.size)

    @cached_property
    def bootstrap(self) -> ProxyEstimate:
        """The proxy with its interval."""
        return bootstrap_proxy(self._scores)

    @cached_property
    def _atoms(self) -> tuple[F64, F64]:
        atoms, counts = np.unique(self._scores, return_counts=True)
        return atoms, counts / counts.sum()

    def scaled(self, scale: Scale) -> Law:
        atoms, probabilities = self._atoms
        if self.raw:
            return AtomLaw(atoms, probabilities, self.proxy)
        factor = math.sqrt(scale.proxy / self.proxy)
        return AtomLaw((atoms - probabilities @ atoms) * factor, probabilities, scale.proxy)
