"""Statistics in plain torch, a block of rows and a chunk of keys at a time: O(T) memory, any device.

Within a tile sums are float32 (torch adds them as trees); from tile to tile everything is added in float64.
"""

from __future__ import annotations

import torch

from .blocks import Block, Workspace, blocks, count_true
from .moments import Moments
from .request import Request
from .results import AttentionStatistics, ViewStatistics
from .visibility import column_rows

# Stands for -inf in logits: exp gives 0 and 0 times it is 0. No real logit comes near.
_FLOOR = -1e30
# The smallest row maximum: a row without keys stays below it.
_EMPTY = -1e29
_NEWTON_STEPS = 60


class Totals:
    """Sums of one map: rows (B, H, T), columns (B, H, S), and the visible entries that are not near zero."""

    def __init__(self, request: Request, shape: tuple[int, int, int], device: torch.device):
        wide = {"dtype": torch.float64, "device": device}
        self.request = request
        self.mass = torch.zeros(shape, **wide)
        self.entropy = torch.zeros(shape, **wide)
        self.maximum = torch.zeros(shape, **wide)
        self.support = torch.zeros(shape, dtype=torch.int64, device=device)
        self.columns = torch.zeros((*shape[:2], request.see.keys if request.wants("columns") else 0), **wide)
        self.large = torch.zeros((*shape[:2], len(request.near_zero)), dtype=torch.int64, device=device)

    def add(self, block: Block, chunk: tuple[int, int], w: torch.Tensor, whole: bool = True) -> None:
        """Add non-negative weights of a chunk; the view of a difference (not ``whole``) counts its own support.

        ``entropy`` holds -sum w log w until :meth:`normalized_entropy`.
        """
        rows = (block.b, block.heads, slice(*block.rows))
        if self.request.wants("rows"):
            self.mass[rows] += w.sum(-1).double().flatten(0, 1)
            self.maximum[rows] = torch.maximum(self.maximum[rows], w.amax(-1).double().flatten(0, 1))
            if whole:
                self.support[rows] += count_true(w > 0).flatten(0, 1)
                self.entropy[rows] += torch.special.entr(w).sum(-1).double().flatten(0, 1)
        if self.request.wants("columns"):
            self.columns[block.b, block.heads, slice(*chunk)] += w.sum(-2).double().flatten(0, 1)
        if self.request.wants("near_zero"):
            for index, bound in enumerate(self.request.near_zero):
                self.large[block.b, block.heads, index] += count_true(w >= bound).sum(-1).flatten()

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
        shape = tuple(q.shape[:3])
        self.whole = Totals(request, shape, q.device)
        self.views = [Totals(request, shape, q.device) for _ in views] if request.thresholded else []
        self.consensus = torch.zeros(shape, dtype=torch.int64, device=q.device)
        # What the products are multiplied by on their way out of the matrix product.
        self.factor = 1.0
        if not request.thresholded:
            self.factor = request.scale / (request.softcap or 1.0)
        self.moments = Moments(views, request, self.factor) if request.wants("scores") else None
        self.tau = request.tau(self.visible, q.shape[-1]).to(self.dtype) if request.thresholded else None

    def logits(self, block: Block, chunk: tuple[int, int]) -> torch.Tensor:
        """Logits of a chunk, hidden ones at the floor; adds the scores to the moments on the way."""
        request = self.request
        z = block.scores(0, chunk, self.factor, self.work, "scores")
        if self.moments is not None:
            self.moments.add(block, chunk, [z])
        if request.softcap is not None:
            z.tanh_().mul_(request.softcap)
        if request.eta_threshold is not None:
            slope = z - block.cut(request.eta_threshold)[..., None].to(z.dtype)
            slope.mul_(request.eta_sharpness)
            if request.eta_reading == "logit":
                z.mul_(slope.sigmoid_())
            else:
                z.add_(torch.nn.functional.logsigmoid(slope))
        hidden = block.hidden(chunk)
        if hidden is not None:
            z.masked_fill_(hidden, _FLOOR)
        return z


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

    With m_c the maximum of chunk c, L_c = sum e^(z - m_c) and U_c = sum (m_c - z) e^(z - m_c), the entropy is
    log L + U / L with all parts moved to the row's maximum: a sum of non-negative terms, nothing cancels.
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
        e = torch.exp(z, out=work.take("exponentials", tuple(z.shape), block.start(chunk) if keep else 0))
        tops.append(top[..., 0])
        sums.append(e.sum(-1))
        if rows:
            lags.append(-z.mul_(e).sum(-1))
        held.append(e)
    tops_c, sums_c = torch.stack(tops).double(), torch.stack(sums).double()
    top = tops_c.amax(0)
    share = (tops_c - top).exp()
    total = (share * sums_c).sum(0)
    alive = total > 0
    safe = torch.where(alive, total, 1.0)
    # Relative to the row's maximum or its sink, whichever is larger.
    base, norm = top, safe
    if request.sinks is not None:
        sink = request.sinks[block.heads].view(*block.shape[:2], 1)
        base = torch.maximum(top, sink)
        norm = safe * (top - base).exp() + (sink - base).exp()
    lift = (top - base).exp() / norm
    if rows:
        at_rows = (block.b, block.heads, slice(*block.rows))
        lag = (share * (torch.stack(lags).double() + (top - tops_c) * sums_c)).sum(0)
        run.whole.mass[at_rows] = (total * lift).flatten(0, 1)
        run.whole.entropy[at_rows] = torch.where(alive, safe.log() + lag / safe, 0.0).flatten(0, 1)
        run.whole.maximum[at_rows] = torch.where(alive, lift, 0.0).flatten(0, 1)
    if not keep:
        return
    weight = (tops_c - base).exp() / norm
    for index, chunk in enumerate(block.chunks):
        e = held[index]
        if request.wants("columns"):
            part = torch.matmul(weight[index].to(e.dtype)[..., None, :], e)
            run.whole.columns[block.b, block.heads, slice(*chunk)] += part[..., 0, :].double().flatten(0, 1)
        if request.wants("near_zero"):
            for which, bound in enumerate(request.near_zero):
                level = (bound / weight[index]).clamp_max(torch.finfo(e.dtype).max).to(e.dtype)
                counts = count_true(e >= level[..., None]).sum(-1)
                run.whole.large[block.b, block.heads, which] += counts.flatten()


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
    live = [bool((own >= top - 1.0).any()) for own in tops]
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
                slope += count_true(y > 0)
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
        hidden = block.hidden(chunk)
        dead = []
        for x in tiles:
            x.sub_(tau)
            if hidden is not None:
                # After the threshold: with a negative one, a hidden score of 0 would survive.
                x.masked_fill_(hidden, 0.0)
            dead.append(on_cpu and bool((x.amax(-1) <= 0).all()))
            if not dead[-1]:
                x.clamp_min_(0.0)
        if all(dead):
            continue
        if request.views == 2 and request.wants("rows") and not any(dead):
            run.consensus[rows] += count_true((tiles[0] > 0) & (tiles[1] > 0)).flatten(0, 1)
        for x, totals, gone in zip(tiles, run.views, dead, strict=True):
            if gone:
                x.zero_()
                continue
            if request.wants("rows"):
                totals.support[rows] += count_true(x > 0).flatten(0, 1)
            _power(x, request.power)
            if request.views == 2:
                totals.add(block, chunk, x, whole=False)
        if request.views == 1:
            run.whole.add(block, chunk, tiles[0])
        else:
            lam = request.lam[block.heads].to(run.dtype).view(*block.shape[:2], 1, 1)
            run.whole.add(block, chunk, tiles[1].mul_(lam).sub_(tiles[0]).abs_())
