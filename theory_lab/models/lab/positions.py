"""Where tokens stand: rotary embeddings with NTK-aware scaling, and the linear biases of NAPE.

References
----------
Su et al., "RoFormer", arXiv 2104.09864 (rotary embeddings).
Press, Smith and Lewis, "Train Short, Test Long", arXiv 2108.12409 (ALiBi: its slopes).
NTK-aware scaling: the base of the frequencies times factor^(D / (D - 2)), so that the lowest frequency is stretched by
the factor and the highest not at all.
"Long-Context Generalization with Sparse Attention", arXiv 2506.16640 (NAPE: heads without positions beside ALiBi's).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotations(positions: Tensor, head_dim: int, theta: float, ntk_factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary embeddings.

    Parameters
    ----------
    positions : Tensor
        (B, T) integers.
    head_dim : int
        D, even.
    theta : float
        Base of the frequencies.
    ntk_factor : float
        At least 1.

    Returns
    -------
    tuple of Tensor
        (B, 1, T, D / 2) each, float32.
    """
    base = theta * ntk_factor ** (head_dim / (head_dim - 2)) if head_dim > 2 else theta
    if torch.compiler.is_compiling():
        return _opaque_rotations(positions, head_dim, base)
    return _rotations(positions, head_dim, base)


def _rotations(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    # float64 on the way: at position 10^5 float32 frequencies are off by a visible angle.
    order = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64)
    angles = positions[:, None, :, None].double() * base ** (-order / head_dim)
    return angles.cos().float(), angles.sin().float()


# A compiler that sees these pointwise steps puts them into every kernel that turns queries and keys, and computes each
# cosine in float64 again for each head, layer and direction: a third of a training step.
_opaque_rotations = torch.library.custom_op("theory_lab::rotations", _rotations, mutates_args=())


@_opaque_rotations.register_fake
def _(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    shape = (positions.shape[0], 1, positions.shape[1], head_dim // 2)
    return positions.new_empty(shape, dtype=torch.float32), positions.new_empty(shape, dtype=torch.float32)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + D/2}) of queries or keys (B, H, T, D); computed in float32, or float64 for such."""
    first, second = x.chunk(2, -1)
    # Promotion widens on the way, and halves are narrowed before they are joined: fewer bytes to move.
    turned = torch.addcmul(first * cosines, second, sines, value=-1), torch.addcmul(second * cosines, first, sines)
    return torch.cat([half.to(x.dtype) for half in turned], -1)


def nape_slopes(heads: int, device: torch.device | str = "cpu", steepest: float = 2.0) -> Tensor:
    """Slope a head of NAPE, (H,): 0 in the first half; `steepest`, a half of it, a quarter of it, ... in the others.

    ALiBi's own series, 2^(-8 k / m), begins so low that no head of a short model sees the token before it alone.
    """
    free = heads // 2
    steps = torch.arange(heads - free, device=device, dtype=torch.float32)
    return torch.cat([torch.zeros(free, device=device), steepest * torch.exp2(-steps)])


def linear_bias(slopes: Tensor, queries: int, keys: int) -> Tensor:
    """-slope * distance, (H, T, S) float32; queries are the last positions of the keys."""
    rows = torch.arange(keys - queries, keys, device=slopes.device)
    distance = rows[:, None] - torch.arange(keys, device=slopes.device)[None, :]
    return -slopes[:, None, None] * distance.clamp_min(0)
