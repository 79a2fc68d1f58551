"""Captured attention made of random queries and keys, without a model."""

from __future__ import annotations

import torch

from theory_lab.probes import Captured

#: Tokens that would do harm if a page took them for markup.
HOSTILE = ("<script>window.hacked=1</script>", "<img src=x onerror='window.hacked=1'>", "&amp;", "\n", "'\"")


def made(
    name: str = "made", tokens: int = 60, layers: int = 3, heads: int = 4, seed: int = 0, words: str = "word"
) -> Captured:
    """A causal model of two key heads; one key of each layer draws attention."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for layer in range(layers):
        q = torch.randn(1, heads, tokens, 8, generator=generator) + 1.0
        k = torch.randn(1, 2, tokens, 8, generator=generator)
        k[:, :, 3 + layer] += 1.0
        pairs.append((q, k))
    texts = [HOSTILE[i] if i < len(HOSTILE) else f" {words}{i}" for i in range(tokens)]
    return Captured.from_tensors(name, texts, pairs)
