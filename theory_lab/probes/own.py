"""Weights of a model that has a mechanism of its own: as statistics take them, or row by row by definition.

Many mechanisms are softmax, entmax, TRA, TDA or ETA of queries that are scaled row by row: their statistics stream, for
any length. The others (a gate, a softplus, a table of thresholds, two softmaxes) are computed by the mechanism itself,
in blocks of rows, which takes time in T^2 and is refused above :data:`MOST_KEYS` keys.

Shapes: B batch, H query heads, G key heads, T queries, S keys, D head dimension, R rows of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from theory_lab.attention.alpha_entmax import Entmax, Sparsemax
from theory_lab.attention.asentmax import ASEntmax, ASEntmaxTheta
from theory_lab.attention.base import Mechanism, Scope
from theory_lab.attention.differential import DEX, DiffReLA, DiffSoftmax
from theory_lab.attention.eta import ETALogit, ETAWeight
from theory_lab.attention.rela import ReLA
from theory_lab.attention.softmax import AdaptiveTemperature, Softmax, SSMax
from theory_lab.attention.tda import TDA, TRA
from theory_lab.errors import InputError
from theory_lab.probes.measures import SHARE_EPSILON

if TYPE_CHECKING:
    from theory_lab.probes.calls import AttentionCall

#: The longest text whose weights are computed by definition.
MOST_KEYS = 8192
#: Forms whose rows sum to one.
UNIT = ("softmax", "entmax", "eta")
#: Entries of a block of maps in memory.
_BLOCK = 1 << 23
_PLACES = ("causal", "query_offset", "window", "key_starts", "lengths", "query_starts", "query_lengths", "mask")


@dataclass(frozen=True)
class Own:
    """What a layer weighs its keys by.

    Parameters
    ----------
    mechanism : Mechanism
        With the layer's parameters.
    x : Tensor (B, T, C) or None
        Hidden states, for the mechanisms that read them.
    slopes : Tensor (H,) or None
        Of a linear bias by distance (NAPE).
    """

    mechanism: Mechanism
    x: Tensor | None = field(default=None, repr=False)
    slopes: Tensor | None = field(default=None, repr=False)


class Streamed(NamedTuple):
    """Operands and arguments of ``attention_statistics``."""

    tensors: tuple[Tensor, ...]
    arguments: dict[str, Any]


class Block(NamedTuple):
    """Rows of maps, float64 or float32 (B, H, R, S); `parts` are the two views before they are subtracted."""

    seen: Tensor
    scores: tuple[Tensor, ...]
    weights: Tensor
    parts: tuple[Tensor, ...]
    survive: tuple[Tensor, ...]


def of_module(module: torch.nn.Module, x: Any) -> Own | None:
    """What an attention module of ours weighs by; None for the softmax of its logits, or a module without mechanism."""
    mechanism = getattr(module, "mechanism", None)
    if not isinstance(mechanism, Mechanism):
        return None
    from theory_lab.models.lab.mechanisms import plain
    from theory_lab.models.lab.positions import nape_slopes

    config: Any = module.config
    slopes = None
    if config.positions == "nape":
        slopes = nape_slopes(config.num_attention_heads, x.device, config.nape_slope)
    if type(mechanism) is Softmax and plain(mechanism) and slopes is None:
        return None
    return Own(mechanism, None if x is None else x.detach(), slopes)


def two_views(model: torch.nn.Module) -> bool:
    """Whether a model's attention compares two views."""
    return any(getattr(getattr(module, "mechanism", None), "views", 1) == 2 for module in model.modules())


def visible_counts(call: AttentionCall) -> Tensor:
    """Keys that each row sees, at least 1, (B or 1, 1, T, 1) float64."""
    see, queries, keys, device = call.visibility, call.q.shape[2], call.k.shape[2], call.q.device
    if see.mask is not None:
        return see.mask.sum(-1, keepdim=True).clamp_min(1).double()
    low = torch.zeros((), dtype=torch.long, device=device) if see.key_starts is None else see.key_starts.to(device)
    high = torch.full((), keys, device=device) if see.lengths is None else see.lengths.to(device)
    low, high = (bound.reshape(-1, 1, 1, 1) for bound in (low, high))
    if see.causal:
        offset = torch.as_tensor(see.query_offset, device=device).reshape(-1, 1, 1, 1)
        position = torch.arange(queries, device=device)[:, None] + offset
        high = torch.minimum(high, position + 1)
        if see.window is not None:
            low = torch.maximum(low, position - see.window + 1)
    return (high - low).expand(-1, -1, queries, -1).clamp_min(1).double()


@torch.no_grad()
def streamed(call: AttentionCall) -> Streamed | None:
    """A call's own weights as ``attention_statistics`` takes them; None where only the definition will do."""
    assert call.own is not None
    m, kind = call.own.mechanism, type(call.own.mechanism)
    if call.own.slopes is not None:
        return None
    arguments = {name: value for name, value in call.statistics_arguments().items() if name in _PLACES}
    q, k = call.q, call.k
    like = q.new_empty((1, q.shape[1], 1, 1), dtype=torch.promote_types(q.dtype, torch.float32))
    one = {"weights": "softmax", "scale": q.shape[-1] ** -0.5}
    if kind in (Softmax, DEX):
        factor = 1.0 / m.value("temperature", like) if kind is Softmax else None
        return Streamed((_scaled(q, factor), k), arguments | one)
    if kind is SSMax:
        return Streamed((_scaled(q, m.value("s", like) * visible_counts(call).log()), k), arguments | one)
    if kind is AdaptiveTemperature:
        return Streamed((_scaled(q, _sharpness(m, q, k, arguments | one)), k), arguments | one)
    if kind in (Entmax, Sparsemax, ASEntmax, ASEntmaxTheta):
        alphas = {2.0} if kind is Sparsemax else set(m.value("alpha").detach().reshape(-1).tolist())
        alpha = alphas.pop()
        if alphas or not 1.0 < alpha <= 2.0:
            return None
        factor = None
        if kind is ASEntmaxTheta:
            factor = 1.0 / m.value("theta", like)
        elif kind is ASEntmax:
            factor = m.logit_scale(_side(call), like)
        return Streamed((_scaled(q, factor), k), arguments | one | {"weights": "entmax", "alpha": alpha})
    if kind in (TRA, TDA, ReLA, DiffReLA):
        return _thresholded(call, arguments)
    if kind in (ETALogit, ETAWeight) and m.prune is None:
        sharpness = set(m.value("alpha").detach().reshape(-1).tolist())
        if len(sharpness) > 1:
            return None
        tau = m.thresholds(_side(call), like)[..., 0].detach()
        more = {"weights": "eta", "eta_sharpness": sharpness.pop(), "eta_threshold": tau.expand(*q.shape[:3]).double()}
        return Streamed((q, k), arguments | one | more | {"eta_reading": "logit" if kind is ETALogit else "weight"})
    return None


def _thresholded(call: AttentionCall, arguments: dict[str, Any]) -> Streamed:
    m: Any = call.own.mechanism if call.own else None
    two = m.views == 2
    cosine = m.cosine
    more: dict[str, Any] = {"weights": "tda" if two else "tra", "power": m.p, "normalize": cosine}
    more["beta"] = _by_head(m.value("beta"), call.q) if cosine else 0.0
    if cosine:
        more["kappa"] = m.kappa
    if two:
        more["lam"] = _by_head(m.value("lam"), call.q)
    tensors: list[Tensor] = []
    for q, k in ((call.q, call.k), *call.views):
        # Of dot products the scale belongs to the weight.
        tensors += [q if cosine else _scaled(q, torch.full((), q.shape[-1] ** -0.5, device=q.device)), k]
    return Streamed(tuple(tensors), arguments | more)


def blocks(call: AttentionCall, rows: tuple[int, int], keys: int) -> Iterator[tuple[tuple[int, int], Block]]:
    """Rows of a call's own weights on its first keys, by definition, a bounded number of entries at a time.

    Raises
    ------
    InputError
        For more keys than :data:`MOST_KEYS`.
    """
    assert call.own is not None
    if keys > MOST_KEYS:
        name = type(call.own.mechanism).__name__
        raise InputError("length", keys, f"at most {MOST_KEYS:,}: weights of {name} are computed pair by pair")
    start, stop = rows
    size = max(1, _BLOCK // max(1, call.q.shape[0] * call.q.shape[1] * keys))
    if call.own.mechanism.uses_positions:
        # What a row keeps may depend on the rows before it, and on its being the last.
        yield rows, _rows_of(_block(call, (0, stop), min(keys, stop + int(call.query_offset))), start, keys)
        return
    for first in range(start, stop, size):
        span = (first, min(stop, first + size))
        yield span, _block(call, span, keys)


def _rows_of(block: Block, start: int, keys: int) -> Block:
    """A block without its first rows, and with keys after its last that nothing sees."""
    more = keys - block.seen.shape[-1]

    def cut(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x[:, :, start:], (0, more))

    return Block(
        cut(block.seen), tuple(map(cut, block.scores)), cut(block.weights), tuple(map(cut, block.parts)),
        tuple(map(cut, block.survive)),
    )  # fmt: skip


@torch.no_grad()
def _block(call: AttentionCall, rows: tuple[int, int], keys: int) -> Block:
    own = call.own
    assert own is not None
    m = own.mechanism
    part = slice(*rows)
    wide = torch.promote_types(call.q.dtype, torch.float32)
    group = call.q.shape[1] // call.k.shape[1]
    seen = _sees(call, rows)[..., :keys].expand(call.q.shape[0], call.q.shape[1], -1, -1)
    scores = []
    for q, k in ((call.q, call.k), *call.views):
        found = m.scores(q[:, :, part].to(wide), k[:, :, :keys].to(wide).repeat_interleave(group, 1))
        scores.append(found if own.slopes is None else found + _bias(call, own.slopes, rows, keys, wide))
    count = seen.sum(-1, keepdim=True).clamp_min(1).to(wide)
    x = None if own.x is None else own.x[:, part].to(wide)
    scope = Scope(seen, count, call.causal, call.q.shape[-1], x, call.q[:, :, part].to(wide))
    hidden = tuple(score.masked_fill(~seen, 0.0) for score in scores)
    parts: tuple[Tensor, ...] = ()
    survive: tuple[Tensor, ...] = ()
    if m.views == 2:
        parts = _both(m, hidden, scope)
        weights = parts[0] - m.value("lam", parts[0]) * parts[1]
    else:
        weights = m.row_weights(hidden, scope)
    if isinstance(m, TRA):
        tau = m.thresholds(scope, hidden[0])
        survive = tuple(seen & (score > tau) for score in hidden)
    if not m.cosine:
        hidden = tuple(score * math.sqrt(call.q.shape[-1]) for score in hidden)
    return Block(seen, hidden, weights, parts, survive)


def _both(m: Any, scores: tuple[Tensor, ...], scope: Scope) -> tuple[Tensor, ...]:
    """The maps of two views before they are subtracted."""
    if hasattr(m, "both_views"):
        return m.both_views(scores, scope)
    if isinstance(m, DiffSoftmax):
        from theory_lab.attention.base import safe_softmax

        return tuple(safe_softmax(z, scope.visible) for z in scores)
    if isinstance(m, DiffReLA):
        from theory_lab.attention.rela import relu_power

        return tuple(relu_power(z.masked_fill(~scope.visible, 0.0), m.p) for z in scores)
    name = type(m).__name__
    raise InputError("model", name, "mechanisms of two views whose maps are known one by one are measured")


def _sees(call: AttentionCall, rows: tuple[int, int]) -> Tensor:
    """Bool (B or 1, H or 1, R, S): what rows see."""
    see = call.visibility
    if see.mask is not None:
        return see.mask[:, :, slice(*rows)]
    device = call.q.device
    column = torch.arange(call.k.shape[2], device=device)
    place = torch.arange(*rows, device=device)
    seen = torch.ones(1, 1, len(place), len(column), dtype=torch.bool, device=device)
    if see.causal:
        position = (place + torch.as_tensor(see.query_offset, device=device).reshape(-1, 1))[:, None, :, None]
        seen = seen & (column <= position)
        if see.window is not None:
            seen = seen & (column > position - see.window)
    for bound, axis, inside in (
        (see.key_starts, column, torch.ge), (see.lengths, column, torch.lt),
        (see.query_starts, place[:, None], torch.ge), (see.query_lengths, place[:, None], torch.lt),
    ):  # fmt: skip
        if bound is not None:
            seen = seen & inside(axis, bound.to(device).reshape(-1, 1, 1, 1))
    return seen


def _bias(call: AttentionCall, slopes: Tensor, rows: tuple[int, int], keys: int, dtype: torch.dtype) -> Tensor:
    offset = torch.as_tensor(call.query_offset, device=slopes.device).reshape(-1, 1, 1, 1)
    place = torch.arange(*rows, device=slopes.device)[:, None] + offset
    distance = (place - torch.arange(keys, device=slopes.device)).clamp_min(0)
    return -slopes.to(dtype)[:, None, None] * distance


def _side(call: AttentionCall) -> Scope:
    """A scope of all rows, for what does not look at keys one by one."""
    assert call.own is not None
    wide = torch.promote_types(call.q.dtype, torch.float32)
    x = None if call.own.x is None else call.own.x.to(wide)
    nothing = torch.empty((*call.q.shape[:3], 0), dtype=torch.bool, device=call.q.device)
    return Scope(nothing, visible_counts(call).to(wide), call.causal, call.q.shape[-1], x, call.q.to(wide))


def _scaled(q: Tensor, factor: Tensor | None) -> Tensor:
    """q times a factor broadcastable to (B, H, T, 1), in float32 at least: a factor must not cost digits."""
    if factor is None:
        return q
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.to(wide) * factor.detach().to(wide)


def _sharpness(m: Any, q: Tensor, k: Tensor, arguments: dict[str, Any]) -> Tensor:
    """What adaptive temperature multiplies the logits of each row by, from the row's entropy."""
    from theory_kernels import attention_statistics

    entropy = attention_statistics(q, k, **arguments, need=("rows",)).entropy
    assert entropy is not None
    return m.sharpness(entropy)[..., None]


def _by_head(value: Tensor, q: Tensor) -> Tensor:
    return value.detach().double().reshape(-1).expand(q.shape[1])


# ---- statistics of blocks --------------------------------------------------------------------------------------------


def block_statistics(
    block: Block, rows: tuple[int, int], offset: int, *, near_zero: Sequence[float], need: Sequence[str]
) -> Any:
    """``theory_kernels.AttentionStatistics`` of rows whose maps are there.

    Parameters
    ----------
    block : Block
    rows : (int, int)
        Which rows they are.
    offset : int
        Position of row 0 among the keys: pairs of a token with itself do not enter the score statistics.
    near_zero, need
        As for ``attention_statistics``.
    """
    from theory_kernels import AttentionStatistics, ViewStatistics

    seen = block.seen
    columns = "columns" in need

    def of(w: Tensor) -> ViewStatistics:
        w = w.double().abs()
        counts = [(seen & (w < bound)).sum((-2, -1)) for bound in near_zero]
        return ViewStatistics(
            w.sum(-1), (seen & (w > 0)).sum(-1), w.amax(-1), w.sum(-2) if columns else None,
            torch.stack(counts, -1) if counts else None,
        )  # fmt: skip

    whole = of(block.weights)
    assert whole.mass is not None
    shares = block.weights.double().abs() / torch.where(whole.mass > 0, whole.mass, 1.0)[..., None]
    moments, covariance = _moments(block, rows, offset) if "scores" in need else ((), None)
    survivors = torch.stack([s.sum(-1) for s in block.survive]) if block.survive else None
    consensus = (block.survive[0] & block.survive[1]).sum(-1) if len(block.survive) == 2 else None
    return AttentionStatistics(
        visible=seen.sum(-1),
        mass=whole.mass,
        entropy=torch.special.entr(shares).sum(-1),
        support=whole.support,
        maximum=whole.maximum,
        column_mass=whole.column_mass,
        column_rows=seen.any(1).sum(-2) if columns else None,
        near_zero=whole.near_zero,
        survivors=survivors,
        consensus=consensus,
        views=tuple(of(part) for part in block.parts),
        scores=moments,
        covariance=covariance,
    )


def _moments(block: Block, rows: tuple[int, int], offset: int) -> tuple[tuple[Any, ...], Tensor | None]:
    from theory_kernels import ScoreStatistics

    place = torch.arange(*rows, device=block.seen.device)[:, None] + offset
    pairs = block.seen & (torch.arange(block.seen.shape[-1], device=place.device) < place)
    count = pairs.sum((-2, -1))
    some = count > 0
    n = count.double()
    found, off = [], []
    for score in block.scores:
        s = score.double()
        mean = torch.where(pairs, s, 0.0).sum((-2, -1)) / n
        away = torch.where(pairs, s - mean[..., None, None], 0.0)
        low = s.masked_fill(~pairs, torch.inf).amin((-2, -1))
        high = s.masked_fill(~pairs, -torch.inf).amax((-2, -1))
        none = mean.new_zeros((*mean.shape, 0))
        found.append(
            ScoreStatistics(
                count,
                mean,
                away.square().sum((-2, -1)) / n,
                torch.where(some, low, torch.nan),
                torch.where(some, high, torch.nan),
                none,
                none.long(),
            )
        )
        off.append(away)
    covariance = (off[0] * off[1]).sum((-2, -1)) / n if len(off) == 2 else None
    return tuple(found), covariance


def block_shares(block: Block, keys: Sequence[int], mass: Tensor) -> Tensor:
    """sum_i |w_ik| / (sum_j |w_ij| + 1e-8) over a block's rows, (B, H, keys); keys 0-based."""
    chosen = torch.as_tensor(list(keys), device=mass.device)
    return (block.weights[..., chosen].double().abs() / (mass[..., None] + SHARE_EPSILON)).sum(-2)
