"""What the attention of a model is doing, layer by layer: for logs while it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from theory_lab.models.lab.attention import LabAttention, dense, scope_of
from theory_lab.models.lab.mechanisms import row_weights

#: Learned parameters that a log is about, where a mechanism has them.
_LEARNED = ("beta", "lam", "s", "theta", "tau", "alpha")


@torch.no_grad()
def attention_state(model: Any, input_ids: Tensor, *, queries: int = 128) -> list[dict[str, float]]:
    """Numbers of every layer on a few texts, by the mechanism's own definition.

    Parameters
    ----------
    model : LabModel or LabForCausalLM
    input_ids : Tensor
        (B, T) without padding.
    queries : int
        Rows that are looked at: so many, spread evenly over the second half of the texts (all of it if fewer), so that
        cost and memory are O(B H queries T). Rows of the first half see few keys, and a log is about long rows.

    Returns
    -------
    list of dict
        One a layer: ``layer``; ``dead_rows``, the share of rows without any weight; ``dead_heads``, the share of heads
        without any in all rows; ``zeros``, the share of visible pairs with a weight of exactly 0; ``survivors``, the
        number of non-zero weights a row; of two views ``correlation``, Pearson's of their scores over visible pairs
        (the query's own key left out), by head, then averaged; and the mean over heads of learned parameters that the
        mechanism has, such as ``beta`` and ``lam``.
    """
    found: list[dict[str, float]] = []
    length = input_ids.shape[1]
    rows = torch.linspace(length // 2, length - 1, min(queries, length - length // 2), device=input_ids.device)
    rows = rows.round().long()

    def look(module: LabAttention, q: Tensor, k: Tensor, views: Any, x: Tensor) -> None:
        found.append(_layer(module, q, k, views, x, rows))

    was = model.training
    model.eval()
    try:
        with observed(model, look):
            model.base_model(input_ids=input_ids, use_cache=False)
    finally:
        model.train(was)
    return found


@contextmanager
def observed(model: Any, observer: Any) -> Iterator[None]:
    """Call ``observer(module, q, k, views, x)`` at every attention layer of eager runs inside the block."""
    modules = [module for module in model.modules() if isinstance(module, LabAttention)]
    for module in modules:
        module.observer = observer
    try:
        yield
    finally:
        for module in modules:
            module.observer = None


def _layer(module: LabAttention, q: Tensor, k: Tensor, views: Any, x: Tensor, rows: Tensor) -> dict[str, float]:
    mechanism = module.mechanism
    weights, seen, scores = _rows(module, q, k, views, x, rows)
    alive = weights != 0
    some = alive.any(-1)
    visible = seen.sum()
    numbers: dict[str, float | Tensor] = {
        "dead_rows": 1.0 - some.float().mean(),
        "dead_heads": 1.0 - some.any(-1).any(0).float().mean(),
        "zeros": 1.0 - alive.sum() / visible,
        "survivors": alive.sum() / some.numel(),
    }
    if len(scores) == 2:
        numbers["correlation"] = _correlation(scores, seen, rows)
    for name in _LEARNED:
        if name in mechanism.__dict__.get("_transforms", {}):
            numbers[name] = getattr(mechanism, name).detach().float().mean()
    values = torch.stack([torch.as_tensor(value, device=q.device).float() for value in numbers.values()]).tolist()
    return {"layer": float(module.layer_idx), **dict(zip(numbers, values, strict=True))}


def _rows(
    module: LabAttention, q: Tensor, k: Tensor, views: Any, x: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Weights, visibility and scores of a few rows, (B, H, R, S) each."""
    mechanism = module.mechanism
    bias = module.bias(q.shape[2], k.shape[2], q.device)
    picked = [(left[:, :, rows].float(), right.float()) for left, right in ((q, k), *views)]
    group = q.shape[1] // k.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        scores = [mechanism.scores(left, right.repeat_interleave(group, 1)) for left, right in picked]
        if bias is not None:
            scores = [score + bias[:, rows] for score in scores]
        whole = scope_of(
            q.shape[2], k.shape[2], None, scores[0].new_empty(()).expand(*q.shape[:3], k.shape[2]),
            head_dim=q.shape[-1], x=x[:, rows].float(), q=picked[0][0],
        )  # fmt: skip
        scope = type(whole)(
            whole.visible[:, :, rows], whole.n[:, :, rows], True, whole.head_dim, whole.x, whole.q
        )  # fmt: skip
        if mechanism.uses_positions:
            weights = dense(mechanism, q, k, None, views=views, x=x, bias=bias)[1][:, :, rows]
        else:
            weights = row_weights(mechanism, tuple(s.masked_fill(~scope.visible, 0.0) for s in scores), scope)
    return weights, scope.visible, scores


def _correlation(scores: list[Tensor], seen: Tensor, rows: Tensor) -> Tensor:
    keys = torch.arange(seen.shape[-1], device=rows.device)
    other = seen & (keys < rows[:, None])
    count = other.sum((0, 2, 3)).double()
    first, second = (torch.where(other, s, 0.0).double() for s in scores)
    mean1, mean2 = (s.sum((0, 2, 3)) / count for s in (first, second))
    by_head = (slice(None), None, None)
    off1, off2 = (
        torch.where(other, s - m[by_head], 0.0) for s, m in ((first, mean1), (second, mean2))
    )  # fmt: skip
    product = (off1 * off2).sum((0, 2, 3))
    return (product / (off1.square().sum((0, 2, 3)) * off2.square().sum((0, 2, 3))).sqrt()).mean()
