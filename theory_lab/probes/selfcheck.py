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
    texts, heads = call.q.shape[:2]
    chosen = torch.arange(min(texts, _TEXTS), device=call.q.device)
    for row in _rows(call, chosen):
        q = call.q[chosen, :, row].double()  # (B, H, D)
        k = call.k[chosen].double().repeat_interleave(heads // call.k.shape[1], dim=1)
        v = call.v[chosen].double().repeat_interleave(heads // call.v.shape[1], dim=1)
        logits = call.scale * torch.einsum("bhd,bhsd->bhs", q, k)
        if call.softcap is not None:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        hidden = ~_seen(call, chosen, row)
        full = hidden.all(-1, keepdim=True)
        logits = logits.masked_fill(hidden, -torch.inf)
        joined = logits
        if call.sinks is not None:
            sinks = call.sinks.double().reshape(1, -1, 1).expand(len(chosen), -1, 1)
            joined = torch.cat([logits, sinks], dim=-1)
        weights = torch.exp(logits - torch.logsumexp(joined, -1, keepdim=True)).masked_fill(full, 0.0)
        wanted = torch.einsum("bhs,bhsv->bhv", weights, v)
        got = output[chosen, row].double()
        # Rounding of logits moves a weight by a factor exp(|logit| eps); that of weights and sums by a few eps.
        eps = max(torch.finfo(call.q.dtype).eps, torch.finfo(torch.float32).eps)  # softmax itself runs in float32
        size = logits.masked_fill(hidden, 0.0).abs().amax(-1, keepdim=True)
        norms = call.scale * q.norm(dim=-1, keepdim=True) * k.norm(dim=-1).amax(-1, keepdim=True)
        budget = (16 + 8 * size + 4 * norms.abs()) * eps * v.abs().amax(dim=2)
        if not bool(torch.isfinite(got).logical_or(full).all()):
            return "its output is not finite"
        if bool((((got - wanted).abs() > budget) & ~full).any()):
            return "its output is not the softmax attention of its scores: a bias that is not known?"
    return None


def _rows(call: AttentionCall, chosen: torch.Tensor) -> list[torch.Tensor]:
    seen = call.visibility
    zero = torch.zeros_like(chosen)
    first = zero if seen.query_starts is None else seen.query_starts[chosen]
    last = zero + call.q.shape[2] if seen.query_lengths is None else seen.query_lengths[chosen]
    limit = call.q.shape[2] - 1
    return [first.clamp(0, limit), (last - 1).clamp(0, limit)]


def _seen(call: AttentionCall, chosen: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Keys that one row of each chosen text sees, (B, 1 or H, S)."""
    seen, keys = call.visibility, call.k.shape[2]
    if seen.mask is not None:
        whole = seen.mask.expand(call.q.shape[0], -1, -1, -1)
        return whole[chosen, :, row]
    column = torch.arange(keys, device=row.device)
    found = torch.ones(len(chosen), keys, dtype=torch.bool, device=row.device)
    if seen.causal:
        offset = seen.query_offset if isinstance(seen.query_offset, int) else seen.query_offset[chosen]
        position = (row + offset)[:, None]
        found &= column <= position
        if seen.window is not None:
            found &= column > position - seen.window
    if seen.key_starts is not None:
        found &= column >= seen.key_starts[chosen][:, None]
    if seen.lengths is not None:
        found &= column < seen.lengths[chosen][:, None]
    return found[:, None]
