"""What the statistics of an attention map look like.

Shapes: B batch, H query heads, T rows, S keys, V views, and one entry a level, exponent or near-zero bound.
Parts that were not asked for are None (or empty tuples). Rows and keys of padding hold 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ViewStatistics:
    """Weights of one view of a two-view mechanism, before the difference; see :class:`AttentionStatistics`."""

    mass: torch.Tensor | None
    support: torch.Tensor | None
    maximum: torch.Tensor | None
    column_mass: torch.Tensor | None
    near_zero: torch.Tensor | None


@dataclass(frozen=True)
class ScoreStatistics:
    """Scores ``<q_i, k_j>`` (cosines where normalized, no scale) over the visible pairs with i - j >= moment_gap.

    Attributes
    ----------
    count : torch.Tensor
        int64 (B, H): pairs.
    mean, variance, minimum, maximum : torch.Tensor
        float64 (B, H); the variance divides by the count. NaN where there are no pairs.
    log_mgf : torch.Tensor
        float64 (B, H, exponents): ``log mean exp(t s)``.
    exceedances : torch.Tensor
        int64 (B, H, levels): pairs with s > level, strictly.
    """

    count: torch.Tensor
    mean: torch.Tensor
    variance: torch.Tensor
    minimum: torch.Tensor
    maximum: torch.Tensor
    log_mgf: torch.Tensor
    exceedances: torch.Tensor


@dataclass(frozen=True)
class AttentionStatistics:
    """Statistics of the weights w_ij of an attention map; float64 and int64 on the device of q.

    Attributes
    ----------
    visible : torch.Tensor
        int64 (B, H, T): keys each row sees.
    mass : torch.Tensor
        float64 (B, H, T): ``sum_j |w_ij|``.
    entropy : torch.Tensor
        float64 (B, H, T): entropy in nats of ``|w_ij| / mass``; 0 for a row of zeros.
    support : torch.Tensor
        int64 (B, H, T): weights that are not 0. Softmax and ETA have no zeros: their support is what a row sees,
        whatever underflows.
    maximum : torch.Tensor
        float64 (B, H, T): ``max_j |w_ij|``.
    column_mass : torch.Tensor
        float64 (B, H, S): ``sum_i |w_ij|``.
    column_rows : torch.Tensor
        int64 (B, S): rows that see key j (through a mask that differs by head: rows that see it in any head).
    near_zero : torch.Tensor
        int64 (B, H, bounds): visible entries with ``|w_ij| < bound``.
    survivors : torch.Tensor or None
        int64 (V, B, H, T), TRA and TDA: visible keys with s_ij > tau_i, by view.
    consensus : torch.Tensor or None
        int64 (B, H, T), TDA: keys that survive in both views.
    views : tuple of ViewStatistics
        TDA: the weights of the two views before they are subtracted.
    scores : tuple of ScoreStatistics
        One a view.
    covariance : torch.Tensor or None
        float64 (B, H), TDA: covariance of the two views' scores over the pairs of ``scores``.
    """

    visible: torch.Tensor
    mass: torch.Tensor | None
    entropy: torch.Tensor | None
    support: torch.Tensor | None
    maximum: torch.Tensor | None
    column_mass: torch.Tensor | None
    column_rows: torch.Tensor | None
    near_zero: torch.Tensor | None
    survivors: torch.Tensor | None
    consensus: torch.Tensor | None
    views: tuple[ViewStatistics, ...]
    scores: tuple[ScoreStatistics, ...]
    covariance: torch.Tensor | None
