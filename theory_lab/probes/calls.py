"""One attention call of a watched model, as statistics take it.

Shapes: B batch, H query heads, G key heads, T queries, S keys, D head dimension, V value dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from theory_lab.probes.own import Own


@dataclass(frozen=True)
class Visibility:
    """Which keys each query sees.

    Query ``i`` of text ``b`` sees key ``j`` if ``key_starts[b] <= j < lengths[b]``, and, if ``causal``,
    ``j <= i + query_offset``, and, with a window, ``j > i + query_offset - window``, or ``|i - j| <= window`` where not
    ``causal``. ``mask`` is given only where that does not describe it, and then alone does.

    Parameters
    ----------
    causal : bool
        Whether queries see no later keys.
    query_offset : int or Tensor (B,)
        Position of the first query among the keys: 0 for a whole text, S - 1 for one decoded token.
    window : int or None
        Number of keys that a causal query sees at most; of others, how far to both sides they see (ModernBERT).
    key_starts, lengths : Tensor (B,) or None
        First valid key (left padding) and one past the last (right padding); None for 0 and S.
    query_starts, query_lengths : Tensor (B,) or None
        The valid queries in the same way: those whose token is no padding; None for 0 and T.
    mask : bool Tensor (B or 1, H or 1, T, S) or None
        True where a query sees a key.
    """

    causal: bool
    query_offset: int | torch.Tensor = 0
    window: int | None = None
    key_starts: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    query_starts: torch.Tensor | None = None
    query_lengths: torch.Tensor | None = None
    mask: torch.Tensor | None = None

    def materialize(self, batch: int, queries: int, keys: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """The whole map as a bool tensor (B, 1 or H, T, S): for tests and short texts."""
        import torch

        if self.mask is not None:
            return self.mask.expand(batch, -1, -1, -1)
        column = torch.arange(keys, device=device)
        seen = torch.ones(batch, 1, queries, keys, dtype=torch.bool, device=device)
        if self.causal:
            offset = torch.as_tensor(self.query_offset, device=device).reshape(-1, 1, 1, 1)
            row = torch.arange(queries, device=device)[:, None] + offset
            seen = seen & (column <= row)
            if self.window is not None:
                seen = seen & (column > row - self.window)
        elif self.window is not None:
            seen = seen & ((column - torch.arange(queries, device=device)[:, None]).abs() <= self.window)
        if self.key_starts is not None:
            seen = seen & (column >= self.key_starts.to(device).reshape(-1, 1, 1, 1))
        if self.lengths is not None:
            seen = seen & (column < self.lengths.to(device).reshape(-1, 1, 1, 1))
        return seen


@dataclass(frozen=True)
class AttentionCall:
    """What one attention layer was called with.

    The tensors are the model's own, without gradients: an observer must not write to them, and one that keeps them
    keeps their memory, and must copy the keys, which a cache may write over later.

    Parameters
    ----------
    layer : int
        Index of the layer.
    name : str
        Path of the attention module in the model.
    module : torch.nn.Module
        The attention module.
    q : Tensor (B, H, T, D)
        Queries, after any normalization and rotation.
    k : Tensor (B, G, S, D)
        Keys likewise, those of a cache included; G divides H.
    v : Tensor (B, G, S, V)
        Values.
    scale : float
        Factor of the scores: logits are ``scale * <q, k>``.
    softcap : float or None
        Logits are capped to ``softcap * tanh(logit / softcap)``.
    sinks : Tensor (H,) or None
        Learned logits that join the softmax's denominator only.
    visibility : Visibility
        Which keys each query sees; its parts are attributes of the call too.
    views : tuple
        Further (q, k) pairs of a model with several views.
    own : Own or None
        The mechanism of a model that does not weigh its keys by the softmax of its logits.
    """

    layer: int
    name: str
    module: torch.nn.Module = field(repr=False)
    q: torch.Tensor = field(repr=False)
    k: torch.Tensor = field(repr=False)
    v: torch.Tensor = field(repr=False)
    scale: float
    softcap: float | None
    sinks: torch.Tensor | None = field(repr=False)
    visibility: Visibility
    views: tuple[tuple[torch.Tensor, torch.Tensor], ...] = field(default=(), repr=False)
    own: Own | None = field(default=None, repr=False)

    @property
    def causal(self) -> bool:
        """See :class:`Visibility`."""
        return self.visibility.causal

    @property
    def query_offset(self) -> int | torch.Tensor:
        """See :class:`Visibility`."""
        return self.visibility.query_offset

    @property
    def window(self) -> int | None:
        """See :class:`Visibility`."""
        return self.visibility.window

    @property
    def key_starts(self) -> torch.Tensor | None:
        """See :class:`Visibility`."""
        return self.visibility.key_starts

    @property
    def lengths(self) -> torch.Tensor | None:
        """See :class:`Visibility`."""
        return self.visibility.lengths

    @property
    def mask(self) -> torch.Tensor | None:
        """See :class:`Visibility`."""
        return self.visibility.mask

    def statistics_arguments(self) -> dict[str, Any]:
        """Keyword arguments that ``theory_kernels.attention_statistics`` takes beside q and k."""
        seen = self.visibility
        return {
            "scale": self.scale,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "causal": seen.causal,
            "query_offset": seen.query_offset,
            "window": seen.window,
            "key_starts": seen.key_starts,
            "lengths": seen.lengths,
            "query_starts": seen.query_starts,
            "query_lengths": seen.query_lengths,
            "mask": seen.mask,
        }
