"""Statistics in plain torch, a block of rows and a chunk of keys at a time: O(T) memory, any device.

Within a tile sums are float32 (torch adds them as trees); from tile to tile everything is added in float64.
"""

from __future__ import annotations

import torch

from .blocks import FLOOR, Block, Workspace, blocks, count_above
from .moments import Moments
from .request import Request
from .results import AttentionStatistics, ViewStatistics
from .visibility import column_rows

# The smallest row maximum: what is hidden lies far below it, so a row without keys has only zeros.
_EMPTY = FLOOR / 10
_NEWTON_STEPS = 60
_LOG2_E = 1.4426950408889634
_LN_2 = 0.6931471805599453


class Totals:
    """Sums of one map: rows (B, H, T), columns (B, H, S), and the visible entries that are not near zero."""

    def __init__(self, request: Request, shape: torch.Size, device: torch.device, work: Workspace):
        self.request, self.work = request, work
        self.mass = torch.zeros(shape, dtype=torch.float64, device=device)
        self.entropy = torch.zeros_like(self.mass)
        self.maximum = torch.zeros_like(self.mass)
        self.support = torch.zeros(shape, dtype=torch.int64, device=device)
        self.columns = self.mass.new_zeros((*shape[:2], request.see.keys if request.wants("columns") else 0))
        self.large = torch.zeros((*shape[:2], len(request.near_zero)), dtype=torch.int64, device=device)

    def add(self, block: Block, chunk: tuple[int, int], w: torch.Tensor, whole: bool = True) -> None:
        """Add non-negative weights of a chunk; the view of a difference (not ``whole``) counts its own support.

        ``entropy`` holds -sum w log w until :meth:`normalized_entropy`.
        """
        rows = (block.b, block.heads, slice(*block.rows))
        spare = self.work.take("spare", tuple(w.shape))
        if self.request.wants("rows"):
            self.mass[rows] += w.sum(-1).double().flatten(0, 1)
            self.maximum[rows] = torch.maximum(self.maximum[rows], w.amax(-1).double().flatten(0, 1))
            if whole:
                self.support[rows] += count_above(w, 0.0, spare).flatten(0, 1)
                logs = torch.clamp_min(w, torch.finfo(w.dtype).tiny, out=spare).log_().mul_(w)
                self.entropy[rows] -= logs.sum(-1).double().flatten(0, 1)
        if self.request.wants("columns"):
            self.columns[block.b, block.heads, slice(*chunk)] += w.sum(-2).double().flatten(0, 1)
        if self.request.wants("near_zero"):
            for index, bound in enumerate(self.request.near_zero):
                counts = torch.ge(w, bound, out=spare).sum(-1).sum(-1, dtype=torch.float64)
                self.large[block.b, block.heads, index] += counts.to(torch.int64).flatten()

    def normalized_entropy(self) -> torch.Tensor:
        """H of w / mass from -sum w log w: log(mass) - sum w log w / mass."""
        safe = torch.where(self.mass > 0, self.mass, 1.0)
        return (safe.log() + self.entropy / safe).clamp_min(0.0)

    def view(self, visible: torch.Tensor) -> ViewStatistics:
        rows, columns, near = (self.request.wants(x) for x in ("rows", "columns", "near_zero"))
        return ViewStatistics(
            mass=self.mass if rows else None,
            support=self.support if rows else None,
            maximum=self.maximum if rows else None,
            column_mass=self.columns if columns else None,
            near_zero=visible.sum(-1, keepdim=True) - self.large if near else None,
        )


class _Run:
    """What the blocks of a call share."""

    def __init__(self, views: list[tuple[torch.Tensor, torch.Tensor]], request: Request):
        q = views[0][0]
        self.request = request
        self.visible = request.visible(q.shape[1])
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.work = Workspace(self.dtype, q.device)
        shape = q.shape[:3]
        self.whole = Totals(request, shape, q.device, self.work)
        self.views = [Totals(request, shape, q.device, self.work) for _ in views] if request.thresholded else []
        self.consensus = torch.zeros(shape, dtype=torch.int64, device=q.device)
        # What the products are multiplied by on their way out of the matrix product. Softmax works in powers of
        # two: torch takes them twice as fast as those of e.
        plain = request.softcap is None and request.eta_threshold is None
        self.unit = _LOG2_E if request.weights in ("softmax", "eta") else 1.0
        self.factor = 1.0
        if not request.thresholded:
            self.factor = request.scale / (request.softcap or 1.0) * (self.unit if plain else 1.0)
        self.moments = Moments(views, request, self.factor) if request.wants("scores") else None
        self.tau = request.tau(self.visible, q.shape[-1]).to(self.dtype) if request.thresholded else None

    def logits(self, block: Block, chunk: tuple[int, int]) -> torch.Tensor:
        """Logits times ``unit``, hidden ones at the floor; adds the scores to the moments on the way."""
        request = self.request
        z = block.scores(0, chunk, self.factor, self.work, "scores")
        if self.moments is not None:
            self.moments.add(block, chunk, [z])
        if request.softcap is not None:
            z.tanh_().mul_(request.softcap * (self.unit if request.eta_threshold is None else 1.0))
        if request.eta_threshold is not None:
            slope = z - block.cut(request.eta_threshold)[..., None].to(z.dtype)
            slope.mul_(request.eta_sharpness)
            if request.eta_reading == "logit":
                z.mul_(slope.sigmoid_())
            else:
                z.add_(torch.nn.functional.logsigmoid(slope))
            z.mul_(self.unit)
        bias = block.bias(chunk, z.dtype)
        return z if bias is None else z.add_(bias)


def statistics(views: list[tuple[torch.Tensor, torch.Tensor]], request: Request) -> AttentionStatistics:
    """Everything asked for; see :func:`theory_kernels.attention_statistics`."""
    run = _Run(views, request)
    step = _threshold_block if request.thresholded else _entmax_block if request.weights == "entmax" else _softmax_block
    for block in blocks(views, request):
        step(block, run)
    whole = run.whole.view(run.visible)
    rows = request.wants("rows")
    if request.weights in ("softmax", "eta"):
        entropy, support = run.whole.entropy, run.visible.clone()
    else:
        entropy, support = run.whole.normalized_entropy(), run.whole.support
    scores, covariance = run.moments.results() if run.moments is not None else ((), None)
    return AttentionStatistics(
        visible=run.visible,
        mass=whole.mass,
        entropy=entropy if rows else None,
        support=support if rows else None,
        maximum=whole.maximum,
        column_mass=whole.column_mass,
        column_rows=column_rows(request.see) if request.wants("columns") else None,
        near_zero=whole.near_zero,
        survivors=torch.stack([x.support for x in run.views]) if run.views and rows else None,
        consensus=run.consensus if request.views == 2 and rows else None,
        views=tuple(x.view(run.visible) for x in run.views) if request.views == 2 else (),
        scores=scores,
        covariance=covariance,
    )


def _softmax_block(block: Block, run: _Run) -> None:
    """One pass over the keys: each chunk's exponentials relative to its own maximum, joined at the end.

    With m_c the maximum of chunk c, L_c = sum 2^(z - m_c) and U_c = sum (m_c - z) 2^(z - m_c), the entropy is
    log2 L + U / L bits with all parts moved to the row's maximum: a sum of non-negative terms, nothing cancels.
    """
    request, work = run.request, run.work
    rows, keep = request.wants("rows"), request.wants("columns") or request.wants("near_zero")
    held, tops, sums, lags = [], [], [], []
    if keep:
        work.take("exponentials", (block.size,))
    for chunk in block.chunks:
        z = run.logits(block, chunk)
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
        at_rows = (block.b, block.heads, slice(*block.rows))
        lag = (share * (torch.stack(lags).double() + (top - tops_c) * sums_c)).sum(0)
        run.whole.mass[at_rows] = (total * lift).flatten(0, 1)
        run.whole.entropy[at_rows] = torch.where(alive, safe.log() + _LN_2 * lag / safe, 0.0).flatten(0, 1)
        run.whole.maximum[at_rows] = torch.where(alive, lift, 0.0).flatten(0, 1)
    if not keep:
        return
    weight = (tops_c - base).exp2() / norm
    for index, chunk in enumerate(block.chunks):
        e = held[index]
        if request.wants("columns"):
            part = torch.matmul(weight[index].to(e.dtype)[..., None, :], e)
            run.whole.columns[block.b, block.heads, slice(*chunk)] += part[..., 0, :].double().flatten(0, 1)
        if request.wants("near_zero"):
            for which, bound in enumerate(request.near_zero):
                level = (bound / weight[index]).clamp_max(torch.finfo(e.dtype).max).to(e.dtype)[..., None]
                counts = torch.ge(e, level, out=work.take("spare", tuple(e.shape))).sum(-1)
                run.whole.large[block.b, block.heads, which] += counts.sum(-1, dtype=torch.float64).long().flatten()


def _entmax_block(block: Block, run: _Run) -> None:
    """Newton on the norm ``(sum_j (x_j - tau)_+^p)^(1/p) = 1``, p = 1 / (alpha - 1) >= 1, x = (alpha - 1) z.

    The norm is convex and falls in tau, so Newton from the left of the root never passes it; it is linear for
    one key and for equal keys, where the steps of the plain sum would crawl as alpha tends to 1.
    """
    request, work = run.request, run.work
    power = 1.0 / (request.alpha - 1.0)
    held, tops = [], []
    work.take("scaled", (block.size,))
    for chunk in block.chunks:
        z = run.logits(block, chunk)
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
        total = torch.zeros(top.shape, dtype=torch.float64, device=top.device)
        slope = torch.zeros_like(total)
        for _, x in kept:
            y = torch.sub(x, tau[..., None], out=work.take("scores", tuple(x.shape))).clamp_min_(0.0)
            if power == 1.0:
                total += y.sum(-1)
                slope += count_above(y, 0.0, work.take("spare", tuple(y.shape)))
                continue
            less = y if power == 2.0 else y.pow(power - 1.0)
            slope += less.sum(-1)
            total += (less * y).sum(-1)
        some = total > 0
        safe = torch.where(some, total, 1.0)
        norm = safe.pow(1.0 / power)
        step = torch.where(some, (norm - 1.0) * safe / (norm * torch.where(some, slope, 1.0)), 0.0)
        tau = torch.where(step > 0, tau + step.to(tau.dtype), tau)
        if not bool(((norm - 1.0 > tolerance) & some).any()):
            break
    for chunk, x in kept:
        p = torch.sub(x, tau[..., None], out=work.take("scores", tuple(x.shape))).clamp_min_(0.0)
        run.whole.add(block, chunk, _power(p, power))


def _power(x: torch.Tensor, power: float) -> torch.Tensor:
    """x ** power in place, for x >= 0."""
    if power == 1.0:
        return x
    return x.square_() if power == 2.0 else x.pow_(power)


def _threshold_block(block: Block, run: _Run) -> None:
    """Weights ``max(s - tau, 0)^p`` as they come; on the CPU, tiles without a survivor end early."""
    request, work = run.request, run.work
    assert run.tau is not None
    tau = block.cut(run.tau)[..., None]
    on_cpu = tau.device.type == "cpu"
    rows = (block.b, block.heads, slice(*block.rows))
    for chunk in block.chunks:
        tiles = [block.scores(v, chunk, 1.0, work, f"view{v}") for v in range(request.views)]
        if run.moments is not None:
            run.moments.add(block, chunk, tiles)
        bias = block.bias(chunk, run.dtype)
        dead = []
        for x in tiles:
            if bias is not None:
                x.add_(bias)
            dead.append(on_cpu and bool((x.amax(-1) <= tau[..., 0]).all()))
            if not dead[-1]:
                x.sub_(tau).clamp_min_(0.0)
        if all(dead):
            continue
        if request.views == 2 and request.wants("rows") and not any(dead):
            both = torch.minimum(*tiles, out=work.take("spare", tuple(tiles[0].shape)))
            run.consensus[rows] += count_above(both, 0.0, both).flatten(0, 1)
        for x, totals, gone in zip(tiles, run.views, dead, strict=True):
            if gone:
                x.zero_()
                continue
            if request.wants("rows"):
                alive = count_above(x, 0.0, work.take("spare", tuple(x.shape)))
                totals.support[rows] += alive.flatten(0, 1)
            _power(x, request.power)
            if request.views == 2:
                totals.add(block, chunk, x, whole=False)
        if request.views == 1:
            run.whole.add(block, chunk, tiles[0])
        else:
            lam = request.lam[block.heads].to(run.dtype).view(*block.shape[:2], 1, 1)
            run.whole.add(block, chunk, tiles[1].mul_(lam).sub_(tiles[0]).abs_())
