"""The four columns of TDA's Table 1, decided for any mechanism by measurement on the mechanism itself.

Everything is read off weights computed in float64 from q, k and hidden states drawn at random (so every mechanism
meets scores of the kind it is meant for), or off chosen rows of scores. No mechanism is asked what it is.

exact zeros
    Some visible key has a weight of exactly 0. Scores are kept in a range where no exponential underflows, so a
    zero is the mechanism's and not the arithmetic's. Margin: the share of zeros.
signed weights
    Some weight is negative. Margin: the most negative weight over the largest absolute one.
no sum-to-one
    The weights of a row with a visible key do not always sum to 1. Margin: the largest |sum - 1|.
length-aware
    The relative weights of a fixed set of keys change with the number of visible keys alone. A row of m keys is
    compared with the same row after N irrelevant keys (visible, at the lowest score the mechanism can meet) were
    put in front of it. Whatever weight the new keys take, the weights of the old ones are divided by the sum of
    their absolute values, so that a mere normalization over more keys drops out; what is left is an explicit
    dependence on n. (For softmax the ratios of old weights cannot change, whatever is added; for a threshold that
    grows with log n they do.) Margin: the largest change of a relative weight, over several m and N.

A mechanism that picks keys by position also changes under such an insertion. The measurement reports
`position_dependent` (weights do not follow a permutation of the keys) beside it, so that the two can be told apart.

References
----------
arXiv 2601.12145, Table 1. Its statements: TDA alone has all four; TRA has all but signed weights; softmax has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from theory_lab.attention.base import Mechanism
from theory_lab.attention.registry import list_mechanisms, resolve
from theory_lab.errors import InputError

COLUMNS = ("exact_zeros", "signed_weights", "no_sum_to_one", "length_aware")

#: What the paper states of the methods that its summaries name, in the order of COLUMNS.
PAPER: dict[str, tuple[bool, bool, bool, bool]] = {
    "softmax": (False, False, False, False),
    "tra": (True, False, True, True),
    "tda": (True, True, True, True),
}

_HEADS, _DIM, _VALUE, _HIDDEN = 4, 16, 8, 12
_TOLERANCE = 1e-9


class Measured(NamedTuple):
    """A yes or no, and how far the measurement was from the other answer (see the module)."""

    holds: bool
    margin: float


@dataclass(frozen=True)
class Features:
    """The measured columns of one mechanism."""

    name: str
    exact_zeros: Measured
    signed_weights: Measured
    no_sum_to_one: Measured
    length_aware: Measured
    position_dependent: Measured

    def columns(self) -> tuple[bool, bool, bool, bool]:
        """The four answers in the order of COLUMNS."""
        return (self.exact_zeros.holds, self.signed_weights.holds, self.no_sum_to_one.holds, self.length_aware.holds)

    def disagreements(self) -> list[str]:
        """Columns where the paper states the opposite; empty if it agrees or states nothing."""
        stated = PAPER.get(self.name)
        if stated is None:
            return []
        return [c for c, ours, theirs in zip(COLUMNS, self.columns(), stated, strict=True) if ours != theirs]


def measure_features(mechanism: Mechanism | str, *, name: str | None = None, seed: int = 0) -> Features:
    """Measure the four columns.

    Parameters
    ----------
    mechanism : Mechanism or str
        An instance with 4 heads, head dimension 16 and hidden dimension 12 where it depends on them, or a
        registered name, whose ``sample`` is measured.
    name : str, optional
        Name in the result; the registered name, or the class's.
    seed : int
        Of the inputs.

    Raises
    ------
    InputError
        For an unknown name or a mechanism that refuses the shapes above.
    """
    if isinstance(mechanism, str):
        name = mechanism if name is None else name
        made = resolve(mechanism).sample(
            torch.Generator().manual_seed(1234), heads=_HEADS, head_dim=_DIM, value_dim=_VALUE, hidden_dim=_HIDDEN
        )
    elif isinstance(mechanism, Mechanism) or hasattr(mechanism, "weights"):
        made = mechanism
    else:
        raise InputError("mechanism", repr(mechanism), "a mechanism or a registered name")
    name = type(made).__name__ if name is None else name
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        zeros, lowest, off = _rows(made, g)
        change = _length(made, g)
        moved = _positions(made, g)
    return Features(
        name,
        exact_zeros=Measured(zeros > 0, zeros),
        signed_weights=Measured(lowest < 0, abs(lowest)),
        no_sum_to_one=Measured(off > _TOLERANCE, off),
        length_aware=Measured(change > _TOLERANCE, change),
        position_dependent=Measured(moved > _TOLERANCE, moved),
    )


def feature_table(names: Iterable[str] | None = None, *, seed: int = 0) -> list[Features]:
    """:func:`measure_features` of `names`, or of every registered mechanism."""
    return [measure_features(name, seed=seed) for name in (list_mechanisms() if names is None else names)]


def _draw(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def _rows(m: Mechanism, g: torch.Generator) -> tuple[float, float, float]:
    """Share of exact zeros among visible keys, most negative weight relative to the largest, worst |sum - 1|."""
    zeros, visible, lowest, off = 0, 0, 0.0, 0.0
    for keys in (2, 24, 90):
        q, k = _draw(g, 2, _HEADS, keys, _DIM), _draw(g, 2, _HEADS, keys, _DIM)
        v, x = _draw(g, 2, _HEADS, keys, _VALUE), _draw(g, 2, keys, _HIDDEN)
        second = {"q2": _draw(g, *q.shape), "k2": _draw(g, *k.shape)} if m.views == 2 else {}
        w = m(q, k, v, x=x, causal=True, **second).weights
        seen = torch.ones(keys, keys, dtype=torch.bool).tril().expand(w.shape)
        zeros += int(((w == 0) & seen).sum())
        visible += int(seen.sum())
        lowest = min(lowest, float(w.min() / w.abs().max().clamp(min=1e-300)))
        off = max(off, float((w.sum(-1) - 1.0).abs().max()))
    return zeros / visible, lowest, off


def _side(m: Mechanism, g: torch.Generator) -> dict[str, Any]:
    return {"head_dim": _DIM, "x": _draw(g, 1, 1, _HIDDEN), "q": _draw(g, 1, _HEADS, 1, _DIM)}


def _row(m: Mechanism, g: torch.Generator, keys: int) -> tuple[Tensor, ...]:
    """Scores (1, H, 1, keys) a view, in the range of a cosine, the largest planted near its end."""
    views = []
    for _ in range(m.views):
        s = torch.rand(1, _HEADS, 1, keys, generator=g, dtype=torch.float64) * 1.2 - 0.4
        s[..., int(torch.randint(keys, (1,), generator=g))] = 0.95
        views.append(s)
    return tuple(views)


def _length(m: Mechanism, g: torch.Generator) -> float:
    worst = 0.0
    # The lowest score possible: opposite directions for a cosine; for a logit one whose weight is negligible.
    low = -1.0 if m.cosine else -60.0
    for keys in (3, 12, 50):
        side, row = _side(m, g), _row(m, g, keys)
        before = _relative(m.weights(*row, causal=True, **side))
        for extra in (1, 30, 300):
            longer = tuple(torch.cat([torch.full((*s.shape[:-1], extra), low, dtype=s.dtype), s], -1) for s in row)
            after = _relative(m.weights(*longer, causal=True, **side)[..., extra:])
            worst = max(worst, float((after - before).abs().max()))
    return worst


def _relative(w: Tensor) -> Tensor:
    total = w.abs().sum(-1, keepdim=True)
    return w / torch.where(total > 0, total, torch.ones_like(total))


def _positions(m: Mechanism, g: torch.Generator) -> float:
    worst = 0.0
    for keys in (12, 50):
        side, row = _side(m, g), _row(m, g, keys)
        before = m.weights(*row, causal=True, **side)
        for _ in range(3):
            order = torch.randperm(keys, generator=g)
            after = m.weights(*(s[..., order] for s in row), causal=True, **side)
            worst = max(worst, float((after - before[..., order]).abs().max()))
    return worst


def markdown_table(features: Iterable[Features]) -> str:
    """The measured columns as a Markdown table, with margins, and the paper's statement where it makes one."""
    head = "| mechanism | exact zeros | signed | no sum-to-one | length-aware | by position | the paper |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for f in features:
        cells = [f"yes ({m.margin:.1g})" if m.holds else "no" for m in (*_measured(f), f.position_dependent)]
        stated = PAPER.get(f.name)
        if stated is None:
            paper = ""
        elif f.disagreements():
            paper = "disagrees on " + ", ".join(f.disagreements())
        else:
            paper = "agrees"
        lines.append(f"| {f.name} | " + " | ".join([*cells, paper]) + " |")
    return "\n".join(lines) + "\n"


def _measured(f: Features) -> tuple[Measured, ...]:
    return (f.exact_zeros, f.signed_weights, f.no_sum_to_one, f.length_aware)
