"""Elastic decoding: what calls may look like, under the compiler too, and how small bounds are."""

from __future__ import annotations

import pytest
import torch
from theory_kernels import (
    BlockBounds,
    DecodeStatistics,
    elastic_decode,
    make_block_bounds,
    update_block_bounds,
)
from theory_kernels.decode.bounds import default_block
from theory_kernels.decode.operator import elastic_decode_forward, update_bounds

from .test_elastic_decode import BF16, F16, F32


@pytest.mark.parametrize("implementation", ["reference", "chunked", "triton"])
@pytest.mark.parametrize("shape", [(0, 2, 1, 20), (1, 2, 0, 20), (1, 2, 1, 0)], ids=str)
def test_nothing_to_do(shape: tuple, implementation: str, device: torch.device, triton: str) -> None:
    b, h, t, s = shape
    q, k = torch.ones((b, h, t, 16), device=device), torch.ones((b, h, s, 16), device=device)
    bounds = make_block_bounds(k, block=16)
    out = elastic_decode(q, k, k, bounds, 0.0, implementation=implementation)
    assert out.shape == q.shape
    assert not out.any()


@pytest.mark.parametrize("kind", ["norm", "minmax", "ball", "cap"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize(("d", "e"), [(128, 128), (64, 64), (256, 256), (40, 24), (16, 16), (192, 128)])
def test_bounds_are_small(kind: str, dtype: torch.dtype, d: int, e: int) -> None:
    """At most 2% of the KV cache."""
    k = torch.empty((1, 16, 524288, d), dtype=dtype, device="meta")
    bounds = make_block_bounds(k, kind, value_dim=e, lengths=0)
    assert bounds.nbytes <= 0.02 * k.numel() // d * (d + e) * k.element_size()
    assert default_block(kind, 128, 128, 2) == 64


def test_int8_keys_take_a_quarter_of_the_cache() -> None:
    k = torch.empty((1, 16, 524288, 128), dtype=BF16, device="meta")
    assert 0.25 < make_block_bounds(k, "int8", lengths=0).nbytes / (2 * k.numel() * k.element_size()) < 0.26


def test_opcheck(device: torch.device) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((1, 2, n, 16), generator=g).to(device) for n in (2, 40, 40))
    bounds = make_block_bounds(k, "cap", block=16)
    kept = [bounds.norm, bounds.vectors, bounds.scalars]
    lengths = torch.tensor([37], dtype=torch.int32, device=device)
    tau, lam = torch.full((1, 2, 2), 0.2, device=device), torch.full((2,), 0.4, device=device)
    for second, softmax in (((None, None, []), True), ((q, k, kept), False)):
        torch.library.opcheck(
            elastic_decode_forward,
            (q, k, kept, *second, v, tau, None if softmax else lam, lengths, None, "cap", 16, 0.25, softmax, 2.0,
             not softmax, None, True, "chunked"),
        )  # fmt: skip
    one = torch.ones(1, dtype=torch.int32, device=device)
    torch.library.opcheck(update_bounds, (*kept, k, None, lengths - 1, one, "cap", 16, 1, "chunked"))


def test_compile(device: torch.device) -> None:
    """One graph for a token: its block's bounds in place, and attention."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((1, 2, n, 16), generator=g).to(device) for n in (1, 40, 40))
    lengths = torch.tensor([30], dtype=torch.int32, device=device)
    tau = torch.full((2,), 0.2, device=device)

    def step(bounds: BlockBounds) -> tuple[torch.Tensor, DecodeStatistics]:
        update_block_bounds(bounds, k, lengths - 1, 1)
        return elastic_decode(q, k, v, bounds, tau, lengths=lengths, return_statistics=True)

    made = [make_block_bounds(k, "minmax", block=16, lengths=29) for _ in range(2)]
    want = step(made[0])
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(made[1])
    assert torch.equal(got[0], want[0])
    for a, b in zip((*got[1], made[1].norm, made[1].vectors), (*want[1], made[0].norm, made[0].vectors), strict=True):
        assert torch.equal(a, b)


def _bad() -> list[tuple[str, dict, type]]:
    q, k = torch.ones((1, 2, 1, 16)), torch.ones((1, 2, 40, 16))
    other = make_block_bounds(torch.ones((1, 2, 80, 16)), block=16)
    table = torch.zeros((1, 3), dtype=torch.int32)
    return [
        ("weights", {"weights": "entmax"}, ValueError),
        ("q must have at most 16 rows", {"q": torch.ones((1, 2, 17, 16))}, ValueError),
        ("q must be torch.float32 like k_cache", {"q": q.to(BF16)}, TypeError),
        ("q must have shape", {"q": torch.ones((1, 3, 1, 16))}, ValueError),
        ("v_cache must have shape", {"v_cache": torch.ones((1, 2, 41, 16))}, ValueError),
        ("block_bounds must be made for", {"block_bounds": other}, ValueError),
        ("block_bounds must be a BlockBounds", {"block_bounds": 3}, TypeError),
        ("tau must be given", {"tau": None}, ValueError),
        ("tau must be given", {"weights": "tra", "beta": 1.0}, ValueError),
        ("tau must be a scalar or have shape", {"tau": torch.ones(3)}, ValueError),
        ("q2 must be left out", {"q2": q}, ValueError),
        ("lam must be given", {"weights": "tda", "q2": q, "k2_cache": k}, ValueError),
        ("lengths must lie in 0..40", {"lengths": torch.tensor([41])}, ValueError),
        ("lengths must have shape", {"lengths": torch.tensor([4, 4])}, ValueError),
        ("page_table must name pages 0..0", {"page_table": table + 1}, ValueError),
        ("scale must be finite and > 0", {"scale": 0.0}, ValueError),
        ("power must be finite and >= 1", {"power": 0.5}, ValueError),
        ("implementation must be one of", {"implementation": "cuda"}, ValueError),
    ]


@pytest.mark.parametrize(("message", "change", "error"), _bad(), ids=lambda x: x if isinstance(x, str) else "")
def test_bad_calls_name_what_is_wrong(message: str, change: dict, error: type) -> None:
    q, k = torch.ones((1, 2, 1, 16)), torch.ones((1, 2, 40, 16))
    call = {"q": q, "k_cache": k, "v_cache": k, "block_bounds": make_block_bounds(k, block=16), "tau": 0.0, **change}
    with pytest.raises(error, match=message):
        elastic_decode(**call)


def test_bad_updates_name_what_is_wrong() -> None:
    k = torch.ones((1, 2, 40, 16))
    bounds = make_block_bounds(k, block=16)
    for message, start, length in (
        (r"start and length must stay within 0\.\.40", 39, 2),
        (r"start and length must stay within 0\.\.40", torch.tensor([-1]), 1),
        ("start must be an integer or an integer tensor", 0.5, 1),
        ("length must be an integer or an integer tensor of shape", 0, torch.tensor([1, 1])),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            update_block_bounds(bounds, k, start, length)
    for message, options in (("kind must be one of", {"kind": "box"}), ("block must be 16, 32", {"block": 48})):
        with pytest.raises(ValueError, match=message):
            make_block_bounds(k, **options)
