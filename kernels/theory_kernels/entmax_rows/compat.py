"""The names and arguments of the ``entmax`` package, computed by :func:`theory_kernels.entmax`.

Arguments that steer the package's solvers (``k``, ``n_iter``) are taken and not needed: the threshold is always solved
to the accuracy of the dtype.
"""

from __future__ import annotations

import torch

from .api import entmax


def sparsemax(X: torch.Tensor, dim: int = -1, k: int | None = None) -> torch.Tensor:
    """alpha = 2 along ``dim`` (arXiv 1602.02068); ``k`` has no effect."""
    return entmax(X, 2.0, dim)


def entmax15(X: torch.Tensor, dim: int = -1, k: int | None = None) -> torch.Tensor:
    """alpha = 1.5 along ``dim`` (arXiv 1905.05702); ``k`` has no effect."""
    return entmax(X, 1.5, dim)


def entmax_bisect(
    X: torch.Tensor,
    alpha: float | torch.Tensor = 1.5,
    dim: int = -1,
    n_iter: int = 50,
    ensure_sum_one: bool = True,
) -> torch.Tensor:
    """Any alpha along ``dim``, with a gradient to a tensor alpha; ``n_iter`` has no effect.

    Parameters
    ----------
    X : torch.Tensor
        Scores, any shape.
    alpha : float or torch.Tensor
        At least 1; a tensor has the shape of X with 1 at ``dim``, or broadcasts to it.
    dim : int
        The dimension along which weights sum to one.
    n_iter : int
        Not needed.
    ensure_sum_one : bool
        Divide the weights by their sum, which the solver leaves within rounding of 1.
    """
    return _whole(entmax(X, alpha, dim, method="newton"), dim, ensure_sum_one)


def sparsemax_bisect(X: torch.Tensor, dim: int = -1, n_iter: int = 50, ensure_sum_one: bool = True) -> torch.Tensor:
    """alpha = 2 by the general solver; ``n_iter`` has no effect."""
    return _whole(entmax(X, 2.0, dim, method="newton"), dim, ensure_sum_one)


def _whole(p: torch.Tensor, dim: int, ensure: bool) -> torch.Tensor:
    if not ensure or p.shape[dim] == 0:
        return p
    total = p.sum(dim, keepdim=True)
    return p / torch.where(total > 0, total, torch.ones_like(total))
