"""Whether a call, as described, explains the output that the model computed."""

from __future__ import annotations

import torch

from theory_lab.probes.calls import AttentionCall

_TEXTS = 4


def fault(call: AttentionCall, output: torch.Tensor) -> str | None:
    """Compare rows of a layer's output with softmax attention computed from the call in float64.

    The first and the last valid row of a few texts are enough to notice a bias, a cap or a mask that is not known: they
    would have to leave both alone.

    Parameters
    ----------
    call : AttentionCall
        Without dropout.
    output : Tensor (B, T, H, V)
        What the attention function returned.

    Returns
    -------
    str or None
        What is wrong; None if the call explains the output.
    """
    texts = min(call.q.shape[0], _TEXTS)
    groups = call.k.shape[1]
    which = torch.arange(texts, device=call.q.device)[:, None]
    rows = _rows(call, texts)  # (B, R)
    # Key heads stay as they are: the queries that share one are rows of the same product. (B, G, R, H / G, D)
    q = call.q[which, :, rows].double().unflatten(2, (groups, -1)).transpose(1, 2)
    k, v = call.k[:texts].double(), call.v[:texts].double()
    logits = call.scale * torch.einsum("bgrhd,bgsd->bgrhs", q, k)
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    hidden = ~_seen(call, which, rows, groups)
    empty = hidden.all(-1, keepdim=True)
    logits = logits.masked_fill(hidden, -torch.inf)
    joined = logits
    if call.sinks is not None:
        sinks = call.sinks.double().reshape(1, groups, 1, -1, 1).expand(*logits.shape[:4], 1)
        joined = torch.cat([logits, sinks], dim=-1)
    weights = torch.exp(logits - torch.logsumexp(joined, -1, keepdim=True)).masked_fill(empty, 0.0)
    wanted = torch.einsum("bgrhs,bgsv->bgrhv", weights, v)
    got = output[which, rows].double().unflatten(2, (groups, -1)).transpose(1, 2)
    # Rounding of logits moves a weight by a factor exp(|logit| eps); that of weights and sums by a few eps.
    eps = max(torch.finfo(call.q.dtype).eps, torch.finfo(torch.float32).eps)  # softmax itself runs in float32
    size = logits.masked_fill(hidden, 0.0).abs().amax(-1, keepdim=True)
    norms = abs(call.scale) * q.norm(dim=-1, keepdim=True) * k.norm(dim=-1).amax(-1)[:, :, None, None, None]
    budget = (16 + 8 * size + 4 * norms) * eps * v.abs().amax(dim=2)[:, :, None, None, :]
    off = ((got - wanted).abs() > budget) & ~empty
    infinite = ~torch.isfinite(got) & ~empty
    found = torch.stack([infinite.any(), off.any()]).tolist()  # one wait for the device
    if found[0]:
        return "its output is not finite"
    if found[1]:
        return "its output is not the softmax attention of its scores: a bias that is not known?"
    return None


def _rows(call: AttentionCall, texts: int) -> torch.Tensor:
    """The first and the last valid query of each text, (B, 2)."""
    seen, queries = call.visibility, call.q.shape[2]
    first = torch.zeros(texts, dtype=torch.long, device=call.q.device)
    last = first + queries
    if seen.query_starts is not None:
        first = seen.query_starts[:texts].to(first)
    if seen.query_lengths is not None:
        last = seen.query_lengths[:texts].to(last)
    return torch.stack([first, last - 1], dim=1).clamp(0, queries - 1)


def _seen(call: AttentionCall, which: torch.Tensor, rows: torch.Tensor, groups: int) -> torch.Tensor:
    """Keys that the rows see, (B, G or 1, R, H / G or 1, S)."""
    seen, keys = call.visibility, call.k.shape[2]
    if seen.mask is not None:
        found = seen.mask.expand(call.q.shape[0], -1, -1, -1)[which, :, rows]  # (B, R, H or 1, S)
        heads = groups if found.shape[2] > 1 else 1
        return found.unflatten(2, (heads, -1)).transpose(1, 2)
    column = torch.arange(keys, device=rows.device)
    shown = torch.ones(*rows.shape, keys, dtype=torch.bool, device=rows.device)
    if seen.causal:
        offset = seen.query_offset if isinstance(seen.query_offset, int) else seen.query_offset[which]
        position = (rows + offset)[..., None]
        shown &= column <= position
        if seen.window is not None:
            shown &= column > position - seen.window
    elif seen.window is not None:
        shown &= (column - rows[..., None]).abs() <= seen.window
    if seen.key_starts is not None:
        shown &= column >= seen.key_starts[which][..., None]
    if seen.lengths is not None:
        shown &= column < seen.lengths[which][..., None]
    return shown[:, None, :, None]
