"""The attention layer: projections of one or two views, positions, cache, and the mechanism.

Shapes: B batch, H query heads, G key heads, T queries, S keys, D head dimension, C width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from theory_lab.attention.base import Mechanism, Scope
from theory_lab.attention.fast import attend, has_fast
from theory_lab.attention.softmax import AdaptiveTemperature, Softmax
from theory_lab.models.lab.configuration import LabConfig
from theory_lab.models.lab.mechanisms import build_mechanism, plain, some_heads, weigh
from theory_lab.models.lab.positions import linear_bias, nape_slopes, rotate
from theory_lab.models.lab.windows import by_windows, in_blocks, is_local, key_heads

#: Keys from which a map on the CPU is no longer worth its memory.
_LONG = 2048
#: Pairs of a head from which blocks of rows pay without gradients.
_MANY = 1 << 18
#: Weights of a call on a CPU and on a GPU that are never held at once without gradients.
_MOST_CPU, _MOST_GPU = 1 << 24, 1 << 27

Views = tuple[tuple[Tensor, Tensor], ...]


def scope_of(
    queries: int,
    keys: int,
    key_mask: Tensor | None,
    like: Tensor,
    *,
    head_dim: int,
    x: Tensor | None = None,
    q: Tensor | None = None,
) -> Scope:
    """What rows see in a causal call whose queries are the last of the keys.

    Parameters
    ----------
    queries, keys : int
        T and S.
    key_mask : Tensor, optional
        Boolean (B, S), False at padding.
    like : Tensor
        (B, H, T, S), for the shape, the device and the dtype of n.
    head_dim, x, q
        Of :class:`theory_lab.attention.base.Scope`.
    """
    rows = torch.arange(keys - queries, keys, device=like.device)[:, None]
    visible = torch.arange(keys, device=like.device)[None, :] <= rows
    if key_mask is None:
        count = (rows + 1).to(like.dtype)
        return Scope(visible.expand_as(like), count.expand(*like.shape[:-1], 1), True, head_dim, x, q)
    visible = visible & key_mask[:, None, None, :]
    count = visible.sum(-1, keepdim=True).clamp(min=1).to(like.dtype)
    return Scope(visible.expand_as(like), count.expand(*like.shape[:-1], 1), True, head_dim, x, q)


def dense(
    mechanism: Mechanism,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    *,
    views: Views = (),
    key_mask: Tensor | None = None,
    x: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Output and weights by the mechanism's own definition, without looking at values: for static graphs.

    Parameters
    ----------
    mechanism : Mechanism
    q, k, v : Tensor
        (B, H, T, D), (B, G, S, D), (B, G, S, V); computed in float32, or float64 for such. No output without v.
    views : tuple
        The second (q, k) of a mechanism with two views.
    key_mask : Tensor, optional
        Boolean (B, S), False at padding.
    x : Tensor, optional
        (B, T, C) hidden states.
    bias : Tensor, optional
        (H, T, S), added to the scores.

    Returns
    -------
    tuple of Tensor
        (B, H, T, V) in the dtype of v, and weights (B, H, T, S) in that of the computation.
    """
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        pairs = tuple((left.to(wide), right.to(wide)) for left, right in ((q, k), *views))
        side = None if x is None else x.to(wide)
        like = pairs[0][0].new_empty(()).expand(*q.shape[:3], k.shape[2])
        scope = scope_of(q.shape[2], k.shape[2], key_mask, like, head_dim=q.shape[-1], x=side, q=pairs[0][0])
        weights = weigh(mechanism, pairs, scope, bias)
        if v is None:
            return None, weights
        output = mechanism.aggregate(weights, v.to(wide).repeat_interleave(group, 1), scope)
    return output.to(v.dtype), weights


def eager_attention_forward(
    module: LabAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    views: Views = (),
    x: Tensor | None = None,
    output_attentions: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """The mechanism of a layer, in the fastest form that there is for the call; transformers' calling convention.

    `attention_mask` is None or Boolean (B, S), True at valid keys; queries are the last of the keys.

    Returns
    -------
    tuple
        (B, T, H, D), and the weights if they are asked for.
    """
    mechanism = module.mechanism
    queries, keys = query.shape[2], key.shape[2]
    if not output_attentions:
        found = None
        if not module.biased:
            found = _fast(mechanism, query, key, value, views, attention_mask, x)
        if found is None and _in_blocks(mechanism, query, keys, attention_mask):
            slopes = module.slopes(query.device) if module.biased else None
            found = _long(mechanism, ((query, key), *views), value, x, slopes, module.config.free_heads)
        if found is not None:
            return found.transpose(1, 2), None
    bias = module.bias(queries, keys, query.device)
    output, weights = dense(mechanism, query, key, value, views=views, key_mask=attention_mask, x=x, bias=bias)
    assert output is not None
    return output.transpose(1, 2), weights if output_attentions else None


def _in_blocks(mechanism: Mechanism, q: Tensor, keys: int, key_mask: Tensor | None) -> bool:
    """Whether rows are computed in blocks: where no gradient is wanted, all keys are valid and there are many pairs."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or key_mask is not None:
        return False
    batch, heads, queries, _ = q.shape
    pairs = queries * keys
    if pairs < _MANY and batch * heads * pairs <= (_MOST_GPU if q.is_cuda else _MOST_CPU):
        return False
    return is_local(mechanism) and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _long(mechanism: Mechanism, pairs: Views, v: Tensor, x: Tensor | None, slopes: Tensor | None, free: int) -> Tensor:
    """The output for a long text, never a whole map in memory; the first `free` heads have no bias."""
    if slopes is None:
        return in_blocks(mechanism, pairs, v, x=x)
    near = by_windows(mechanism, pairs, v, slopes[free:], free, x)
    if near is None:
        return in_blocks(mechanism, pairs, v, x=x, slopes=slopes)
    if not free:
        return near
    heads, total = slice(0, free), pairs[0][0].shape[1]
    part = some_heads(mechanism, heads)
    assert part is not None
    cut = tuple((q[:, heads], key_heads(k, heads, total)) for q, k in pairs)
    value = key_heads(v, heads, total)
    far = _fast(part, *cut[0], value, cut[1:], None, x)
    return torch.cat([in_blocks(part, cut, value, x=x) if far is None else far, near], 1)


def _fast(
    mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, views: Views, key_mask: Tensor | None, x: Tensor | None
) -> Tensor | None:
    """The output by a form that never holds the weights; None where the definition itself is as good."""
    if type(mechanism) is Softmax and plain(mechanism):
        return _softmax(q, k, v, key_mask)
    if isinstance(mechanism, AdaptiveTemperature):
        return _adaptive(mechanism, q, k, v, key_mask)
    if not has_fast(mechanism) or not (q.is_cuda or k.shape[2] >= _LONG):
        return None
    (q2, k2) = views[0] if views else (None, None)
    return attend(
        mechanism, q, k, v, q2=q2, k2=k2, key_mask=key_mask, x=None if x is None else x.to(q.dtype)
    )  # fmt: skip


def _adaptive(
    mechanism: AdaptiveTemperature, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None
) -> Tensor | None:
    """Entropies of the rows first, then a softmax with the temperatures that follow; both without a map."""
    if not _in_blocks(mechanism, q, k.shape[2], key_mask):
        return None
    from theory_kernels import attention_statistics

    with torch.autocast(q.device.type, enabled=False):
        entropy = attention_statistics(q, k, query_offset=k.shape[2] - q.shape[2], need=("rows",)).entropy
        assert entropy is not None
        return _softmax((q * mechanism.sharpness(entropy)[..., None]).to(q.dtype), k, v, None)


def _softmax(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    attend = nn.functional.scaled_dot_product_attention
    if key_mask is None:
        if queries in (1, keys):
            return attend(q, k, v, is_causal=queries > 1, enable_gqa=grouped)
        key_mask = torch.ones(1, keys, dtype=torch.bool, device=q.device)
    rows = torch.arange(keys - queries, keys, device=q.device)[:, None]
    seen = (torch.arange(keys, device=q.device)[None, :] <= rows) & key_mask[:, None, None, :]
    some = seen.any(-1, keepdim=True)
    # A row that sees nothing sees everything instead, and is set to zero: no NaN on the way, forward or backward.
    found = attend(q, k, v, attn_mask=seen | ~some, enable_gqa=grouped)
    return torch.where(some, found, torch.zeros_like(found))


class LabAttention(nn.Module):
    """Projections, positions, cache and mechanism of one layer.

    Attributes
    ----------
    mechanism : Mechanism
        With the layer's learned parameters, such as beta and lambda a head.
    mask_convention : str
        Masks are none, or 2D of valid keys, as FlashAttention takes them.
    observer : callable or None
        See :func:`theory_lab.models.lab.state.observed`.
    """

    is_causal = True
    mask_convention = "flash"
    observer: Callable[..., None] | None = None

    def __init__(self, config: LabConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.heads, self.key_heads, self.head_dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )  # fmt: skip
        self.mechanism = build_mechanism(config, layer_idx)
        views = self.mechanism.views
        #: Rows of one matrix: the queries of every view, the keys of every view, the values.
        self.parts = ([self.heads] * views, [self.key_heads] * views, [self.key_heads])
        rows = sum(sum(part) for part in self.parts) * self.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, rows, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    @property
    def biased(self) -> bool:
        """Whether something is added to the scores (NAPE)."""
        return self.config.positions == "nape"

    def slopes(self, device: torch.device) -> Tensor:
        """NAPE's slope a head, (H,)."""
        return nape_slopes(self.heads, device, self.config.nape_slope)

    def bias(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """What NAPE adds to the scores, (H, T, S), or None."""
        return linear_bias(self.slopes(device), queries, keys) if self.biased else None

    def _rotated(self, compared: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
        """Queries and keys of all views, with rotary positions in the heads that have them."""
        free = self.config.free_heads
        if not free:
            return rotate(compared, *rotations)
        made = []
        for part in compared.split(self.parts[0] + self.parts[1], 1):
            first = free * part.shape[1] // self.heads  # of keys, those of the same queries
            made += [part[:, :first], rotate(part[:, first:], *rotations)]
        return torch.cat(made, 1)

    def forward(
        self,
        x: Tensor,
        rotations: tuple[Tensor, Tensor] | None,
        key_mask: Tensor | None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Parameters
        ----------
        x : Tensor
            (B, T, C), normalized.
        rotations : tuple of Tensor or None
            Of :func:`theory_lab.models.lab.positions.rotations`.
        key_mask : Tensor or None
            Boolean (B, S).
        cache : transformers.Cache, optional
            Holds the keys of all views side by side, on the axis of heads.
        """
        b, t, _ = x.shape
        projected = self.qkv_proj(x).view(b, t, -1, self.head_dim).transpose(1, 2)
        compared, value = projected.split([sum(self.parts[0] + self.parts[1]), sum(self.parts[2])], 1)
        if rotations is not None:
            compared = self._rotated(compared, rotations)
        queries, keys = compared.split([sum(self.parts[0]), sum(self.parts[1])], 1)
        if cache is not None:
            keys, value = cache.update(keys, value, self.layer_idx)
        (q, *more_q), (k, *more_k) = queries.split(self.parts[0], 1), keys.split(self.parts[1], 1)
        views = tuple(zip(more_q, more_k, strict=True))
        if self.observer is not None:
            self.observer(self, q, k, views, x)
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attend(
            self, q, k, value, key_mask, views=views, x=x, scaling=self.head_dim**-0.5, **kwargs,
        )  # fmt: skip
        return self.o_proj(output.reshape(b, t, -1)), weights
