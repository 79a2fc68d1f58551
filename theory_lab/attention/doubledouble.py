"""Double-double arithmetic on float64 tensors: pairs (high, low) of about 106 significant bits.

Only what the exact entmax needs. A number is the unevaluated sum high + low with |low| <= ulp(high) / 2.
:func:`exact_sum` goes further, for sums that cancel.

References
----------
Dekker, "A floating-point technique for extending the available precision", Numer. Math. 18 (1971);
Knuth, TAOCP 2, section 4.2.2 (the six-operation exact sum);
Ogita, Rump and Oishi, "Accurate sum and dot product", SIAM J. Sci. Comput. 26 (2005) (sums of errors of sums).
"""

from __future__ import annotations

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def two_sum(a: Tensor, b: Tensor) -> Pair:
    """a + b exactly, as a pair."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def _renormalize(high: Tensor, low: Tensor) -> Pair:
    s = high + low
    return s, low - (s - high)


def two_product(a: Tensor, b: Tensor) -> Pair:
    """a * b exactly, as a pair, for |a|, |b| < 2^970 (splitting by 2^27 + 1)."""
    product = a * b
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _split(a: Tensor) -> Pair:
    c = a * 134217729.0
    high = c - (c - a)
    return high, a - high


def add(a: Pair, b: Pair) -> Pair:
    """a + b, relative error below 2^-104 of the larger magnitude involved."""
    s, e = two_sum(a[0], b[0])
    t, f = two_sum(a[1], b[1])
    s, e = _renormalize(s, e + t)
    return _renormalize(s, e + f)


def negate(a: Pair) -> Pair:
    return -a[0], -a[1]


def multiply(a: Pair, b: Pair) -> Pair:
    p, e = two_product(a[0], b[0])
    return _renormalize(p, e + (a[0] * b[1] + a[1] * b[0]))


def divide(a: Pair, k: Tensor) -> Pair:
    """a / k for a float64 k."""
    q = a[0] / k
    p, e = two_product(q, k)
    rest = ((a[0] - p) - e) + a[1]
    return _renormalize(q, rest / k)


def quotient(a: Pair, b: Pair) -> Pair:
    """a / b, one correction of the float64 quotient; b must not be zero."""
    q = a[0] / b[0]
    rest = add(a, negate(multiply((q, torch.zeros_like(q)), b)))
    return _renormalize(q, (rest[0] + rest[1]) / b[0])


def square_root(a: Pair) -> Pair:
    """sqrt(a), one Newton step from the float64 root; 0 for a <= 0."""
    positive = a[0] > 0
    root = torch.sqrt(torch.where(positive, a[0], torch.ones_like(a[0])))
    p, e = two_product(root, root)
    rest = ((a[0] - p) - e) + a[1]
    high, low = _renormalize(root, rest / (2.0 * root))
    zero = torch.zeros_like(root)
    return torch.where(positive, high, zero), torch.where(positive, low, zero)


def tree_sum(a: Pair) -> Pair:
    """Sum over the last dimension by halves, keeping it as a dimension of size one."""
    high, low = a
    while high.shape[-1] > 1:
        if high.shape[-1] % 2:
            high, low = torch.nn.functional.pad(high, (0, 1)), torch.nn.functional.pad(low, (0, 1))
        half = high.shape[-1] // 2
        high, low = add((high[..., :half], low[..., :half]), (high[..., half:], low[..., half:]))
    return high, low


def exact_sum(terms: Tensor, folds: int = 4) -> Pair:
    """Sum of float64 terms over the last dimension, as if in `folds` times the precision, then as a pair.

    The rounding errors of a sum by halves are float64 numbers themselves; they are summed the same way, and so on.
    """
    parts = []
    for _ in range(folds):
        errors = []
        while terms.shape[-1] > 1:
            if terms.shape[-1] % 2:
                terms = torch.nn.functional.pad(terms, (0, 1))
            half = terms.shape[-1] // 2
            terms, error = two_sum(terms[..., :half], terms[..., half:])
            errors.append(error)
        parts.append(terms)
        if not errors:
            break
        terms = torch.cat(errors, -1)
    high, low = parts[-1], torch.zeros_like(parts[-1])
    for part in reversed(parts[:-1]):
        high, low = add((part, torch.zeros_like(part)), (high, low))
    return high, low
