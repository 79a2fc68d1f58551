"""Statistics on the GPU: which kernels run, and what is made of their sums. Imports triton: load lazily."""

from __future__ import annotations

import torch

from .request import Request, unit_rows
from .results import AttentionStatistics, ViewStatistics
from .triton_entmax import entmax_thresholds
from .triton_moments import moments
from .triton_softmax import softmax_sums
from .triton_threshold import SCREEN_FROM, screened, threshold_sums
from .visibility import column_rows, hidden_rows, visible_totals

Views = list[tuple[torch.Tensor, torch.Tensor]]


def statistics(views: Views, request: Request, screen_from: int | None = None) -> AttentionStatistics:
    """Everything asked for; see :func:`theory_kernels.attention_statistics`."""
    q = views[0][0]
    visible = request.visible(q.shape[1])
    dense = request.weights in ("softmax", "eta")
    if request.thresholded:
        # Rows without keys are hidden whatever their threshold; a large one keeps their tiles out of the lists.
        tau = request.tau(visible, q.shape[-1]).masked_fill_(hidden_rows(request.see), 1e9)
        listed = screened(views, request, tau, SCREEN_FROM if screen_from is None else screen_from)
        views = listed.views
    elif request.normalize:
        views = [(_unit(a), _unit(b)) for a, b in views]
    sums: dict[str, torch.Tensor] = {}
    if request.need - {"scores"}:
        if dense:
            sums = softmax_sums(*views[0], request)
        else:
            sums = threshold_sums(listed if request.thresholded else entmax_thresholds(*views[0], request), request)
            safe = sums["mass"].masked_fill(sums["mass"] == 0, 1.0)
            sums["entropy"] = torch.addcdiv(safe.log(), sums["entropy"], safe).clamp_min_(0.0)
    scores, covariance = moments(views, request) if request.wants("scores") else ((), None)
    rows = request.wants("rows")
    whole = _view(sums, "", visible, request, visible.clone() if dense else sums.get("support"))
    two = request.views == 2 and bool(sums)
    return AttentionStatistics(
        visible=visible,
        mass=whole.mass,
        entropy=sums["entropy"] if rows else None,
        support=whole.support,
        maximum=whole.maximum,
        column_mass=whole.column_mass,
        column_rows=column_rows(request.see) if request.wants("columns") else None,
        near_zero=whole.near_zero,
        survivors=sums["survivors"] if request.thresholded and rows else None,
        consensus=sums["consensus"] if two and rows else None,
        views=tuple(_view(sums, str(i + 1), visible, request, sums["survivors"][i]) for i in range(2)) if two else (),
        scores=scores,
        covariance=covariance,
    )


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Unit rows in the dtype of the operands: those that the kernels multiply."""
    return unit_rows(x.float()).to(x.dtype)


def _view(
    sums: dict[str, torch.Tensor], name: str, visible: torch.Tensor, request: Request, support: torch.Tensor | None
) -> ViewStatistics:
    rows, near = request.wants("rows"), request.wants("near_zero")
    return ViewStatistics(
        mass=sums["mass" + name] if rows else None,
        support=support if rows else None,
        maximum=sums["maximum" + name] if rows else None,
        column_mass=sums["columns" + name] if request.wants("columns") else None,
        near_zero=_near(sums, name, visible, request) if near else None,
    )


def _near(sums: dict[str, torch.Tensor], name: str, visible: torch.Tensor, request: Request) -> torch.Tensor:
    if not request.near_zero:
        return visible.new_zeros((*visible.shape[:2], 0))
    return visible_totals(request.see) - sums["large" + name]
