"""One call, checked: what every implementation is given."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .visibility import Visibility, remember, visible_counts

WEIGHTS = ("softmax", "entmax", "tra", "tda", "eta")
NEED = ("rows", "columns", "near_zero", "scores")


@dataclass(frozen=True)
class Request:
    """Parameters of a call. Per-head parameters are float64 (H,), the ETA threshold float64 (B, H, T)."""

    weights: str
    see: Visibility
    scale: float
    alpha: float
    beta: torch.Tensor
    lam: torch.Tensor
    kappa: float
    power: float
    normalize: bool
    eta_threshold: torch.Tensor | None
    eta_sharpness: float
    eta_reading: str
    softcap: float | None
    sinks: torch.Tensor | None
    near_zero: tuple[float, ...]
    levels: tuple[float, ...]
    exponents: tuple[float, ...]
    moment_gap: int
    need: frozenset[str]

    @property
    def views(self) -> int:
        return 2 if self.weights == "tda" else 1

    @property
    def thresholded(self) -> bool:
        """TRA and TDA: weights that do not depend on the rest of their row."""
        return self.weights in ("tra", "tda")

    def wants(self, part: str) -> bool:
        return part in self.need

    def tau(self, visible: torch.Tensor, head_dim: int) -> torch.Tensor:
        """``beta sqrt(2 max(0, log(n / kappa)) / d)`` of every row, float64 (B, H, T); n counts the visible keys."""
        if self.see.mask is not None:
            return self.beta[:, None] * self._level(visible, head_dim)

        def make() -> torch.Tensor:
            return self._level(visible_counts(self.see, 1), head_dim)

        levels = remember(self.see, "levels", make, self.kappa, head_dim)
        return self.beta[:, None] * levels

    def _level(self, visible: torch.Tensor, head_dim: int) -> torch.Tensor:
        """The threshold for beta = 1."""
        n = visible.double().clamp_min(1.0)
        return (2.0 * (n / self.kappa).log().clamp_min(0.0) / head_dim).sqrt()

    def visible(self, heads: int) -> torch.Tensor:
        return visible_counts(self.see, heads)


def unit_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows divided by their norm; zero rows stay zero."""
    largest = x.abs().amax(-1, keepdim=True)
    y = x / torch.where(largest > 0, largest, 1.0)
    norm = y.square().sum(-1, keepdim=True).sqrt()
    return y / torch.where(norm > 0, norm, 1.0)


def stored(x: torch.Tensor, first: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
    """(B, H, T, D) with the rows outside [first, stop) set to 0: what lies in padding must not matter."""
    row = torch.arange(x.shape[2], device=x.device)
    inside = (row >= first[:, None]) & (row < stop[:, None])
    return torch.where(inside[:, None, :, None], x, 0.0)
