"""Inputs of the benchmark: random scores, planted stripes, and the scattered pattern of trained models.

All return unit-norm q, k and random v of shape (1, heads, length, dim).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def _random(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=device)


def random_scores(
    heads: int, length: int, dim: int, dtype: torch.dtype, seed: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Independent directions: survivors are rare and scattered."""
    g = torch.Generator(device).manual_seed(seed)
    q, k, v = (_random((1, heads, length, dim), g, device) for _ in range(3))
    return F.normalize(q, dim=-1).to(dtype), F.normalize(k, dim=-1).to(dtype), v.to(dtype)


def planted_stripes(
    fraction: float, heads: int, length: int, dim: int, dtype: torch.dtype, seed: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """About ``fraction`` of the 64-key columns hold a key that every query looks at (0.8 cosine)."""
    g = torch.Generator(device).manual_seed(seed)
    q, k, v = (_random((1, heads, length, dim), g, device) for _ in range(3))
    q[..., 0] = k[..., 0] = 0.0
    q, k = F.normalize(q, dim=-1) * 0.6, F.normalize(k, dim=-1)
    q[..., 0] = 0.8
    columns = -(-length // 64)
    hot = torch.zeros(columns, dtype=torch.bool, device=device)
    hot[torch.randperm(columns, generator=g, device=device)[: max(1, round(fraction * columns))]] = True
    place = torch.randint(0, 64, (columns,), generator=g, device=device)
    at = (torch.arange(columns, device=device) * 64 + place).clamp_max(length - 1)[hot]
    k[:, :, at] = 0.0
    k[:, :, at, 0] = 1.0
    return q.to(dtype), k.to(dtype), v.to(dtype)


def trained_regime(
    heads: int, length: int, dim: int, dtype: torch.dtype, seed: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Topics that cluster: about 0.5% of the entries alive, in 70% of the 64x64 and 20% of the 16x16 tiles.

    A pair is alive when both positions drew the same of 160 topics and neither is among the tenth that has
    none. Each 64 positions share a pool of 15 topics, each 16 of them 6 of the pool; so two pools meet with
    about 1 - exp(-15^2 / 160), and given one common topic two groups of 16 both hold it with (6 / 15)^2.
    """
    g = torch.Generator(device).manual_seed(seed)
    topics, pool, few = 160, 15, 6
    centers = F.normalize(_random((heads, topics, dim), g, device), dim=-1)

    def positions() -> torch.Tensor:
        blocks = -(-length // 64)
        pools = torch.rand((heads, blocks, topics), generator=g, device=device).argsort(-1)[..., :pool]
        own = torch.rand((heads, blocks, 4, pool), generator=g, device=device).argsort(-1)[..., :few]
        pick = torch.randint(0, few, (heads, blocks, 4, 16), generator=g, device=device)
        chosen = own.gather(-1, pick).flatten(2)
        return pools.gather(-1, chosen).flatten(1)[:, :length]

    def place(topic: torch.Tensor) -> torch.Tensor:
        center = centers.gather(1, topic[..., None].expand(-1, -1, dim))
        noise = F.normalize(_random((heads, length, dim), g, device), dim=-1)
        lone = torch.rand((heads, length, 1), generator=g, device=device) < 0.1
        return F.normalize(torch.where(lone, 0.0, center) + 0.25 * noise, dim=-1)[None]

    q, k = place(positions()), place(positions())
    v = _random((1, heads, length, dim), g, device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def fractions(q: torch.Tensor, k: torch.Tensor, tau: torch.Tensor) -> dict[str, float]:
    """Alive share of the causal entries, of the 64x64 and 16x16 tiles, and of the single keys of blocks of 64 rows.

    Measured on the first head, in row chunks.
    """
    length = q.shape[2]
    count = keys = 0
    live = {16: 0, 64: 0}
    key = torch.arange(length, device=q.device)
    for start in range(0, length, 1024):
        rows = torch.arange(start, min(start + 1024, length), device=q.device)
        score = q[0, 0, rows].float() @ k[0, 0].float().T
        alive = (score > tau[rows, None]) & (key[None, :] <= rows[:, None])
        count += int(alive.sum())
        alive = F.pad(alive, (0, -length % 64, 0, -rows.numel() % 64))
        keys += 64 * int(alive.unflatten(0, (-1, 64)).any(1).sum())
        for size in live:
            tiles = alive.unflatten(0, (-1, size)).unflatten(2, (-1, size)).any(3).any(1)
            live[size] += int(tiles.sum())
    total = length * (length + 1) / 2
    out = {"entries": count / total, "keys64": keys / total}
    for size, number in live.items():
        n = -(-length // size)
        out[f"tiles{size}"] = number / (n * (n + 1) / 2)
    return out
