"""Running a trained model with hard-pruned attention: constant thresholds, softmax over the keys that reach them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from theory_lab.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "theory_lab_pruned"
# Scores of a block of rows, over all heads.
_SCORES = 1 << 23
# By module: its place among the layers, its thresholds, and who counts.
_active: dict[int, tuple[int, torch.Tensor, Pruned | None]] = {}


class Pruned:
    """What a pruned run leaves out, counted for every layer, head and row.

    Parameters
    ----------
    block : int
        Keys a block; a block counts as read if one of its keys reaches the threshold.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self._kept: dict[int, torch.Tensor] = {}
        self._blocks: dict[int, torch.Tensor] = {}
        self._dead = 0
        self._rows = 0
        self._calls = 0

    def add(self, layer: int, q: torch.Tensor, k: torch.Tensor, tau: torch.Tensor, scale: float) -> None:
        """Count one call: q (1, H, T, D), k (1, G, T, D), tau (H,) or (H, T)."""
        tau = tau.reshape(q.shape[1], -1).expand(-1, q.shape[2])
        heads, rows = q.shape[1:3]
        wide = k[0].float().repeat_interleave(heads // k.shape[1], 0)
        short = -rows % self._block
        kept, blocks = [], []
        height = max(1, _SCORES // (heads * rows))
        for first in range(0, rows, height):
            stop = min(first + height, rows)
            above = scale * (q[0, :, first:stop].float() @ wide.transpose(-1, -2)) >= tau[:, first:stop, None]
            place = torch.arange(rows, device=q.device)
            above &= place[None, :] <= place[first:stop, None]
            kept.append(above.sum(-1))
            padded = torch.nn.functional.pad(above, (0, short)).unflatten(-1, (-1, self._block))
            blocks.append(padded.any(-1).sum(-1))
        found, read = torch.cat(kept, -1).double(), torch.cat(blocks, -1).double()
        self._kept[layer] = self._kept.get(layer, torch.zeros_like(found)) + found
        self._blocks[layer] = self._blocks.get(layer, torch.zeros_like(read)) + read
        self._dead += int((found == 0).sum())
        self._rows += found.numel()
        if layer == min(self._kept):
            self._calls += 1

    def _shares(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and blocks kept (layers, heads, rows), summed over calls, and visible ones of a row in all calls."""
        kept = torch.stack([self._kept[layer] for layer in sorted(self._kept)])
        blocks = torch.stack([self._blocks[layer] for layer in sorted(self._blocks)])
        n = torch.arange(1, kept.shape[-1] + 1, dtype=torch.float64, device=kept.device)
        return kept, blocks, n * self._calls, torch.ceil(n / self._block) * self._calls

    @property
    def saved_keys(self) -> float:
        """Share of the visible (query, key) pairs below the threshold."""
        kept, _, seen, _ = self._shares()
        return 1.0 - float(kept.sum() / (seen.sum() * kept.shape[0] * kept.shape[1]))

    @property
    def saved_blocks(self) -> float:
        """Share of the visible (query, block) pairs without a survivor."""
        _, blocks, _, seen = self._shares()
        return 1.0 - float(blocks.sum() / (seen.sum() * blocks.shape[0] * blocks.shape[1]))

    @property
    def saved_by_head(self) -> torch.Tensor:
        """:attr:`saved_keys` of every layer and head."""
        kept, _, seen, _ = self._shares()
        return (1.0 - kept.sum(-1) / seen.sum()).cpu()

    @property
    def dead_rows(self) -> float:
        """Share of rows without a survivor."""
        return self._dead / self._rows

    def by_length(self) -> tuple[dict[str, float], dict[str, float]]:
        """Shares of keys and of blocks that a row reads where it sees n keys: means over the rows from 7/8 n to n."""
        kept, blocks, seen, seen_blocks = self._shares()
        keys, read, n = {}, {}, 16
        while n <= kept.shape[-1]:
            rows = slice(n - n // 8, n)
            keys[str(n)] = float((kept[..., rows] / seen[rows]).mean())
            read[str(n)] = float((blocks[..., rows] / seen_blocks[rows]).mean())
            n *= 2
        return keys, read


@contextmanager
def pruned_attention(model: PreTrainedModel, tau: torch.Tensor, counts: Pruned | None = None) -> Iterator[None]:
    """Run a model with hard-pruned attention for the time of the block.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder, read without padding and without a cache; restored when the block is left.
    tau : torch.Tensor
        Thresholds (layers, heads) in units of the logits. Keys below have weight 0, the others the softmax of their
        logits; a row without a survivor is 0.
    counts : Pruned, optional
        Counts what is left out.

    Raises
    ------
    InputError
        If the thresholds do not fit the model, or a layer has a window, caps, sinks or biases.
    """
    from theory_lab.probes.watching import find_attention

    modules = find_attention(model)
    if tau.ndim != 2 or tau.shape[0] != len(modules):
        raise InputError("tau", f"shape {tuple(tau.shape)}", f"thresholds of {len(modules)} layers")
    _register()
    before = model.config._attn_implementation
    for place, (_, module) in enumerate(modules.values()):
        _active[id(module)] = (place, tau[place], counts)
    try:
        model.set_attn_implementation(_NAME)
        yield
    finally:
        model.set_attn_implementation(before)
        for _, module in modules.values():
            _active.pop(id(module), None)


@cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention)
    # Causality is ours, and there is no padding: no mask is made.
    AttentionMaskInterface.register(_NAME, lambda *_, **__: None)


def _attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **given: Any
) -> tuple[torch.Tensor, None]:
    from theory_kernels import elastic_attention

    odd = [
        name for name in ("sliding_window", "softcap", "s_aux", "sinks", "position_bias") if given.get(name) is not None
    ]
    if odd or mask is not None:
        raise InputError("model", type(module).__name__, f"attention without {', '.join(odd) or 'a mask of its own'}")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise InputError("input_ids", f"shape {tuple(query.shape[::2])}", "one sequence, without a cache")
    place, tau, counts = _active[id(module)]
    if tau.shape[0] != query.shape[1]:
        raise InputError("tau", f"{tau.shape[0]} heads", f"the {query.shape[1]} of the model")
    scaling = given.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    # Nothing is dropped below any score: a finite number, since -inf would make NaN of its own arithmetic.
    level = tau.to(query.device, torch.float32).clamp(min=-1e30)
    out = elastic_attention(query, key, value, tau=level[:, None], prune="exact", scale=scale)
    if counts is not None:
        counts.add(place, query, key, level, scale)
    return out.transpose(1, 2).contiguous(), None
