"""The stream in plain torch: the definition of correct, bit for bit what the kernel counts.

Decision j of trial t and row m takes 16 bits of the Philox-4x32-10 block (Salmon et al., SC 2011) with
key = seed and counter (j // 8, t, m, 0): word (j % 8) // 2, low half first. The key exceeds when these
bits, read as an integer, are below the first 16 bits of the tail P(X > tau); that is X = F^-1(1 - U),
compared without being computed. A tie is settled by the 32 next bits: the i-th tie of a (trial, row) in
threshold c takes the first word of the block (i, t, m, 1 + c).
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
PER_BLOCK = 8
# Blocks of one chunk: 2^16 blocks are 2^19 decisions and a few MiB.
_CHUNK = 1 << 16


def _multiply(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a * b without leaving int64."""
    low = (a & 0xFFFF) * b
    high = (a >> 16) * b + (low >> 16)
    return high >> 16, (((high & 0xFFFF) << 16) | (low & 0xFFFF)) & _MASK


def philox(
    seed: int, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox-4x32-10 of int64 tensors that hold 32-bit counters; returns four such tensors."""
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        high_a, low_a = _multiply(0xD2511F53, c0)
        high_b, low_b = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def counts(
    first: list[list[int]], rest: list[list[int]], length: list[int], trials: int, seed: int, device: torch.device
) -> torch.Tensor:
    """Decisions below each threshold, int32 (thresholds, rows, trials).

    ``first`` and ``rest`` hold the digits of threshold c and row m at [c][m].
    """
    out = torch.zeros((len(first), len(length), trials), dtype=torch.int32, device=device)
    for m, n in enumerate(length):
        ties = torch.zeros((len(first), trials), dtype=torch.int64, device=device)
        blocks = -(-n // PER_BLOCK)
        step = max(1, _CHUNK // max(1, trials))
        trial = torch.arange(trials, device=device)[:, None]
        row, zero = torch.full_like(trial, m), torch.zeros_like(trial)
        for start in range(0, blocks, step):
            block = torch.arange(start, min(start + step, blocks), device=device)[None, :]
            words = philox(seed, block + zero, trial + 0 * block, row + 0 * block, zero + 0 * block)
            halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
            bits = torch.stack(halves, -1)
            valid = block[..., None] * PER_BLOCK + torch.arange(PER_BLOCK, device=device) < n
            for c, levels in enumerate(first):
                out[c, m] += ((bits < levels[m]) & valid).sum((1, 2), dtype=torch.int32)
                ties[c] += ((bits == levels[m]) & valid).sum((1, 2))
        for c in range(len(first)):
            for index in range(int(ties[c].max()) if trials else 0):
                word = philox(seed, zero + index, trial, row, zero + 1 + c)[0][:, 0]
                out[c, m] += ((word < rest[c][m]) & (ties[c] > index)).to(torch.int32)
    return out
