"""A checked call of :func:`theory_kernels.elastic_decode`, as its implementations see it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .bounds import BlockBounds
from .cache import Paging


class View(NamedTuple):
    """Queries, keys and what is known of their blocks (None: every block is read)."""

    q: torch.Tensor
    k: torch.Tensor
    bounds: BlockBounds | None


class Problem(NamedTuple):
    """One call.

    Attributes
    ----------
    views : list of View
        One, or two for TDA.
    v : torch.Tensor
        Values, laid out like the keys.
    tau : torch.Tensor
        (B, H, T), float32 (float64 for float64 inputs); may have strides of 0.
    lam : torch.Tensor or None
        (H,), weight of the second view.
    lengths : torch.Tensor or None
        int32 (B,): keys of each sequence, new ones included; None where all are full.
    paging : Paging
        Layout of the caches.
    block : int
        Keys a block.
    scale : float
        Factor of the products.
    softmax : bool
        Softmax over the survivors; else powers of their excess.
    power : float
        Exponent of the excess.
    normalize : bool
        Divide the queries by their norms.
    rms_eps : float or None
        Output norm.
    """

    views: list[View]
    v: torch.Tensor
    tau: torch.Tensor
    lam: torch.Tensor | None
    lengths: torch.Tensor | None
    paging: Paging
    block: int
    scale: float
    softmax: bool
    power: float
    normalize: bool
    rms_eps: float | None

    def last_keys(self) -> torch.Tensor:
        """Position of the last key that each row sees, (B, T); below 0 for none."""
        q = self.views[0].q
        t = torch.arange(q.shape[2], device=q.device)
        if self.lengths is None:
            return (self.paging.capacity - q.shape[2] + t).expand(q.shape[0], -1)
        return self.lengths[:, None] - q.shape[2] + t


class DecodeStatistics(NamedTuple):
    """What a call met.

    Attributes
    ----------
    survivors : torch.Tensor
        int32 (B, H, T): keys with a weight that is not 0 (in either view).
    blocks_read : torch.Tensor
        int32 (B, G): blocks of keys read, once for every block of query rows.
    maximum, logsumexp : torch.Tensor or None
        float32 (B, H, T), for softmax: largest score and log of the sum of exponentials of the survivors; -inf
        where there is none.
    """

    survivors: torch.Tensor
    blocks_read: torch.Tensor
    maximum: torch.Tensor | None
    logsumexp: torch.Tensor | None
