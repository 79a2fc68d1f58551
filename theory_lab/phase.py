"""The dispersion phase diagram: normalized entropy over score law, scale, length and mechanism.

Every law is standardized to unit variance and multiplied by the scale sigma: z = sigma x are the logits of softmax,
SSMax and entmax. The thresholded mechanisms see cosines sigma x / sqrt(d) against tau = sqrt(2 log(n) / d)
(beta = kappa = 1), so d cancels: a key survives if sigma x exceeds sqrt(2 log n), and sigma is at once the noise scale
of their theory.

All mechanisms and scales of a (law, length) share their rows, which makes the map smooth along them and cheap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from scipy import special

from theory_lab.attention.streaming import row_statistics
from theory_lab.engine import worker_pool
from theory_lab.errors import InputError
from theory_lab.streams import Stream, Streams, cell_digest, validate_seed

if TYPE_CHECKING:
    import pandas as pd

F64 = npt.NDArray[np.float64]

#: Of the spherical law: <u, w> for u, w on the unit sphere of R^64.
HEAD_DIM = 64
SSMAX_SCALE = 0.43
POWER = 2.0
LAMBDA = 0.5
_KEYS = 1 << 19
_MOST_ROWS = 64
_LEAST_ROWS = 4
_CHUNK = 1 << 17

DEFAULT_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
DEFAULT_LENGTHS = tuple(1 << k for k in range(4, 21, 2))


def _student(stream: Stream, size: int, nu: float) -> F64:
    """Student's t by Bailey's polar method: exact, from two uniforms (Math. Comp. 62, 1994)."""
    u, angle = stream.uniforms(size), stream.uniforms(size)
    return np.sqrt(nu * np.expm1(-2.0 / nu * np.log(u))) * np.cos(2.0 * math.pi * angle)


def _laplace(stream: Stream, size: int) -> F64:
    u = stream.uniforms(size)
    low = np.log(2.0 * np.minimum(u, 1.0 - u))
    return np.where(u < 0.5, low, -low) / math.sqrt(2.0)


def _spherical(stream: Stream, size: int) -> F64:
    # A cosine t has t sqrt((d - 1) / (1 - t^2)) distributed as Student's t with d - 1 degrees of freedom.
    t = _student(stream, size, HEAD_DIM - 1.0)
    return t * np.sqrt(HEAD_DIM / (HEAD_DIM - 1.0 + t * t))


#: Name -> (stream, size) -> scores of mean 0 and variance 1.
LAWS: dict[str, Callable[[Stream, int], F64]] = {
    "gaussian": lambda stream, size: special.ndtri(stream.uniforms(size)),
    "uniform": lambda stream, size: math.sqrt(12.0) * (stream.uniforms(size) - 0.5),
    "laplace": _laplace,
    "student-t3": lambda stream, size: _student(stream, size, 3.0) / math.sqrt(3.0),
    "spherical": _spherical,
}


def _weights_entropy(weights: F64) -> float:
    """Entropy of |weights| normalized over the row; a dead row has 0."""
    size = np.abs(weights)
    size = size[size > 0]
    total = float(size.sum())
    if total == 0.0:
        return 0.0
    p = size / total
    return max(0.0, -float(p @ np.log(p)))


def _streamed(mechanism: str, alpha: float = 1.5) -> Callable[[F64, F64, float], float]:
    def entropy(x: F64, second: F64, scale: float) -> float:
        chunks = [scale * x[start : start + _CHUNK] for start in range(0, x.size, _CHUNK)]
        return row_statistics(chunks, mechanism, alpha=alpha, s=SSMAX_SCALE, n=x.size).entropy

    return entropy


def _over(x: F64, scale: float) -> F64:
    return np.maximum(scale * x - math.sqrt(2.0 * math.log(x.size)), 0.0) ** POWER


def _tra(x: F64, second: F64, scale: float) -> float:
    return _weights_entropy(_over(x, scale))


def _tda(x: F64, second: F64, scale: float) -> float:
    return _weights_entropy(_over(x, scale) - LAMBDA * _over(second, scale))


#: Name -> (first view, independent second view, scale) -> entropy of the row.
MECHANISMS: dict[str, Callable[[F64, F64, float], float]] = {
    "softmax": _streamed("softmax"),
    "ssmax": _streamed("ssmax"),
    "entmax-1.5": _streamed("entmax", 1.5),
    "sparsemax": _streamed("entmax", 2.0),
    "tra": _tra,
    "tda": _tda,
}

_Record = dict[str, float | int | str]


def _cell(law: str, n: int, scales: Sequence[float], mechanisms: Sequence[str], rows: int, seed: int) -> list[_Record]:
    """Every scale and mechanism on the rows of one (law, length)."""
    values = np.zeros((len(scales), len(mechanisms), rows))
    dead = np.zeros((len(scales), len(mechanisms)))
    digest = cell_digest({"phase": law, "length": n}, seed)
    for row in range(rows):
        streams = Streams(digest, row)
        x = LAWS[law](streams[0], n)
        second = LAWS[law](streams[1], n) if "tda" in mechanisms else x
        highest = max(float(x.max()), float(second.max()))
        for i, scale in enumerate(scales):
            for j, mechanism in enumerate(mechanisms):
                if mechanism in ("tra", "tda"):
                    top = float(x.max()) if mechanism == "tra" else highest
                    if scale * top <= math.sqrt(2.0 * math.log(n)):
                        dead[i, j] += 1
                        continue
                values[i, j, row] = MECHANISMS[mechanism](x, second, scale) / math.log(n)
    records: list[_Record] = []
    for i, scale in enumerate(scales):
        for j, mechanism in enumerate(mechanisms):
            records.append(
                {
                    "law": law,
                    "mechanism": mechanism,
                    "scale": scale,
                    "length": n,
                    "normalized_entropy": float(values[i, j].mean()),
                    "standard_error": float(values[i, j].std(ddof=1)) / math.sqrt(rows) if rows > 1 else math.nan,
                    "dead_rows": float(dead[i, j]) / rows,
                    "rows": rows,
                    "seed": seed,
                }
            )
    return records


def _one(job: tuple[str, int, tuple[float, ...], tuple[str, ...], int, int]) -> list[_Record]:
    return _cell(*job)


def phase_diagram(
    laws: Sequence[str] = tuple(LAWS),
    scales: Sequence[float] = DEFAULT_SCALES,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    mechanisms: Sequence[str] = tuple(MECHANISMS),
    *,
    rows: int | None = None,
    seed: int = 0,
    workers: int = 2,
) -> pd.DataFrame:
    """Normalized entropy E[H] / log n of attention rows of independent scores.

    Parameters
    ----------
    laws, mechanisms : sequence of str
        Keys of :data:`LAWS` and :data:`MECHANISMS`.
    scales : sequence of float
        Standard deviations of the scores, positive.
    lengths : sequence of int
        Row lengths n, at least 2.
    rows : int, optional
        Rows a cell; by default 64, fewer where they would take more than 2^19 scores, and never fewer than 4.
    seed : int
        The same seed gives the same bits for any number of workers and any selection of scales and mechanisms.
    workers : int
        Processes; 1 stays in this one.

    Returns
    -------
    DataFrame
        One row a cell: law, mechanism, scale, length, normalized_entropy, standard_error (NaN for a single row),
        dead_rows (the share of rows without any weight, whose entropy counts as 0), rows, seed.

    Raises
    ------
    InputError
        Unknown names, or numbers out of range.
    """
    import pandas as pd

    for field, names, known in (("laws", laws, LAWS), ("mechanisms", mechanisms, MECHANISMS)):
        for name in names:
            if name not in known:
                raise InputError(field, name, ", ".join(known))
    for scale in scales:
        if not (math.isfinite(scale) and scale > 0):
            raise InputError("scales", scale, "finite numbers above 0 are allowed")
    for n in lengths:
        if not 2 <= n <= 1 << 26:
            raise InputError("lengths", n, "whole numbers from 2 to 2^26 are allowed")
    if rows is not None and rows < 1:
        raise InputError("rows", rows, "at least 1")
    if workers < 1:
        raise InputError("workers", workers, "at least 1")
    seed = validate_seed(seed)
    jobs = [
        (law, n, tuple(scales), tuple(mechanisms), rows or max(_LEAST_ROWS, min(_MOST_ROWS, _KEYS // n)), seed)
        for n in sorted(lengths, reverse=True)  # the longest first: workers finish together
        for law in laws
    ]
    if workers == 1:
        found = [_one(job) for job in jobs]
    else:
        with worker_pool(workers) as pool:
            found = list(pool.map(_one, jobs))
    frame = pd.DataFrame([record for records in found for record in records])
    order = {name: i for i, name in enumerate([*laws, *mechanisms])}
    keys = ["law", "mechanism", "scale", "length"]
    return frame.sort_values(keys, key=lambda c: c.map(order) if c.name in keys[:2] else c, ignore_index=True)
