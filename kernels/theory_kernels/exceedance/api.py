"""Public Monte Carlo counts: validation and dispatch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..validation import HAS_TRITON, NEEDS_TRITON
from . import laws, reference
from .laws import Noise

_LARGEST = 2**31 - 1


class Exceedances(NamedTuple):
    """Counts, int32 of shape (rows, trials); the last two are None for a law of one view.

    ``first`` and ``second`` count the keys above the threshold in each view, ``both`` those above in both.
    """

    first: torch.Tensor
    second: torch.Tensor | None
    both: torch.Tensor | None


def exceedance_counts(
    noise: Noise,
    tau: float | list[float] | torch.Tensor,
    length: int | list[int] | torch.Tensor,
    trials: int,
    seed: int,
    *,
    device: str | torch.device = "cpu",
    implementation: str = "auto",
) -> Exceedances:
    """Draw ``length`` scores of ``noise`` per row and trial and count those above ``tau``; no score is stored.

    The simulated E[S_i] and E[C_i] of arXiv 2601.12145, Theorems 4.3 and 4.6. A score is the inverse
    transform X = F^-1(1 - U) of a counter-based uniform, compared with tau in the domain of U: 16 bits of
    Philox-4x32-10 decide, 32 further bits settle a tie, so a tail probability is resolved to 2^-48. Every
    device and implementation counts the same stream, documented in exceedance/reference.py.

    Parameters
    ----------
    noise : Noise
        The law; with a ``correlation`` two views are drawn and their joint exceedances counted.
    tau : float or sequence of float
        Threshold of each row, in units of the score; the exceedance is strict, X > tau.
    length : int or sequence of int
        Keys of each row, 0 to 2^31 - 1. A scalar tau or length goes with every row.
    trials : int
        Trials a row, >= 0.
    seed : int
        0 to 2^64 - 1. Same seed, same counts: trial t of row m does not depend on how many there are.
    device : str or torch.device
        Where to draw and return the counts.
    implementation : str
        "auto" (Triton on CUDA, torch elsewhere), "reference" or "triton".

    Returns
    -------
    Exceedances
        int32 counts (rows, trials).

    Raises
    ------
    TypeError, ValueError
        For a wrong law, a negative or too large number, or sequences of different lengths.
    """
    laws.check(noise)
    taus, lengths = _rows("tau", tau, float), _rows("length", length, int)
    rows = max(len(taus), len(lengths))
    for name, values in (("tau", taus), ("length", lengths)):
        if len(values) not in (1, rows):
            raise ValueError(f"{name} must have 1 or {rows} entries, got {len(values)}")
    taus, lengths = (x * rows if len(x) == 1 else x for x in (taus, lengths))
    for name, value, top in (("trials", trials, _LARGEST), ("seed", seed, 2**64 - 1)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        if not 0 <= value <= top:
            raise ValueError(f"{name} must lie in 0..{top}, got {value}")
    if lengths and not 0 <= min(lengths) <= max(lengths) <= _LARGEST:
        raise ValueError(f"length must lie in 0..{_LARGEST}, got {min(lengths)} to {max(lengths)}")
    levels = _levels(noise, taus)
    digits = [[laws.digits(p) for p in level] for level in levels]
    first = [[d[0] for d in row] for row in digits]
    rest = [[d[1] for d in row] for row in digits]
    where = torch.device(device)
    counts = _form(implementation, where)(first, rest, lengths, trials, seed, where)
    if noise.correlation is None:
        return Exceedances(counts[0], None, None)
    # Nested levels p12 <= p1 <= p1 + p2 - p12 cut the unit interval into both, first only, second only.
    both, first_view, either = counts
    return Exceedances(first_view, both + either - first_view, both)


def _levels(noise: Noise, taus: list[float]) -> list[list[float]]:
    known: dict[float, tuple[float, ...]] = {}
    for t in taus:
        if t in known:
            continue
        p = laws.tail(noise, t)
        if noise.correlation is None:
            known[t] = (p,)
        else:
            joint = laws.joint_tail(p, p, noise.correlation)
            known[t] = (joint, p, min(1.0, 2.0 * p - joint))
    return [[known[t][c] for t in taus] for c in range(1 if noise.correlation is None else 3)]


def _form(implementation: str, device: torch.device) -> Callable[..., torch.Tensor]:
    if implementation not in ("auto", "reference", "triton"):
        raise ValueError(f"implementation must be auto, reference or triton, got {implementation!r}")
    if implementation == "reference" or (implementation == "auto" and (device.type != "cuda" or not HAS_TRITON)):
        return reference.counts
    if not HAS_TRITON:
        raise ValueError(NEEDS_TRITON)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and device.type == "cpu"
    if device.type != "cuda" and not interpreted:
        raise ValueError(f"implementation 'triton' needs a CUDA device, got {device}")
    from . import triton_exceedance

    return triton_exceedance.counts


def _rows(name: str, value: object, kind: type) -> list:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    allowed = (int,) if kind is int else (int, float)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, allowed):
            raise TypeError(f"{name} must hold {kind.__name__} values, got {type(item).__name__}")
    return [kind(item) for item in items]
