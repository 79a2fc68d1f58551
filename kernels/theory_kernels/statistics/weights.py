"""The weights of one block of rows and what is added up of them, in plain torch.

Within a tile sums are float32 (torch adds them as trees); from tile to tile everything is added in float64.
"""

from __future__ import annotations

import torch

from .blocks import FLOOR, Block, Workspace, count_above
from .moments import Moments
from .parts import BlockResult, Part
from .request import Request

# The smallest row maximum: what is hidden lies far below it, so a row without keys has only zeros.
_EMPTY = FLOOR / 10
_NEWTON_STEPS = 60
_LOG2_E = 1.4426950408889634
_LN_2 = 0.6931471805599453


def unit(request: Request) -> float:
    """Softmax works in powers of two, which torch takes twice as fast as those of e: its logits are in bits."""
    return _LOG2_E if request.weights in ("softmax", "eta") else 1.0


def factor(request: Request) -> float:
    """What the products are multiplied by on their way out of the matrix product."""
    if request.thresholded:
        return 1.0
    plain = request.softcap is None and request.eta_threshold is None
    return request.scale / (request.softcap or 1.0) * (unit(request) if plain else 1.0)


def _logits(
    block: Block, chunk: tuple[int, int], request: Request, moments: Moments | None, work: Workspace
) -> torch.Tensor:
    """Logits in units of :func:`unit`, hidden ones at the floor; adds the scores to the moments on the way."""
    z = block.scores(0, chunk, factor(request), work, "scores")
    if moments is not None:
        moments.add(block, chunk, [z])
    if request.softcap is not None:
        z.tanh_().mul_(request.softcap * (unit(request) if request.eta_threshold is None else 1.0))
    if request.eta_threshold is not None:
        slope = z - block.cut(request.eta_threshold)[..., None].to(z.dtype)
        slope.mul_(request.eta_sharpness)
        if request.eta_reading == "logit":
            z.mul_(slope.sigmoid_())
        else:
            z.add_(torch.nn.functional.logsigmoid(slope))
        z.mul_(unit(request))
    bias = block.bias(chunk, z.dtype)
    return z if bias is None else z.add_(bias)


def softmax_block(block: Block, request: Request, moments: Moments | None, work: Workspace) -> BlockResult:
    """One pass over the keys: each chunk's exponentials relative to its own maximum, joined at the end.

    With m_c the maximum of chunk c, L_c = sum 2^(z - m_c) and U_c = sum (m_c - z) 2^(z - m_c), the entropy is
    log2 L + U / L bits with all parts moved to the row's maximum: a sum of non-negative terms, nothing cancels.
    """
    rows, keep = request.wants("rows"), request.wants("columns") or request.wants("near_zero")
    part = Part(request, block, work)
    held, tops, sums, lags = [], [], [], []
    if keep:
        work.take("exponentials", (block.size,))
    for chunk in block.chunks:
        z = _logits(block, chunk, request, moments, work)
        top = z.amax(-1, keepdim=True).clamp_min_(_EMPTY)
        z.sub_(top)
        e = torch.exp2(z, out=work.take("exponentials", tuple(z.shape), block.start(chunk) if keep else 0))
        tops.append(top[..., 0])
        sums.append(e.sum(-1))
        if rows:
            lags.append(-z.mul_(e).sum(-1))
        held.append(e)
    tops_c, sums_c = torch.stack(tops).double(), torch.stack(sums).double()
    top = tops_c.amax(0)
    share = (tops_c - top).exp2()
    total = (share * sums_c).sum(0)
    alive = total > 0
    safe = torch.where(alive, total, 1.0)
    # Relative to the row's maximum or its sink, whichever is larger.
    base, norm = top, safe
    if request.sinks is not None:
        sink = request.sinks[block.heads].view(*block.shape[:2], 1) * _LOG2_E
        base = torch.maximum(top, sink)
        norm = safe * (top - base).exp2() + (sink - base).exp2()
    lift = (top - base).exp2() / norm
    if rows:
        lag = (share * (torch.stack(lags).double() + (top - tops_c) * sums_c)).sum(0)
        part.mass = total * lift
        part.entropy = torch.where(alive, safe.log() + _LN_2 * lag / safe, 0.0)
        part.maximum = torch.where(alive, lift, 0.0)
    weight = (tops_c - base).exp2() / norm
    for chunk, e, scale in zip(block.chunks, held if keep else [], weight, strict=False):
        if request.wants("columns"):
            part.add_columns(chunk, torch.matmul(scale.to(e.dtype)[..., None, :], e)[..., 0, :])
        if request.wants("near_zero"):
            for index, bound in enumerate(request.near_zero):
                level = (bound / scale).clamp_max(torch.finfo(e.dtype).max).to(e.dtype)[..., None]
                part.add_large(index, torch.ge(e, level, out=work.take("spare", tuple(e.shape))))
    return BlockResult(part, moments=moments)


def entmax_block(block: Block, request: Request, moments: Moments | None, work: Workspace) -> BlockResult:
    """Newton on the norm ``(sum_j (x_j - tau)_+^p)^(1/p) = 1``, p = 1 / (alpha - 1) >= 1, x = (alpha - 1) z.

    The norm is convex and falls in tau, so Newton from the left of the root never passes it; it is linear for
    one key and for equal keys, where the steps of the plain sum would crawl as alpha tends to 1.
    """
    power = 1.0 / (request.alpha - 1.0)
    part = Part(request, block, work)
    held, tops = [], []
    work.take("scaled", (block.size,))
    for chunk in block.chunks:
        z = _logits(block, chunk, request, moments, work)
        x = torch.mul(z, request.alpha - 1.0, out=work.take("scaled", tuple(z.shape), block.start(chunk)))
        tops.append(x.amax(-1))
        held.append(x)
    top = torch.stack(tops).amax(0).clamp_min_(_EMPTY)
    # The weight of the largest key is at most 1: keys more than 1 below it have none.
    live = [bool((own > top - 1.0).any()) for own in tops]
    kept = [(chunk, x.sub_(top[..., None])) for chunk, x, yes in zip(block.chunks, held, live, strict=True) if yes]
    tau = torch.full_like(top, -1.0)
    tolerance = 4.0 * torch.finfo(tau.dtype).eps
    for _ in range(_NEWTON_STEPS):
        step, excess = _newton_step(kept, tau, power, work)
        tau = torch.where(step > 0, tau + step.to(tau.dtype), tau)
        if not bool((excess > tolerance).any()):
            break
    # Once more with the origin at the threshold: its rounding, times the support, would show in the row's sum.
    for _, x in kept:
        x.sub_(tau[..., None])
    step, _ = _newton_step(kept, torch.zeros_like(tau), power, work)
    for chunk, x in kept:
        p = torch.sub(x, step.to(x.dtype)[..., None], out=work.take("scores", tuple(x.shape))).clamp_min_(0.0)
        part.add(chunk, _power(p, power))
    return BlockResult(part, moments=moments)


def _newton_step(
    kept: list[tuple[tuple[int, int], torch.Tensor]], tau: torch.Tensor, power: float, work: Workspace
) -> tuple[torch.Tensor, torch.Tensor]:
    """Step of tau, and the norm's excess over 1, both float64 of tau's shape; 0 for rows without keys."""
    total = torch.zeros(tau.shape, dtype=torch.float64, device=tau.device)
    slope = torch.zeros_like(total)
    for _, x in kept:
        y = torch.sub(x, tau[..., None], out=work.take("scores", tuple(x.shape))).clamp_min_(0.0)
        spare = work.take("spare", tuple(y.shape))
        if power == 1.0:
            total += y.sum(-1)
            slope += count_above(y, 0.0, spare)
            continue
        less = y if power == 2.0 else y.pow(power - 1.0)
        slope += less.sum(-1)
        total += torch.mul(less, y, out=spare).sum(-1)
    some = total > 0
    safe = torch.where(some, total, 1.0)
    norm = safe.pow(1.0 / power)
    step = (norm - 1.0) * safe / (norm * torch.where(some, slope, 1.0))
    return torch.where(some, step, 0.0), torch.where(some, norm - 1.0, 0.0)


def _power(x: torch.Tensor, power: float) -> torch.Tensor:
    """x ** power in place, for x >= 0."""
    if power == 1.0:
        return x
    return x.square_() if power == 2.0 else x.pow_(power)


def threshold_block(
    block: Block, request: Request, moments: Moments | None, work: Workspace, tau: torch.Tensor
) -> BlockResult:
    """Weights ``max(s - tau, 0)^p`` as they come; on the CPU, tiles without a survivor end early."""
    level = block.cut(tau)[..., None]
    on_cpu = level.device.type == "cpu"
    part = Part(request, block, work)
    views = [Part(request, block, work) for _ in range(request.views)]
    consensus = torch.zeros(block.shape, dtype=torch.int64, device=level.device)
    lam = request.lam[block.heads].to(level.dtype).view(*block.shape[:2], 1, 1)
    for chunk in block.chunks:
        tiles = [block.scores(v, chunk, 1.0, work, f"view{v}") for v in range(request.views)]
        if moments is not None:
            moments.add(block, chunk, tiles)
        bias = block.bias(chunk, level.dtype)
        dead = []
        for x in tiles:
            if bias is not None:
                x.add_(bias)
            dead.append(on_cpu and bool((x.amax(-1, keepdim=True) <= level).all()))
            if not dead[-1]:
                x.sub_(level).clamp_min_(0.0)
        if all(dead):
            continue
        if request.views == 2 and request.wants("rows") and not any(dead):
            both = torch.minimum(*tiles, out=work.take("spare", tuple(tiles[0].shape)))
            consensus += count_above(both, 0.0, both)
        for x, view, gone in zip(tiles, views, dead, strict=True):
            if gone:
                x.zero_()
                continue
            if request.wants("rows"):
                view.support += count_above(x, 0.0, work.take("spare", tuple(x.shape)))
            _power(x, request.power)
            if request.views == 2:
                view.add(chunk, x, whole=False)
        part.add(chunk, tiles[0] if request.views == 1 else tiles[1].mul_(lam).sub_(tiles[0]).abs_())
    return BlockResult(part, views, consensus, moments)
