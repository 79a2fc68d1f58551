"""Adversarial search for a counterexample: structured generators, hill climbing on the margin, shrinking.

An invariance is a statement about every input, so sampling says little: what breaks it are ties, keys a rounding away
from the threshold, scores of huge or tiny scale, masked entries. A case is a small matrix: row 0 holds the scores of a
row of attention (-inf is masked), the rows below hold numbers in (0, 1) that a study turns into whatever else it needs
(appended tokens, temperatures, thresholds). A study supplies the margin: how far the statement is from holding, at
most the finding's bound when it holds and NaN where the case does not meet the assumptions.

The loop follows property-based testing (MacIver and Hatfield-Dodds, "Hypothesis: A new approach to property-based
testing", JOSS 4(43), 2019: generate, then shrink), with the margin as a target to climb, as in
Loscher and Sagonas, "Targeted property-based testing", ISSTA 2017.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

from theory_lab.streams import Stream, Streams

F64 = npt.NDArray[np.float64]
#: (B, R, W) cases -> (B,) margins.
Margin = Callable[[F64], F64]

BATCH = 2048
_POOL = 48
_OFFSPRING = 8
_DRAW, _CLIMB = 0, 1


@dataclass(frozen=True)
class Found:
    """What a search ends with.

    Attributes
    ----------
    margin : float
        The largest margin seen.
    case : array, shape (R, W)
        Where it was seen; shrunk if it breaks the bound.
    cases : int
        Cases that met the assumptions, generated ones and those met while climbing.
    broken : bool
        Whether the margin exceeds the bound.
    """

    margin: float
    case: F64
    cases: int
    broken: bool


# ---- generators: (stream, count, width) -> scores ------------------------------------------------


def _normals(stream: Stream, count: int, width: int) -> F64:
    return special.ndtri(stream.uniforms(count * width)).reshape(count, width)


def _column(stream: Stream, count: int) -> F64:
    return stream.uniforms(count)[:, None]


def spread(stream: Stream, count: int, width: int) -> F64:
    """Normal scores with a scale from 10^-3 to 10^2."""
    return _normals(stream, count, width) * 10.0 ** (5.0 * _column(stream, count) - 3.0)


def ties(stream: Stream, count: int, width: int) -> F64:
    """Few distinct values, all multiples of 1/4."""
    return np.floor(stream.uniforms(count * width).reshape(count, width) * 5.0) / 4.0


def integers(stream: Stream, count: int, width: int) -> F64:
    """Whole numbers from -8 to 8."""
    return np.floor(stream.uniforms(count * width).reshape(count, width) * 17.0) - 8.0


def nearly_equal(stream: Stream, count: int, width: int) -> F64:
    """One value, each key a few units in the last place away."""
    base = 4.0 * _column(stream, count) - 2.0
    steps = np.floor(stream.uniforms(count * width).reshape(count, width) * 9.0) - 4.0
    return base + steps * np.spacing(np.abs(base))


def huge(stream: Stream, count: int, width: int) -> F64:
    """Scales from 10^3 to 10^9, half of them a common offset instead of a spread."""
    scale = 10.0 ** (3.0 + 6.0 * _column(stream, count))
    z = _normals(stream, count, width)
    return np.where(_column(stream, count) < 0.5, z * scale, z + scale)


def tiny(stream: Stream, count: int, width: int) -> F64:
    """Scales from 10^-12 to 10^-4: almost uniform rows."""
    return _normals(stream, count, width) * 10.0 ** (8.0 * _column(stream, count) - 12.0)


def spike(stream: Stream, count: int, width: int) -> F64:
    """One key above a crowd that is level up to a small spread."""
    z = 1e-3 * _normals(stream, count, width)
    z[:, 0] += 4.0 * stream.uniforms(count)
    return z


def ladder(stream: Stream, count: int, width: int) -> F64:
    """Equal steps downwards: every prefix of the row is a candidate support."""
    return -np.arange(width) * 2.0 * _column(stream, count) + _column(stream, count)


GENERATORS = (spread, ties, integers, nearly_equal, huge, tiny, spike, ladder)


def generate(stream: Stream, count: int, rows: int, width: int) -> F64:
    """Draw ``count`` cases, an equal share from each generator, shape (count, rows, width).

    One case in four is masked at random places down to 1 to ``width`` keys, and one in sixteen down to a single key.
    """
    cases = np.empty((count, rows, width))
    for g, make in enumerate(GENERATORS):
        share = len(range(g, count, len(GENERATORS)))
        cases[g :: len(GENERATORS), 0] = make(stream, share, width)
    cases[:, 1:] = stream.uniforms(count * (rows - 1) * width).reshape(count, rows - 1, width)
    kind, many = stream.uniforms(count), stream.uniforms(count)
    left = np.where(kind < 0.25, 1 + np.floor(many * width), width)
    left = np.where(kind < 0.0625, 1, left)
    rank = stream.uniforms(count * width).reshape(count, width).argsort(1).argsort(1)
    cases[:, 0][rank >= left[:, None]] = -np.inf
    return cases


def mutate(stream: Stream, parents: F64) -> F64:
    """Children of the worst cases: one small change each, of seven kinds."""
    cases = parents.copy()
    count, rows, width = cases.shape
    kind = np.floor(stream.uniforms(count) * 7).astype(int)
    key = np.floor(stream.uniforms(count) * width).astype(int)
    other = np.floor(stream.uniforms(count) * width).astype(int)
    row = 1 + np.floor(stream.uniforms(count) * (rows - 1)).astype(int)
    step = special.ndtri(stream.uniforms(count))
    size = 10.0 ** (-16.0 * stream.uniforms(count))
    at = np.arange(count)
    old = cases[at, 0, key]
    top = cases[:, 0].max(1)
    with np.errstate(invalid="ignore"):
        moved = np.select(
            [kind == 0, kind == 1, kind == 2, kind == 3],
            [old + step * size * (1.0 + np.abs(old)), cases[at, 0, other], np.nextafter(old, np.inf * step), top],
            old,
        )
    moved = np.where((kind == 4) & ((cases[:, 0] > -np.inf).sum(1) > 1), -np.inf, moved)
    cases[at, 0, key] = np.where((old == -np.inf) & (kind != 1), np.where(kind == 3, top, old), moved)
    # Never mask the last visible key.
    dead = ~(cases[:, 0] > -np.inf).any(1)
    cases[dead] = parents[dead]
    for b in np.flatnonzero((kind >= 5) & (rows > 1)):
        fresh = cases[b, row[b], key[b]] + step[b] * (size[b] if kind[b] == 5 else 0.3)
        cases[b, row[b], key[b]] = min(max(fresh, 2.0**-53), 1.0 - 2.0**-53)
    return cases


def _clean(margin: Margin, cases: F64) -> F64:
    found = np.asarray(margin(cases), float)
    return np.where(np.isnan(found), -np.inf, found)


def search(
    margin: Margin,
    streams: Streams,
    trials: int,
    bound: float,
    *,
    rows: int = 2,
    width: int = 8,
    rounds: int = 6,
    batch: int = BATCH,
) -> Found:
    """Generate at least ``trials`` cases that meet the assumptions, climb from the worst, shrink a counterexample.

    Parameters
    ----------
    margin : callable
        Cases (B, R, W) -> margins (B,), NaN where the assumptions are not met. It must judge a case alone: neither
        the batch nor the order may matter.
    streams : Streams
        Of the piece.
    trials : int
        Generated cases, not counting the climb.
    bound : float
        The largest margin that is allowed.
    rows, width : int
        Shape of a case.
    rounds : int
        Rounds of hill climbing; each tries eight children of each of the 48 worst cases.
    batch : int
        Cases judged at once.

    Returns
    -------
    Found
    """
    pool, worst, cases = np.empty((0, rows, width)), np.empty(0), 0
    goal, attempts = trials, 0
    while cases < goal and attempts < 4 * trials + batch:
        size = min(batch, max(goal - cases, len(GENERATORS)))
        made = generate(streams[_DRAW], size, rows, width)
        attempts += size
        scores = _clean(margin, made)
        cases += int((scores > -np.inf).sum())
        pool, worst = _keep(pool, worst, made, scores)
    for _ in range(rounds):
        children = mutate(streams[_CLIMB], np.repeat(pool, _OFFSPRING, axis=0))
        scores = _clean(margin, children)
        cases += int((scores > -np.inf).sum())
        pool, worst = _keep(pool, worst, children, scores)
    if not worst.size or worst[0] == -np.inf:
        return Found(-math.inf, np.zeros((rows, width)), cases, False)
    case, broken = pool[0], bool(worst[0] > bound)
    if broken:
        case = shrink(margin, case, bound)
    return Found(float(worst[0]), case, cases, broken)


def _keep(pool: F64, worst: F64, made: F64, scores: F64) -> tuple[F64, F64]:
    pool, worst = np.concatenate([pool, made]), np.concatenate([worst, scores])
    order = np.argsort(-worst, kind="stable")[:_POOL]
    return pool[order], worst[order]


def shrink(margin: Margin, case: F64, bound: float) -> F64:
    """Smallest counterexample by greedy steps: mask a key, shift the top to 0, round a number, as long as it breaks.

    Parameters
    ----------
    margin, bound
        As in :func:`search`.
    case : array, shape (R, W)
        A case with a margin above ``bound``.
    """

    def breaks(candidates: list[F64]) -> F64 | None:
        if not candidates:
            return None
        hits = np.flatnonzero(_clean(margin, np.stack(candidates)) > bound)
        return candidates[int(hits[0])] if hits.size else None

    def changed(row: int, key: int, value: float) -> F64:
        copy = case.copy()
        copy[row, key] = value
        return copy

    def simpler(value: float) -> list[float]:
        rounded = [float(f"{value:.{digits}g}") for digits in (1, 2, 3, 6)]
        sign = math.copysign(1.0, value)
        whole = [
            0.0,
            sign,
            float(int(value)),
            float(int(value / 2.0)),
            float(int(value)) - sign,
            math.floor(value) + 0.0,
        ]
        shorter = [v for v in (*whole, *rounded) if (len(f"{v:.17g}"), abs(v)) < (len(f"{value:.17g}"), abs(value))]
        return list(dict.fromkeys(shorter))

    for _ in range(60):
        visible = np.flatnonzero(case[0] > -np.inf).tolist()
        step = breaks([changed(0, key, -np.inf) for key in visible] if len(visible) > 1 else [])
        if step is None:
            centered = case.copy()
            centered[0] = case[0] - case[0].max()
            step = breaks([centered] if case[0].max() != 0.0 else [])
        if step is None:
            options = [changed(0, key, v) for key in visible for v in simpler(float(case[0, key]))]
            step = breaks(options)
        if step is None:
            rest = [(r, w) for r in range(1, len(case)) for w in range(case.shape[1])]
            options = [changed(r, w, 0.5) for r, w in rest if case[r, w] != 0.5]
            options += [changed(r, w, v) for r, w in rest for v in simpler(float(case[r, w])) if 0.0 < v < 1.0]
            step = breaks(options)
        if step is None:
            return case
        case = step
    return case


def describe(scores: F64) -> str:
    """The visible scores of a row, in as few digits as tell them apart."""
    return "(" + ", ".join(f"{v:.17g}" for v in scores if v > -np.inf) + ")"


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: the batches are small, and studies run side by side."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
