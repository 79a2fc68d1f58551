"""What is timed: our kernels and the peers, behind one signature, each with the reference that gates it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from theory_kernels import differential_threshold_attention, threshold_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

BETA, LAM = 1.0, 0.5
Call = Callable[..., torch.Tensor]


class Mechanism(NamedTuple):
    """``call(*views, v)``; ``reference(*view rows, v, first)`` computes some rows in the operands' dtype."""

    name: str
    views: int
    call: Call
    reference: Call


def _tra_reference(q, k, v, first):
    return threshold_attention(q, k, v, beta=BETA, query_offset=first, implementation="reference")


def _tda_reference(q1, k1, q2, k2, v, first):
    return differential_threshold_attention(
        q1, k1, q2, k2, v, beta=BETA, lam=LAM, query_offset=first, implementation="reference"
    )


def _scores(q, k, first):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    rows = torch.arange(first, first + q.shape[2], device=q.device)
    return s.masked_fill(torch.arange(k.shape[2], device=q.device) > rows[:, None], -torch.inf)


def _softmax_reference(q, k, v, first):
    return _scores(q, k, first).softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def _entmax_reference(q, k, v, first):
    """1.5-entmax by the sorted solution of Peters et al. (2019); differentiable through autograd."""
    z = _scores(q, k, first).double() / 2
    z = z - z.amax(-1, keepdim=True).detach()
    top = z.detach().sort(-1, descending=True).values.clamp_min(-1e6)
    n = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    mean, square = top.cumsum(-1) / n, top.square().cumsum(-1) / n
    delta = (1 - n * (square - mean.square())) / n
    tau = mean - delta.clamp_min(0).sqrt()
    size = (tau <= top).sum(-1, keepdim=True)
    # Differentiate through the support that was found: tau solves sum (z - tau)^2 = 1 there.
    live = z > tau.gather(-1, size - 1)
    count = live.sum(-1, keepdim=True)
    kept = torch.where(live, z, 0.0)
    m, s = kept.sum(-1, keepdim=True) / count, kept.square().sum(-1, keepdim=True) / count
    t = m - (1 / count - (s - m.square())).clamp_min(0).sqrt()
    p = torch.where(live, z - t, 0.0).square()
    return p.to(q.dtype) @ v


def _sdpa(backend: SDPBackend) -> Call:
    def call(q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    return call


def ours() -> list[Mechanism]:
    """TRA and TDA of this package."""
    return [
        Mechanism("TRA", 1, lambda q, k, v: threshold_attention(q, k, v, beta=BETA), _tra_reference),
        Mechanism(
            "TDA",
            2,
            lambda q1, k1, q2, k2, v: differential_threshold_attention(q1, k1, q2, k2, v, beta=BETA, lam=LAM),
            _tda_reference,
        ),
    ]


def sdpa() -> list[Mechanism]:
    """PyTorch's FlashAttention-2 and cuDNN backends."""
    return [
        Mechanism("FA2", 1, _sdpa(SDPBackend.FLASH_ATTENTION), _softmax_reference),
        Mechanism("cuDNN", 1, _sdpa(SDPBackend.CUDNN_ATTENTION), _softmax_reference),
    ]


def flex(length: int, device: torch.device) -> Mechanism:
    """FlexAttention with a causal block mask, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return Mechanism("FlexAttention", 1, lambda q, k, v: compiled(q, k, v, block_mask=mask), _softmax_reference)


def _load(path: Path):
    spec = importlib.util.spec_from_file_location("tda_authors", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def authors(path: Path) -> list[Mechanism]:
    """The TDA authors' Triton file, given by path (its license forbids shipping it)."""
    module, lam = _load(path), torch.tensor(LAM)
    return [
        Mechanism(
            "TDA authors (TRA)", 1, lambda q, k, v: module.threshold_rela_triton(q, k, v, BETA, relu_power=2.0),
            _tra_reference,
        ),
        Mechanism(
            "TDA authors (TDA)", 2,
            lambda q1, k1, q2, k2, v: module.differential_threshold_rela_triton(
                q1, q2, k1, k2, v, BETA, lam, relu_power=2.0
            ),
            _tda_reference,
        ),
    ]  # fmt: skip


def adasplash(folder: Path | None, configs: int) -> Mechanism:
    """AdaSplash-2 (1.5-entmax). Its autotuner tries 60 configurations; only the first ``configs`` are kept."""
    import triton

    original = triton.autotune

    def fewer(configs_list, *args, **kwargs):
        # Middle-sized tiles first: the largest spill at head dim 64.
        order = sorted(configs_list, key=lambda c: abs(c.kwargs.get("BLOCK_M", 64) - 64) + abs(c.num_stages - 3))
        return original(order[:configs], *args, **kwargs)

    if folder is not None:
        sys.path.insert(0, str(folder))
    triton.autotune = lambda configs, *args, **kwargs: fewer(configs, *args, **kwargs)
    try:
        import adasplash as package
    finally:
        triton.autotune = original
    return Mechanism(
        "AdaSplash-2", 1, lambda q, k, v: package.adasplash(q, k, v, alpha=1.5, is_causal=True), _entmax_reference
    )
