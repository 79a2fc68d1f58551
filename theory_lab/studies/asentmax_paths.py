"""Paths of non-zero weight through causal layers, counted in whole numbers.

Source: ASEntmax (arXiv 2506.16640), representational preservation. A path into the last token through L layers picks a
key of non-zero weight in every layer; the number of paths is the sum of the last row of S_L ... S_1, S_l the boolean
support matrix of layer l. Dense causal layers have exactly C(n+L-1, L); if no row has more than s supported keys there
are at most s^L.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy import special

from theory_lab.streams import Stream
from theory_lab.studies.asentmax_rows import entmax_weights, softmax_weights
from theory_lab.studies.base import Finding, Piece
from theory_lab.studies.search import generate, one_thread

Counts = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_TOKENS, _LAYERS, _POOL = 8, 4, 512


def count_paths(layers: Bools) -> Counts:
    """Paths into the last token, (B,), through layers (B, L, n, n); layer 0 is the first applied. Exact below 2^63."""
    ways = np.ones((layers.shape[0], 1, layers.shape[-1]), np.int64)
    for depth in range(layers.shape[1]):
        ways = (layers[:, depth].astype(np.int64) @ ways.transpose(0, 2, 1)).transpose(0, 2, 1)
    return ways[:, 0, -1]


def count_paths_of_one(layers: Bools) -> int:
    """The same for one stack (L, n, n) of any size, in Python's integers."""
    ways = [1] * layers.shape[-1]
    for layer in layers:
        ways = [sum(ways[j] for j in np.flatnonzero(row)) for row in layer]
    return ways[-1]


def row_pool(stream: Stream, tokens: int, alpha: float) -> Bools:
    """Supports of entmax rows of every causal length: (tokens, pool, tokens), from the structured generators."""
    pool = np.zeros((tokens, _POOL, tokens), bool)
    for i in range(tokens):
        z = generate(stream, _POOL, 1, i + 1)[:, 0]
        pool[i, :, : i + 1] = entmax_weights(z, alpha) > 0
    return pool


def stack(stream: Stream, pool: Bools, count: int, layers: int) -> Bools:
    """Random layers made of rows from the pool, (count, layers, n, n); half the stacks take rows of similar rank.

    Rows of one stack that have similar supports make the bound tight, so those are what the search needs.
    """
    n = pool.shape[0]
    order = np.argsort(pool.sum(2), axis=1, kind="stable")
    u = stream.uniforms(count * layers * n).reshape(count, layers, n)
    narrow = stream.uniforms(count)[:, None, None]
    start = stream.uniforms(count)[:, None, None]
    u = np.where(narrow < 0.5, np.minimum(start + 0.05 * u, 1.0 - 1e-9), u)
    pick = order[np.arange(n), (u * pool.shape[1]).astype(int)]
    return pool[np.arange(n), pick]


def excess(layers: Bools) -> tuple[Counts, Counts]:
    """Paths minus s^L, and s, of stacks (B, L, n, n)."""
    s = layers.sum(3).max((1, 2)).astype(np.int64)
    return count_paths(layers) - s ** layers.shape[1], s


def climb(stream: Stream, pool: Bools, layers: Bools, rounds: int) -> tuple[Counts, int]:
    """Replace one row at a time, keeping a change that does not lower paths / s^L; the excesses met, and how many."""
    met, tried = excess(layers)[0], 0
    count, depth, n, _ = layers.shape
    for _ in range(rounds):
        changed = layers.copy()
        at, row = (stream.uniforms(count) * depth).astype(int), (stream.uniforms(count) * n).astype(int)
        changed[np.arange(count), at, row] = pool[row, (stream.uniforms(count) * pool.shape[1]).astype(int)]
        new, s = excess(changed)
        old, s_old = excess(layers)
        better = (new + s**depth) / s**depth >= (old + s_old**depth) / s_old**depth
        layers = np.where(better[:, None, None, None], changed, layers)
        met, tried = np.maximum(met, new), tried + count
    return met, tried


def work(piece: Piece, seed: int) -> list[Finding]:
    """Stacks of entmax rows against s^L, a long stack, dense layers against the binomial, and the controls."""
    trials = piece["trials"]
    findings = []
    with one_thread():
        for alpha in (1.5, 2.0):
            streams = piece.streams(seed, round(10 * alpha))
            pool = row_pool(streams[0], _TOKENS, alpha)
            worst, cases = -math.inf, 0
            best: tuple[float, Bools] | None = None
            while cases < trials // 2:
                layers = stack(streams[1], pool, min(8192, trials // 2 - cases), 1 + cases // 8192 % _LAYERS)
                over, s = excess(layers)
                cases += len(layers)
                worst = max(worst, int(over.max()))
                tight = over / s ** layers.shape[1]
                most = int(np.argmax(np.where(s > 1, tight, -np.inf)))
                if layers.shape[1] > 1 and (best is None or tight[most] > best[0]):
                    best = float(tight[most]), layers[most]
            if best is not None:
                met, tried = climb(streams[2], pool, np.repeat(best[1][None], 64, 0), 40)
                worst, cases = max(worst, int(met.max())), cases + tried
            method = "search over layers of entmax rows; paths - s^L, whole numbers"
            findings.append(Finding.certain(f"entmax-{alpha:g}", float(worst), 0.0, trials=cases, method=method))
        findings += _long(piece, seed) + _dense(piece, seed)
    return findings


def _scores(stream: Stream, layers: int, n: int, scale: float) -> npt.NDArray[np.float64]:
    z = scale * special.ndtri(stream.uniforms(layers * n * n)).reshape(layers * n, n)
    above = np.tile(np.triu(np.ones((n, n), bool), 1), (layers, 1))
    return np.where(above, -np.inf, z)


def _long(piece: Piece, seed: int) -> list[Finding]:
    """A deep stack over Gaussian scores in Python's integers, and the dense one against the same s^L."""
    layers, n = 6, 192
    z = _scores(piece.streams(seed, 50)[0], layers, n, 2.0)
    support = (entmax_weights(z, 1.5) > 0).reshape(layers, n, n)
    s, paths = int(support.sum(2).max()), count_paths_of_one(support)
    dense = count_paths_of_one((softmax_weights(z) > 0).reshape(layers, n, n))
    note = f"{paths:.6g} paths; s = {s}, s^L = {s**layers:.6g}; dense: {dense:.6g}"
    method = "paths / s^L - 1, counted exactly, L = 6"

    def ratio(count: int) -> float:
        return (count - s**layers) / s**layers

    broken = "not met: dense softmax against the support of entmax"
    return [
        Finding.certain("entmax-1.5, gaussian", ratio(paths), 0.0, length=n, trials=1, method=method, note=note),
        Finding.certain(
            "softmax for entmax-1.5", ratio(dense), 0.0, length=n, trials=1, method=method, assumptions=broken
        ),
    ]


def _dense(piece: Piece, seed: int) -> list[Finding]:
    """Softmax layers: |paths - C(n+L-1, L)|, over all n to 24 and L to 8; and where float64 underflows."""
    stream = piece.streams(seed, 60)[0]
    off, cases, lost = 0, 0, 0
    for n in range(1, 25):
        z = _scores(stream, 8, n, 3.0)
        support = (softmax_weights(z) > 0).reshape(8, n, n)
        faint = (softmax_weights(z * 1000.0) > 0).reshape(8, n, n)
        for depth in range(1, 9):
            want = math.comb(n + depth - 1, depth)
            off = max(off, abs(count_paths_of_one(support[:depth]) - want))
            lost = max(lost, abs(count_paths_of_one(faint[:depth]) - want))
            cases += 1
    method = "largest |paths - C(n+L-1, L)|, n to 24, L to 8"
    broken = "not met: scores of scale 3000, whose softmax underflows in float64"
    return [
        Finding.certain("softmax, dense", float(off), 0.0, trials=cases, method=method),
        Finding.certain("softmax, underflow", float(lost), 0.0, trials=cases, method=method, assumptions=broken),
    ]
