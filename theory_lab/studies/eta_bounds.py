"""Upper bounds on the scores of a block of keys, in float32, and a search for a key they drop.

Source: ETA (arXiv 2609.20888), screening of key blocks: a block is skipped if an upper bound of its scores is below the
threshold, the plain bound being |q| max |k|. Beside it stand three tighter ones: by channel, by center and radius, and
by the cap of directions that the keys of a block fill (for keys of unit length).

**The margins.** u = 2^-24, D the head dimension. Queries and keys are bfloat16, so a product of two has 16 significant
bits and is exact in float32; a score is their sum in any order of accumulation, so that

    |fl(s) - s| <= (D - 1) u sum_c |q_c k_c| <= (D - 1) u |q| |k|            (to first order; D u is small).

A norm computed in float32 is a sum of exact squares and a root: relative error (D/2 + 1) u. What a bound may fall short
of a score is therefore

* norm:    fl(|q| |k|) >= |q| |k| (1 - (D + 3) u), against fl(s) <= |q| |k| (1 + (D - 1) u): 2 D + 2 units, and two for
  adding the margin; (2 D + 8) u |q| max |k| is used.
* channel: both sums round (D - 1) u A at most, with A = sum_c |q_c| max(|lo_c|, |hi_c|): (2 D + 8) u A.
* center:  s = q.c + q.(k - c). The center is any float32 vector, so its products with q round too: D u |q| |c|. The
  radius max |k - c| costs (D/2 + 3) u of itself, its product with |q| (D + 7) u, the score D u |q| (|c| + r):
  2 D + 7 units of |q| (|c| + r), and some for the last additions; (2 D + 16) u |q| (|c| + r).
* cap:     with a the cosine of q and the center and b the smallest cosine of a key and the center, the largest cosine
  of q and a key is 1 if a >= b and a b + sqrt((1 - a^2)(1 - b^2)) otherwise. The root magnifies rounding where a is
  near 1, so not the result is widened but its arguments: a and b are wrong by (2 D + 8) u at most, and the expression
  grows with a and falls with b. What follows costs 8 u of |q| |k|, the norms (D + 3) u, the score D u:
  (2 D + 16) u |q| max |k|.

All hold as long as no square underflows or overflows: magnitudes from 2^-30 to 2^30 are searched. Outside, norms need
float64, as ``theory_lab.attention.eta.block_screen`` computes them; it is searched as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy import special

from theory_lab.studies.base import Finding, Piece
from theory_lab.studies.search import F64, Margin, one_thread, search

F32 = npt.NDArray[np.float32]
#: q (B, D), keys (B, K, D), units of rounding margin (a factor: 1 uses the derived margin, 0 none) -> bounds (B,).
Bound = Callable[[F32, F32, float], F32]

_U = np.float32(2.0**-24)
_LOW, _HIGH = 2.0**-30, 2.0**30


def round_bf16(x: npt.ArrayLike) -> F32:
    """Nearest bfloat16, ties to even, as float32."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def accumulate(terms: F32, order: str) -> F32:
    """Sum over the last axis in float32: ``forward``, ``backward``, ``halves`` (a tree) or ``lanes`` (eight)."""
    if order == "halves":
        while terms.shape[-1] > 1:
            half = terms.shape[-1] // 2
            rest = terms[..., 2 * half :]
            terms = np.concatenate([terms[..., :half] + terms[..., half : 2 * half], rest], -1)
        return terms[..., 0]
    if order == "lanes" and terms.shape[-1] % 8 == 0 and terms.shape[-1] > 8:
        lanes = np.moveaxis(terms.reshape(*terms.shape[:-1], -1, 8), -2, -1)
        return accumulate(accumulate(lanes, "forward"), "halves")
    total = np.zeros(terms.shape[:-1], np.float32)
    for c in range(terms.shape[-1])[:: -1 if order == "backward" else 1]:
        total = total + terms[..., c]
    return total


ORDERS = ("forward", "backward", "halves", "lanes")


def _norm(x: F32) -> F32:
    return np.sqrt(accumulate(x * x, "lanes"))


def norm_bound(q: F32, k: F32, margin: float = 1.0) -> F32:
    """|q| max |k|."""
    bound = _norm(q) * _norm(k).max(1)
    return bound + np.float32(margin * (2 * q.shape[1] + 8)) * _U * bound


def channel_bound(q: F32, k: F32, margin: float = 1.0) -> F32:
    """sum_c max(q_c lo_c, q_c hi_c), lo and hi the range of a channel over the block."""
    low, high = k.min(1), k.max(1)
    bound = accumulate(np.maximum(q * low, q * high), "lanes")
    size = accumulate(np.abs(q) * np.maximum(np.abs(low), np.abs(high)), "lanes")
    return bound + np.float32(margin * (2 * q.shape[1] + 8)) * _U * size


def center_bound(q: F32, k: F32, margin: float = 1.0) -> F32:
    """q.c + |q| max |k - c|, c the mean of the block."""
    center = k.mean(1, dtype=np.float32)
    radius = _norm(k - center[:, None]).max(1)
    length = _norm(q)
    bound = accumulate(q * center, "lanes") + length * radius
    return bound + np.float32(margin * (2 * q.shape[1] + 16)) * _U * (length * (_norm(center) + radius))


def cap_bound(q: F32, k: F32, margin: float = 1.0) -> F32:
    """|q| |k| cos(angle between q and the nearest direction of the cap around the mean that holds the keys)."""
    dim = q.shape[1]
    center = k.mean(1, dtype=np.float32)
    length, sizes, middle = _norm(q), _norm(k), _norm(center)
    with np.errstate(divide="ignore", invalid="ignore"):
        a = accumulate(q * center, "lanes") / (length * middle)
        b = (accumulate(k * center[:, None], "lanes") / (sizes * middle[:, None])).min(1)
    wrong = np.float32(margin * (2 * dim + 8)) * _U
    one = np.float32(1.0)
    a, b = np.minimum(a + wrong, one), np.clip(b - wrong, -one, one)
    with np.errstate(invalid="ignore"):
        root = np.sqrt(np.maximum((one - a) * (one + a) * ((one - b) * (one + b)), np.float32(0.0)))
        # A vanishing vector has no direction: its quotient is NaN, and the cap is everything.
        cosine = np.where(a < b, a * b + root, one)
    size = np.where(cosine >= 0, sizes.max(1), sizes.min(1))
    bound = length * size * cosine
    return bound + np.float32(margin * (2 * dim + 16)) * _U * (length * sizes.max(1))


BOUNDS: dict[str, Bound] = {
    "norm": norm_bound,
    "channel": channel_bound,
    "center": center_bound,
    "cap": cap_bound,
}


def decode(cases: F64, *, unit: bool) -> tuple[F32, F32]:
    """A query (B, D) and a block of keys (B, K, D) in bfloat16 from search cases (B, 1 + K, D).

    Of the keys a good third is parallel to the query up to the rounding to bfloat16, some are nearly so, the others
    point anywhere.
    """
    q = np.where(np.isfinite(cases[:, 0]), cases[:, 0], 0.0)
    q = np.where(np.abs(q) < _LOW, 0.0, np.clip(q, -_HIGH, _HIGH))
    # A query of zeros says nothing.
    q[~q.any(1), 0] = 1.0
    u = cases[:, 1:]
    noise = special.ndtri(u)
    length = np.linalg.norm(q, axis=1)[:, None, None]
    scale = 2.0 ** (8.0 * u[:, :, 1:2] - 4.0)
    along = q[:, None] * scale
    near = along + noise * scale * length * 2.0 ** (-14.0 * u[:, :, 2:3])
    mode = u[:, :, :1]
    k = np.where(mode < 0.4, along, np.where(mode < 0.7, near, noise * scale))
    if unit:
        k = k / np.linalg.norm(k, axis=2, keepdims=True)
    k = np.where(np.abs(k) < _LOW, 0.0, np.clip(k, -_HIGH, _HIGH))
    return round_bf16(q), round_bf16(k)


def shortfall(bound: Bound, margin: float, *, unit: bool) -> Margin:
    """Margin: (score - bound) / (u |q| max |k|), worst key and order; positive means dropped when tau is that score."""

    def measure(cases: F64) -> F64:
        q, k = decode(cases, unit=unit)
        products = q[:, None] * k
        scores = np.max([accumulate(products, order).max(1) for order in ORDERS], 0).astype(float)
        size = np.linalg.norm(q.astype(float), axis=1) * np.linalg.norm(k.astype(float), axis=2).max(1)
        with np.errstate(divide="ignore", invalid="ignore"):
            return (scores - bound(q, k, margin).astype(float)) / (float(_U) * size)

    return measure


def dropped_by_reference(cases: F64) -> F64:
    """Margin: 1 if ``attention.eta.block_screen`` skips a block although a score of it, rounded, equals tau; else 0."""
    import torch

    from theory_lab.attention.eta import block_screen

    q, k = decode(cases, unit=False)
    scale = np.float32(1.0 / math.sqrt(q.shape[1]))
    products = q[:, None] * k
    dropped = np.zeros(len(q), bool)
    for order in ORDERS:
        tau = torch.from_numpy((accumulate(products, order) * scale).max(1))[:, None, None]
        kept = block_screen(torch.from_numpy(q)[:, None], torch.from_numpy(k), tau, k.shape[1])
        dropped |= ~kept.numpy().reshape(-1)
    return dropped.astype(float)


def work(piece: Piece, seed: int) -> list[Finding]:
    """One bound: with its margin, and without it as the control; or the reference screen."""
    name, dim, keys, trials = piece["bound"], piece["dim"], piece["keys"], piece["trials"]
    about = {"head_dim": float(dim)}
    size = {"rows": 1 + keys, "width": dim, "batch": 1024}
    if name == "reference":
        with one_thread():
            found = search(dropped_by_reference, piece.streams(seed), trials, 0.0, rounds=2, **size)
        method = "search; 1 if a key with a score of tau is dropped"
        return [
            Finding.certain(
                "block_screen", found.margin, 0.0, trials=found.cases, method=method, parameters=about, length=keys
            )
        ]
    unit = name == "cap"
    held = search(shortfall(BOUNDS[name], 1.0, unit=unit), piece.streams(seed, 0), trials, 0.0, **size)
    few = max(64, trials // 10)
    bare = search(shortfall(BOUNDS[name], 0.0, unit=unit), piece.streams(seed, 1), few, 0.0, **size)
    findings = []
    for found, label, assumptions in (
        (held, f"{name} bound", "met"),
        (bare, f"{name} bound, bare", "not met: no rounding margin"),
    ):
        note = ""
        if found.broken:
            q, k = decode(found.case[None], unit=unit)
            note = f"q = {_short(q[0])}, keys {'; '.join(_short(key) for key in k[0][:2])}"
        findings.append(
            Finding.certain(
                label,
                found.margin,
                0.0,
                trials=found.cases,
                method="search; score - bound in units of 2^-24 |q| max |k|, tau = score",
                assumptions=assumptions,
                note=note,
                parameters=about,
                length=keys,
            )
        )
    return findings


def _short(x: F32) -> str:
    """The entries that are not 0, in bfloat16's digits."""
    at = np.flatnonzero(x)
    shown = ", ".join(f"[{i}] {x[i]:.6g}" for i in at[:4])
    return f"{{{shown}{', ...' if at.size > 4 else ''}}}"
