"""Every implementation against the float64 reference, every gradient, within a derived error budget."""

from __future__ import annotations

import pytest
import torch

from .cases import Case, assert_within_budget, inputs, run

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

# Small enough for the interpreter; between them they meet every branch of the kernels.
SMALL = [
    # One score a head: enough heads that the eager run's error is not small by luck.
    Case(t=1, s=1, heads=16, groups=16),
    Case(t=63, s=63, heads=1, groups=1, d=40, e=24),
    Case(t=33, s=33, heads=4, groups=2, dtype=BF16, views=2, options={"rms_eps": 1e-2}),
    Case(t=20, s=45, heads=1, groups=1, options={"query_offset": 25, "power": 2.5}),
    Case(t=30, s=45, heads=1, groups=1, dtype=F16, options={"causal": False}),
    Case(t=40, s=40, batch=2, heads=1, groups=1, layout="fused", options={"lengths": [33, 0]}),
    Case(t=50, s=50, heads=1, groups=1, beta=-0.2, options={"cu_seqlens": [0, 20, 20, 23, 50]}),
    Case(t=70, s=70, heads=1, groups=1, options={"screen_from": 0}),
    Case(t=70, s=70, heads=2, groups=1, dtype=BF16, views=2, beta=0.7, options={"screen_from": 0}),
    Case(t=1, s=300, heads=1, groups=1, options={"query_offset": 299, "rms_eps": 1e-3}),
]

_G = {"heads": 4, "groups": 2}
LARGE = [
    *(Case(t=n, s=n, d=64, e=64, dtype=dt, heads=32 // min(n, 8), groups=4 if n > 1 else 16)
      for n in (1, 63, 127, 129, 1025) for dt in (BF16, F32)),
    *(Case(t=n, s=n, d=64, e=64, dtype=BF16, options={"screen_from": 0}, **_G) for n in (65, 129, 1025, 4099)),
    *(Case(t=257, s=257, d=d, e=d, dtype=dt, views=2, **_G) for d in (40, 72, 80, 96, 192) for dt in (BF16, F16)),
    *(Case(t=257, s=257, d=d, e=d, dtype=BF16, options={"screen_from": 0}, **_G) for d in (40, 72, 80, 96, 192)),
    *(Case(t=257, s=257, d=256, e=256, dtype=dt, views=n, **_G) for dt in (BF16, F32) for n in (1, 2)),
    Case(t=257, s=257, d=256, e=256, dtype=F32, views=2, options={"screen_from": 0}, **_G),
    *(Case(batch=2, t=300, s=300, d=64, e=32, dtype=BF16, views=2, layout=x, options={"screen_from": y}, **_G)
      for x in ("transposed", "fused", "columns") for y in (0, 10**6)),
    *(Case(batch=2, t=200, s=200, d=d, e=e, dtype=BF16, views=2, options={"screen_from": y}, **_G)
      for d in (8, 32, 64) for e in (16, 32, 128) for y in (0, 10**6)),
    *(Case(batch=2, t=700, s=700, d=128, e=128, dtype=BF16, options={"lengths": [660, 3], "screen_from": y}, **_G)
      for y in (0, 10**6)),
    *(Case(t=1500, s=1500, d=64, e=64, dtype=BF16, views=n, beta=b,
           options={"cu_seqlens": [0, 700, 700, 703, 1500], "screen_from": y}, **_G)
      for n in (1, 2) for b in (-0.1, 0.6) for y in (0, 10**6)),
    *(Case(t=t, s=3000, d=64, e=64, dtype=BF16, views=n, options={"query_offset": 3000 - t}, **_G)
      for t in (1, 17, 64, 65) for n in (1, 2)),
    *(Case(t=300, s=500, d=64, e=64, dtype=dt, options={"query_offset": 200, "power": p, "screen_from": 0}, **_G)
      for dt in (BF16, F32) for p in (1.5, 2.0, 3.0, 7.3)),
    *(Case(t=300, s=500, d=64, e=64, dtype=BF16, views=2, options={"causal": False, "screen_from": y}, **_G)
      for y in (0, 10**6)),
    *(Case(t=1025, s=1025, d=64, e=64, dtype=BF16, views=2, beta=0.9, options={"rms_eps": 1e-2, "screen_from": y},
           **_G) for y in (0, 10**6)),
    Case(t=300, s=300, d=64, e=64, dtype=BF16, beta=0.02, options={"normalize": False, "screen_from": 0}, **_G),
]  # fmt: skip


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_chunked(case: Case, device: torch.device) -> None:
    assert_within_budget(case, device, "chunked")


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_triton(case: Case, device: torch.device, triton: str, poisoned: None) -> None:
    assert_within_budget(case, device, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_triton_large(case: Case, device: torch.device, triton: str, poisoned: None) -> None:
    assert_within_budget(case, device, "triton")


@pytest.mark.parametrize("implementation", ["chunked", "reference", "triton"])
@pytest.mark.parametrize("shape", [{"t": 0, "s": 0}, {"t": 5, "s": 0}, {"t": 0, "s": 5}, {"batch": 0}], ids=str)
def test_nothing_to_do(shape: dict, implementation: str, device: torch.device, triton: str) -> None:
    case = Case(**shape)
    operands, grad = inputs(case, device)
    got = run(case, operands, grad, implementation, F32)
    for name, x in zip(("q", "k", "v"), operands, strict=True):
        assert got[name].shape == x.shape
        assert not got[name].any()
    assert got["out"].shape == grad.shape
    assert not got["out"].any()


@pytest.mark.parametrize("implementation", ["chunked", "triton"])
def test_two_runs_are_bitwise_equal(implementation: str, device: torch.device, triton: str) -> None:
    case = Case(t=40, s=40, heads=4, groups=2, dtype=BF16, views=2, options={"rms_eps": 1e-2})
    operands, grad = inputs(case, device)
    first = run(case, operands, grad, implementation, BF16)
    second = run(case, operands, grad, implementation, BF16)
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("screen_from", [0, 10**6])
def test_two_large_runs_are_bitwise_equal(screen_from: int, device: torch.device, triton: str) -> None:
    case = Case(t=4096, s=4096, heads=8, groups=2, d=64, e=64, dtype=BF16, views=2, beta=0.8,
                options={"screen_from": screen_from})  # fmt: skip
    operands, grad = inputs(case, device)
    first = run(case, operands, grad, "triton", BF16)
    second = run(case, operands, grad, "triton", BF16)
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


@pytest.mark.gpu
def test_grid_beyond_65535(device: torch.device, triton: str) -> None:
    case = Case(batch=70_000, heads=1, groups=1, t=3, s=3, dtype=BF16)
    operands, grad = inputs(case, device)
    got, want = (run(case, operands, grad, name, BF16) for name in ("triton", "chunked"))
    exact = run(case, operands, grad, "reference", torch.float64)
    for name in ("out", "q", "k", "v"):
        error = (got[name].double() - exact[name]).norm()
        assert error <= 2 * ((want[name].double() - exact[name]).norm() + 2**-7 * exact[name].norm()), name


@pytest.mark.gpu
def test_offsets_beyond_int32(device: torch.device, triton: str) -> None:
    """A fused projection of 131,072 tokens: the last rows lie more than 2^31 elements from the first."""
    t, width, last = 131_072, 96 * 64, 64
    fused = torch.empty((1, t, 3, 96, 64), dtype=BF16, device=device)
    assert fused.stride(1) * t > 2**31
    assert fused.stride(1) == 3 * width
    g = torch.Generator(device).manual_seed(0)
    fused[:, :, :, :2] = torch.randn((1, t, 3, 2, 64), generator=g, device=device).to(BF16)
    q, k, v = (fused[:, :, i, :2].transpose(1, 2) for i in range(3))
    from theory_kernels import threshold_attention

    got = threshold_attention(q, k, v, beta=0.5)[:, :, -last:]
    tail = q[:, :, -last:].contiguous()
    want = threshold_attention(
        tail, k.contiguous(), v.contiguous(), beta=0.5, query_offset=t - last, implementation="chunked"
    )
    assert float((got.double() - want.double()).norm()) <= 2 * 2**-8 * float(want.double().norm())


def test_bitmap_is_small() -> None:
    """At 65,536 tokens, 12 heads of 64, the bitmap is at most 1% of K and V."""
    from theory_kernels.attention.plan import make_plan

    x = torch.empty((1, 12, 65536, 64), dtype=BF16, device="meta")
    plan = make_plan("triton", 1, x, x, 65536, 65536, True, 1, None)
    assert plan.screened
    words = plan.bitmap[0] * plan.bitmap[1] * plan.bitmap[2]
    assert plan.capacity == 0
    assert 4 * words <= 0.01 * 2 * x.numel() * x.element_size()
