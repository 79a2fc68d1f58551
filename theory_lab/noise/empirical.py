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
from typing import TYPE_CHECKING, Any

import numpy as np

from theory_lab.errors import InputError
from theory_lab.noise.base import Family, Law, Scale
from theory_lab.noise.discrete import AtomLaw
from theory_lab.outside import foreign, read_npy
from theory_lab.parquet_pages import check_pages
from theory_lab.streams import F64

if TYPE_CHECKING:
    import pandas as pd

_SUFFIXES = (".npy", ".csv", ".parquet")
#: Scores of a file, and columns of a table, at most: with all that is computed of them they take some gigabytes.
MOST_SCORES, MOST_COLUMNS = 1 << 27, 1000
#: Bytes of a table's file; text takes more than the numbers in it.
_MOST_BYTES = 1 << 32


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
    with foreign(lambda why: InputError(field, f"unreadable ({why})", "a plain numeric file is allowed")):
        raw = _load(path, field)
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


def _load(path: Path, field: str) -> np.ndarray:
    if path.suffix.lower() == ".npy":
        return read_npy(path, MOST_SCORES)
    if path.stat().st_size > _MOST_BYTES:
        raise InputError(field, f"{path.stat().st_size:,} bytes", f"at most {_MOST_BYTES:,} are allowed")
    table = _load_parquet(path, field) if path.suffix.lower() == ".parquet" else _load_csv(path, field)
    if table.shape[1] != 1 and "score" in table.columns:
        table = table[["score"]]
    if table.shape[1] != 1:
        raise InputError(field, f"{table.shape[1]} columns", "one column, or one named 'score', is allowed")
    return table.iloc[:, 0].to_numpy()


def _load_csv(path: Path, field: str) -> pd.DataFrame:
    import pandas as pd

    with open(path, "rb") as file:
        first = file.read(1 << 16)  # a table of more columns than that is none of scores
    widest = max((line.count(b",") for line in first.split(b"\n")), default=0)
    if widest >= MOST_COLUMNS:
        raise InputError(field, f"{widest + 1:,} columns", f"at most {MOST_COLUMNS:,} are allowed")
    table = pd.read_csv(path, header=None, comment="#", skip_blank_lines=True)
    if len(table) and not pd.api.types.is_number(table.iloc[0, 0]):
        table = pd.read_csv(path, comment="#", skip_blank_lines=True)  # a header line
    return table


def _load_parquet(path: Path, field: str) -> pd.DataFrame:
    """The columns of a Parquet file whose footer says no more than can be held: a few bytes can stand for billions."""
    import pyarrow.parquet as pq

    check_pages(path)
    with pq.ParquetFile(path) as file:
        about = file.metadata
        if about.num_columns > MOST_COLUMNS:
            raise InputError(field, f"{about.num_columns:,} columns", f"at most {MOST_COLUMNS:,} are allowed")
        names = file.schema_arrow.names
        chosen = ["score"] if "score" in names else names[:1] if len(names) == 1 else []
        if not chosen:
            raise InputError(field, f"{len(names)} columns", "one column, or one named 'score', is allowed")
        kind = file.schema_arrow.field(chosen[0]).type
        check_parquet_size(about, field, MOST_SCORES)
        # What pandas once noted about its index and types is left aside: it can name types that run code.
        return (
            file.read(columns=chosen).to_pandas(ignore_metadata=True) if _is_plain(kind) else _no_numbers(field, kind)
        )


def _is_plain(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))


def _no_numbers(field: str, kind: object) -> pd.DataFrame:
    raise InputError(field, f"holds {kind} values", "real numbers only are allowed")


def check_parquet_size(about: Any, field: str, most: int) -> None:
    """Raise InputError if a Parquet file's footer says that it holds more than ``most`` rows, or nonsense."""
    # Of a group its rows alone: pyarrow ends the process over some damage in what a group says of its columns.
    rows = [about.num_rows, *(about.row_group(i).num_rows for i in range(about.num_row_groups))]
    if min(rows) < 0 or max(rows) > most:
        raise InputError(field, f"says it holds {max(rows):,} rows", f"at most {most:,} are allowed")


class Empirical(Family):
    """The empirical law of a file of scores."""

    follows_tau = False

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

    @cached_property
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
