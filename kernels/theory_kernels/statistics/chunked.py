"""Statistics in plain torch, a block of rows and a chunk of keys at a time: O(T) memory, any device."""

from __future__ import annotations

import threading

import torch

from .blocks import Block, Workspace, blocks
from .moments import Moments, MomentTotals
from .parts import BlockResult, Totals
from .request import Request
from .results import AttentionStatistics
from .threads import in_order
from .visibility import column_rows
from .weights import entmax_block, factor, softmax_block, threshold_block

# Below this many scores, threads cost more than they bring.
_SIDE_BY_SIDE = 1 << 21


def statistics(views: list[tuple[torch.Tensor, torch.Tensor]], request: Request) -> AttentionStatistics:
    """Everything asked for; see :func:`theory_kernels.attention_statistics`."""
    q, k = views[0]
    shape, device = q.shape[:3], q.device
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    visible = request.visible(q.shape[1])
    tau = request.tau(visible, q.shape[-1]).to(dtype) if request.thresholded else None
    scores = None
    if request.wants("scores"):
        scores = MomentTotals(views, request, factor(request), request.normalize)
    own = threading.local()

    @torch.no_grad()
    def compute(block: Block) -> BlockResult:
        if not hasattr(own, "work"):
            own.work = Workspace(dtype, device)
        moments = Moments(block, request, scores) if scores is not None else None
        if tau is not None:
            return threshold_block(block, request, moments, own.work, tau)
        step = entmax_block if request.weights == "entmax" else softmax_block
        return step(block, request, moments, own.work)

    whole = Totals(request, shape, device)
    parts = [Totals(request, shape, device) for _ in views] if request.thresholded else []
    consensus = torch.zeros(shape, dtype=torch.int64, device=device)
    busy = device.type == "cpu" and shape.numel() * k.shape[2] >= _SIDE_BY_SIDE
    for block, result in in_order(compute, blocks(views, request), busy):
        whole.join(block, result.whole)
        for view, part in zip(parts, result.views, strict=True):
            view.join(block, part)
        if result.consensus is not None:
            consensus[block.b, block.heads, slice(*block.rows)] = result.consensus.flatten(0, 1)
        if scores is not None and result.moments is not None:
            scores.join(block, result.moments)
    rows, total = request.wants("rows"), whole.view(visible)
    dense = request.weights in ("softmax", "eta")
    moments, covariance = scores.results() if scores is not None else ((), None)
    return AttentionStatistics(
        visible=visible,
        mass=total.mass,
        entropy=(whole.entropy if dense else whole.normalized_entropy()) if rows else None,
        support=(visible.clone() if dense else whole.support) if rows else None,
        maximum=total.maximum,
        column_mass=total.column_mass,
        column_rows=column_rows(request.see) if request.wants("columns") else None,
        near_zero=total.near_zero,
        survivors=torch.stack([x.support for x in parts]) if parts and rows else None,
        consensus=consensus if request.views == 2 and rows else None,
        views=tuple(x.view(visible) for x in parts) if request.views == 2 else (),
        scores=moments,
        covariance=covariance,
    )
