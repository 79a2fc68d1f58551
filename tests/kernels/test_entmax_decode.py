"""Entmax attention of few rows over long keys, as in decoding."""

from __future__ import annotations

import math

import pytest
import torch
from theory_kernels.entmax_attention import entmax_attention

from .test_entmax_attention import BF16, F32, F64, Case, _inputs, _options

FEW = [
    Case(t=1, s=150, heads=4, groups=2, options={"query_offset": 149}),
    Case(t=3, s=60, heads=1, alpha=(1.2,), dtype=BF16, e=24,
         options={"cu_seqlens": [0, 2, 2, 3], "cu_seqlens_k": [0, 40, 40, 60], "query_offset": [38, 0, 19],
                  "max_seqlen": 40}),
    Case(batch=2, t=2, s=70, heads=1, options={"lengths": [70, 0], "query_offset": [68, -1]}),
]  # fmt: skip


def _assert_few_rows(case: Case, device: torch.device) -> None:
    operands, temperature, _ = _inputs(case, device)
    options = _options(case, device)
    alpha = case.alpha if isinstance(case.alpha, float) else torch.tensor(case.alpha, device=device)
    want, eager, got = (
        entmax_attention(*(x.to(dtype) for x in operands), alpha=alpha if not isinstance(alpha, torch.Tensor) else
                         alpha.to(F64 if dtype == F64 else F32), temperature=temperature, implementation=name,
                         **options).double()
        for name, dtype in (("reference", F64), ("reference", case.dtype), ("triton", case.dtype))
    )  # fmt: skip
    k = operands[1].double()
    reach = float((operands[0].double().norm(dim=-1) * temperature).max() * k.norm(dim=-1).max()) * case.d**-0.5
    eps = (1.0 + reach) * 2.0**-21 if case.dtype == F32 else torch.finfo(case.dtype).eps
    size = float(operands[2].double().abs().max()) * math.sqrt(want.numel())
    assert float((got - want).norm()) <= 2 * (float((eager - want).norm()) + eps * size)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_few_rows(case: Case, device: torch.device, triton: str, poisoned: None) -> None:
    """Decoding, where nothing is kept for a backward: kernels of their own."""
    _assert_few_rows(case, device)


@pytest.mark.parametrize(("scale", "alpha", "turns"), [(0.02, 1.5, 1), (4.0, 1.2, 3), (0.02, 2.0, 3), (0.02, 1.2, 1)])
def test_few_rows_by_several_programs(
    scale: float, alpha: float, turns: int, device: torch.device, triton: str, poisoned: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Flat rows, where every tile counts, and others; solved in the turns there are, or finished by one program."""
    from theory_kernels.entmax_attention import launch

    for name, value in (("SPLIT_FROM", 1), ("ALONE", 1), ("TURNS", (turns,) * 3)):
        monkeypatch.setattr(launch, name, value)
    _assert_few_rows(
        Case(t=2, s=50, heads=1, alpha=alpha, scale=scale, options={"lengths": [49], "query_offset": 47}), device
    )


@pytest.mark.gpu
@pytest.mark.parametrize("d", [72, 80, 96, 192])
def test_four_long_decodings_are_bitwise_equal(d: int, device: torch.device, triton: str) -> None:
    g = torch.Generator(device).manual_seed(0)
    q = 0.02 * torch.randn((1, 4, 1, d), generator=g, device=device).to(BF16)
    k, v = (torch.randn((1, 2, 100_000, d), generator=g, device=device).to(BF16) for _ in range(2))
    first, *others = (entmax_attention(q, k, v, query_offset=99_999) for _ in range(4))
    assert all(torch.equal(first, x) for x in others)


@pytest.mark.gpu
@pytest.mark.parametrize("split_from", [1, 10**6])
def test_a_captured_graph_follows_a_growing_sequence(
    split_from: int, device: torch.device, triton: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured at one length, replayed at others, with flat rows and with peaked ones."""
    from theory_kernels.entmax_attention import launch

    monkeypatch.setattr(launch, "SPLIT_FROM", split_from)
    g = torch.Generator(device).manual_seed(0)
    q = torch.randn((2, 4, 1, 64), generator=g, device=device).to(BF16)
    k, v = (torch.randn((2, 2, 20_000, 64), generator=g, device=device).to(BF16) for _ in range(2))
    lengths = torch.tensor([500, 1], dtype=torch.int32, device=device)

    def call() -> torch.Tensor:
        return entmax_attention(q, k, v, lengths=lengths, query_offset=lengths - 1)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for new, factor in (([20_000, 0], 1.0), ([64, 19_999], 0.01), ([1, 65], 50.0)):
        lengths.copy_(torch.tensor(new))
        q.mul_(factor)
        graph.replay()
        assert torch.equal(out, call())


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.02, 2.0])
@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
@pytest.mark.parametrize("d", [64, 128])
def test_few_rows_long(d: int, alpha: float, scale: float, device: torch.device, triton: str, poisoned: None) -> None:
    _assert_few_rows(
        Case(t=1, s=100_000, heads=8, groups=4, d=d, e=d, alpha=alpha, dtype=BF16, scale=scale,
             options={"query_offset": 99_999}), device,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("t", [1, 8])
def test_few_rows_large(t: int, d: int, alpha: float, device: torch.device, triton: str, poisoned: None) -> None:
    _assert_few_rows(
        Case(batch=2, t=t, s=20_000, heads=8, groups=2, d=d, e=d, alpha=alpha, dtype=BF16, scale=2.0,
             options={"query_offset": 20_000 - t}), device,
    )  # fmt: skip


@pytest.mark.gpu
def test_grid_of_few_rows_beyond_65535(device: torch.device, triton: str) -> None:
    _assert_few_rows(Case(batch=70_000, heads=1, t=3, s=40, dtype=BF16, options={"query_offset": 37}), device)
