"""Every statistic of every kind of weights, against the float64 map."""

from __future__ import annotations

import pytest
import torch
from theory_kernels import attention_statistics, consensus_counts, geometry, survivor_counts

from .conftest import HAS_CUDA
from .statistics_cases import KINDS, Budget, Case, inputs, run

# Triton's interpreter takes a second a call.
LENGTHS = [1, 63, 127, 129]
DEVICE_LENGTHS = [*LENGTHS, 1025] if HAS_CUDA else [33]
GPU_ONLY = pytest.mark.gpu
PADDED = {"key_starts": [3, 0, 9], "lengths": [31, 40, 12]}
LAYOUTS = [
    ("padding", {"batch": 3, "t": 40, "s": 40}, PADDED),
    ("window", {"t": 50, "s": 50}, {"window": 9}),
    ("decode", {"batch": 2, "t": 5, "s": 60}, {"query_offset": [55, 20], "key_starts": [4, 21], "moment_gap": 3}),
    ("encoder", {"batch": 2, "t": 40, "s": 40}, {"causal": False, "lengths": [40, 17], "moment_gap": 2}),
    ("encoder window", {"t": 40, "s": 40}, {"causal": False, "window": 5, "moment_gap": 0}),
    ("cross", {"batch": 2, "t": 20, "s": 45}, {"causal": False, "query_lengths": [20, 3], "lengths": [45, 0]}),
    ("before the keys", {"t": 20, "s": 20}, {"query_offset": -6}),
]


def _check(case: Case, implementation: str, device: torch.device, **more) -> None:
    tensors, options = inputs(case, device)
    budget = Budget(case, tensors, options, implementation)
    budget.check(run(tensors, options, implementation, **more))


def _fit(shape: dict, kind: str) -> dict:
    """Half the heads share keys in every other kind."""
    return {**shape, "groups": 1 + list(KINDS).index(kind) % 2}


@pytest.mark.parametrize(
    ("kind", "t"), [(x, t) for x in KINDS for t in LENGTHS] + [("softmax", 1025), ("entmax-2", 1025), ("tda", 1025)]
)
def test_chunked_lengths(kind: str, t: int, device: torch.device) -> None:
    _check(Case(kind, t=t, s=t, d=20, groups=1), "chunked", device)


@pytest.mark.parametrize("t", DEVICE_LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_triton_lengths(kind: str, t: int, device: torch.device, triton: str, poisoned: None) -> None:
    _check(Case(kind, t=t, s=t, d=20 if HAS_CUDA else 8, groups=1), "triton", device)


@pytest.mark.parametrize(("name", "shape", "options"), LAYOUTS, ids=[x[0] for x in LAYOUTS])
@pytest.mark.parametrize("kind", KINDS)
def test_chunked_layouts(kind: str, name: str, shape: dict, options: dict, device: torch.device) -> None:
    _check(Case(kind, **_fit(shape, kind), options=options), "chunked", device)


def _device_pairs() -> list[tuple]:
    pairs = [(kind, *layout) for kind in KINDS for layout in LAYOUTS]
    # In the interpreter each layout meets one kind of each way of computing.
    few = ("softmax-capped-sinks", "entmax-1.25", "tra-negative", "eta-weight", "softmax", "tda-1.7", "tda")
    return pairs if HAS_CUDA else [(few[i], *layout) for i, layout in enumerate(LAYOUTS)]


@pytest.mark.parametrize(("kind", "name", "shape", "options"), _device_pairs(), ids=lambda x: str(x)[:24])
def test_triton_layouts(
    kind: str, name: str, shape: dict, options: dict, device: torch.device, triton: str, poisoned: None
) -> None:
    _check(Case(kind, **_fit(shape, kind), d=12 if HAS_CUDA else 4, options=options), "triton", device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [1, 2])
def test_mask(kind: str, heads: int, device: torch.device) -> None:
    mask = torch.rand(2, heads, 30, 30, generator=torch.Generator().manual_seed(1)) < 0.3
    mask[:, :, 7] = False
    _check(Case(kind, batch=2, t=30, s=30, options={"mask": mask}), "chunked", device)
    _check(Case(kind, batch=2, t=30, s=30, options={"mask": mask[:1], "causal": False}), "chunked", device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["softmax", "entmax-1.5", "tra", "tda"])
@pytest.mark.parametrize("implementation", ["chunked", "triton"])
def test_half_precision(kind: str, dtype: torch.dtype, implementation: str, device: torch.device, triton: str) -> None:
    if implementation == "triton" and not HAS_CUDA and kind != "tra":
        pytest.skip("one kind is enough for the interpreter")
    small = implementation == "triton" and not HAS_CUDA
    _check(Case(kind, t=33 if small else 129, s=33 if small else 129, d=16, dtype=dtype), implementation, device)


@pytest.mark.parametrize("kind", KINDS)
def test_float64(kind: str, device: torch.device) -> None:
    """In float64 the two forms differ by the order of sums alone."""
    tensors, options = inputs(Case(kind, t=70, s=70, dtype=torch.float64), device)
    want, got = run(tensors, options, "reference"), run(tensors, options, "chunked")
    for name in ("mass", "entropy", "maximum", "column_mass"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-11, atol=1e-13)
    for name in ("support", "near_zero"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.parametrize("layout", ["transposed", "columns"])
@pytest.mark.parametrize("implementation", ["chunked", "triton"])
def test_strides(layout: str, implementation: str, device: torch.device, triton: str) -> None:
    for kind in ("softmax", "tda") if implementation == "chunked" or HAS_CUDA else ("softmax",):
        tensors, options = inputs(Case(kind, batch=2, t=20, s=20, d=4, layout=layout), device)
        plain = [x.contiguous() for x in tensors]
        got, want = run(tensors, options, implementation), run(plain, options, implementation)
        assert torch.equal(got.column_mass, want.column_mass)
        assert torch.equal(got.entropy, want.entropy)


@pytest.mark.parametrize("kind", [pytest.param("tra", marks=GPU_ONLY), "tda"])
def test_screened_tiles(kind: str, device: torch.device, triton: str, poisoned: None) -> None:
    """Tiles are skipped only where they hold nothing: planted survivors far from the diagonal are found."""
    size = 300 if HAS_CUDA else 70
    case = Case(kind, t=size, s=size, d=32, options={"beta": 1.0})
    tensors, options = inputs(case, device)
    for q, k in zip(tensors[::2], tensors[1::2], strict=True):
        q[:, :, -5] = 3.0 * k[:, :, 2]
    budget = Budget(case, tensors, options, "triton")
    assert int(budget.exact.survivors[0, 0, :, -5].min()) >= 1
    for screen_from in (0, 10**6) if HAS_CUDA else (0,):
        budget.check(run(tensors, options, "triton", screen_from=screen_from))


@pytest.mark.gpu
@pytest.mark.parametrize("d", [1, 64, 80, 96, 128, 160, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["softmax", "entmax-1.5", "tda"])
def test_head_dims(kind: str, dtype: torch.dtype, d: int, device: torch.device, triton: str) -> None:
    _check(Case(kind, t=200, s=200, d=d, dtype=dtype), "triton", device)


@pytest.mark.parametrize("limit", [227 << 10, 99 << 10])
@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_fit_shared_memory(dtype: torch.dtype, views: int, limit: int, triton: str) -> None:
    from theory_kernels.statistics.triton_common import flags_of, shared_bytes, square_tiles

    for d in (1, 16, 48, 64, 80, 128, 160, 256):
        q = torch.empty((1, 1, 1, d), dtype=dtype)
        tiles = square_tiles(q, views, limit)
        width = flags_of(q)["DP"]
        needed = shared_bytes(tiles["BM"], tiles["num_stages"], width, q.element_size(), views)
        # Two views of float32 rows beyond 128 are too much for consumer cards, which have 99 KiB.
        assert needed <= limit or (tiles["BM"] == 16 and views == 2 and dtype == torch.float32 and d > 128)
        if limit > 100 << 10 and d * q.element_size() <= 256:
            assert tiles["BM"] == 64, "the lists of tiles are of this size"


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("views", [1, 2])
def test_kernels_take_the_shared_memory_that_was_foreseen(
    views: int, dtype: torch.dtype, d: int, device: torch.device, triton: str
) -> None:
    from theory_kernels.statistics import triton_moments, triton_threshold
    from theory_kernels.statistics.triton_common import flags_of, shared_bytes, square_tiles

    kernels = (triton_threshold._rows_kernel, triton_threshold._columns_kernel, triton_moments._moments_kernel)
    for kernel in kernels:
        kernel.device_caches.clear()
    tensors, options = inputs(Case("tda" if views == 2 else "tra", t=200, s=200, d=d, dtype=dtype), device)
    run(tensors, options, "triton")
    tiles = square_tiles(tensors[0], views)
    width, size = flags_of(tensors[0])["DP"], tensors[0].element_size()
    foreseen = shared_bytes(tiles["BM"], tiles["num_stages"], width, size, views)
    for kernel in kernels:
        for compiled in kernel.device_caches[device.index or 0][0].values():
            assert compiled.metadata.shared <= foreseen, (kernel.__name__, compiled.metadata.shared)


@pytest.mark.parametrize("implementation", ["chunked", pytest.param("triton", marks=GPU_ONLY)])
def test_long_column(implementation: str, device: torch.device) -> None:
    """131,072 rows put their mass on one key: half precision would stop at 2048, plain float32 drifts."""
    rows = 131072
    g = torch.Generator().manual_seed(0)
    q = torch.randn((1, 1, rows, 4), generator=g).abs().half().to(device)
    k = torch.randn((1, 1, 9, 4), generator=g).half().to(device)
    k[:, :, 0] = 8.0
    got = attention_statistics(q, k, causal=False, implementation=implementation)
    want = attention_statistics(q, k, causal=False, implementation="reference")
    assert float(want.column_mass[0, 0, 0]) > 100_000
    torch.testing.assert_close(got.column_mass, want.column_mass, rtol=4e-6, atol=1e-4)
    assert float(got.column_mass.sum()) == pytest.approx(rows, rel=4e-6)
    assert torch.equal(got.column_rows, torch.full((1, 9), rows, device=device))


@pytest.mark.parametrize("implementation", ["chunked", pytest.param("triton", marks=GPU_ONLY)])
def test_two_runs_agree_bit_for_bit(implementation: str, device: torch.device, triton: str) -> None:
    for kind in ("softmax", "tda"):
        tensors, options = inputs(Case(kind, batch=2, groups=1, t=700, s=700, d=4), device)
        one, two = run(tensors, options, implementation), run(tensors, options, implementation)
        assert torch.equal(one.column_mass, two.column_mass)
        assert torch.equal(one.mass, two.mass)
        assert torch.equal(one.scores[0].variance, two.scores[0].variance)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_cuda_graph_captures_it(kind: str, device: torch.device, triton: str) -> None:
    """Replayed on other numbers, with the tables of the first call gone from memory."""
    first, options = inputs(Case(kind, t=130, s=130, d=16), device)
    second, _ = inputs(Case(kind, t=130, s=130, d=16, seed=1), device)
    want = run([x.clone() for x in second], options, "triton")
    run(first, options, "triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(first, options, "triton")
    held = geometry.held_tables()
    geometry._TABLES.clear()
    for x, y in zip(first, second, strict=True):
        x.copy_(y)
    graph.replay()
    for name in ("visible", "mass", "entropy", "support", "column_mass", "column_rows", "near_zero"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert torch.equal(got.scores[0].variance, want.scores[0].variance)
    del held


def test_threads_change_no_bit() -> None:
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn((1, 6, 900, 8), generator=g), torch.randn((1, 2, 900, 8), generator=g)
    had = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = attention_statistics(q, k, need=("rows", "columns", "scores"), implementation="chunked")
        torch.set_num_threads(3)
        three = attention_statistics(q, k, need=("rows", "columns", "scores"), implementation="chunked")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(had)
    assert torch.equal(one.column_mass, three.column_mass)
    assert torch.equal(one.entropy, three.entropy)
    assert torch.equal(one.scores[0].mean, three.scores[0].mean)


def test_reference_against_plain_softmax(device: torch.device) -> None:
    """The definition itself: torch's own softmax of the masked scores."""
    g = torch.Generator().manual_seed(3)
    q, k = (torch.randn((2, 2, 40, 8), generator=g, dtype=torch.float64).to(device) for _ in range(2))
    z = (q @ k.transpose(-1, -2)) * 8**-0.5
    a = z.masked_fill(torch.ones(40, 40, dtype=torch.bool, device=device).triu(1), -torch.inf).softmax(-1)
    got = attention_statistics(q, k, implementation="reference")
    torch.testing.assert_close(got.column_mass, a.sum(-2))
    torch.testing.assert_close(got.entropy, torch.distributions.Categorical(probs=a).entropy())
    torch.testing.assert_close(got.maximum, a.amax(-1))
    lower = torch.ones(40, 40, dtype=torch.bool, device=device).tril()
    assert torch.equal(got.near_zero[..., 1], ((a < 1e-3) & lower).sum((-2, -1)))


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_reference_against_sorted_entmax(alpha: float, device: torch.device) -> None:
    """The closed forms of Martins and Astudillo (2016) and Peters et al. (2019), one row."""
    g = torch.Generator().manual_seed(4)
    q, k = (torch.randn((1, 1, n, 6), generator=g, dtype=torch.float64).to(device) for n in (1, 25))
    x = ((alpha - 1) * 6**-0.5 * (q @ k.transpose(-1, -2)))[0, 0, 0].sort(descending=True).values
    n = torch.arange(1, 26, device=device)
    mean = x.cumsum(0) / n
    deviation = (x.square().cumsum(0) / n - mean.square()).clamp_min(0)
    tau = mean - (1 / n if alpha == 2.0 else (1 / n - deviation).clamp_min(0).sqrt())
    size = int((tau < x).sum())
    p = (x - tau[size - 1]).clamp_min(0) ** (1 / (alpha - 1))
    for implementation in ("reference", "chunked"):
        got = attention_statistics(q, k, weights="entmax", alpha=alpha, causal=False, implementation=implementation)
        torch.testing.assert_close(got.column_mass[0, 0].sort(descending=True).values, p)
        assert int(got.support) == size


def test_eta_worked_example(device: torch.device) -> None:
    """Both readings on the numbers of THEORY.md, section 3: one row, so the column masses are the weights."""
    s = torch.tensor([0.9, 0.3, 0.7, 0.1, 0.85, 0.4], dtype=torch.float64, device=device).view(1, 1, 6, 1)
    q = torch.ones((1, 1, 1, 1), dtype=torch.float64, device=device)
    for reading, want in (
        ("weight", [0.3375, 0.0261, 0.2519, 0.0033, 0.3179, 0.0633]),
        ("logit", [0.2484, 0.1067, 0.1920, 0.1026, 0.2346, 0.1157]),
    ):
        got = attention_statistics(
            q, s, weights="eta", eta_threshold=0.482507, eta_reading=reading, causal=False, implementation="reference"
        )
        expected = torch.tensor(want, dtype=torch.float64, device=device)
        torch.testing.assert_close(got.column_mass[0, 0], expected, rtol=0, atol=6e-5)


def test_survivors_are_those_of_the_counts(device: torch.device) -> None:
    g = torch.Generator().manual_seed(5)
    q, k, q2, k2 = (torch.randn((1, 2, 60, 16), generator=g, dtype=torch.float64).to(device) for _ in range(4))
    got = attention_statistics(q, k, q2, k2, weights="tda", beta=0.3, implementation="reference")
    rows = torch.arange(1, 61, dtype=torch.float64, device=device)
    tau = 0.3 * (2 * rows.log() / 16).sqrt()
    for view, pair in enumerate(((q, k), (q2, k2))):
        want = survivor_counts(*pair, tau, normalize=True, implementation="reference")
        assert torch.equal(got.survivors[view], want.long())
    want = consensus_counts(q, k, q2, k2, tau, normalize=True, implementation="reference")
    assert torch.equal(got.consensus, want.long())


def test_short_text_in_a_longer_buffer(device: torch.device) -> None:
    """A text of three tokens has three rows, whatever the buffer holds."""
    g = torch.Generator().manual_seed(6)
    q, k = (torch.randn((1, 2, 3, 8), generator=g).to(device) for _ in range(2))
    wide = [torch.cat([x, torch.full((1, 2, 5, 8), torch.nan, device=device)], 2) for x in (q, k)]
    left = [torch.cat([torch.full((1, 2, 5, 8), torch.nan, device=device), x], 2) for x in (q, k)]
    want = attention_statistics(q, k, implementation="chunked")
    right = attention_statistics(*wide, lengths=torch.tensor([3], device=device), implementation="chunked")
    late = attention_statistics(*left, key_starts=torch.tensor([5], device=device), implementation="chunked")
    for got, rows in ((right, slice(0, 3)), (late, slice(5, 8))):
        assert int((got.visible > 0).sum()) == 6
        assert torch.equal(got.visible[..., rows], want.visible)
        torch.testing.assert_close(got.column_mass[..., rows], want.column_mass)
        assert float(got.column_mass.sum()) == pytest.approx(6.0)
        assert int(got.near_zero.sum()) == int(want.near_zero.sum())


def test_rows_of_zeros_and_nothing_visible(device: torch.device) -> None:
    q = torch.zeros((1, 1, 4, 8), device=device)
    nothing = torch.zeros((1, 1, 4, 4), dtype=torch.bool, device=device)
    for weights in ("softmax", "entmax", "tra"):
        got = attention_statistics(q, q, weights=weights, implementation="chunked", need=("rows", "scores"))
        rows = torch.arange(1.0, 5.0, dtype=torch.float64, device=device)
        want = torch.zeros_like(rows) if weights == "tra" else rows.log()
        torch.testing.assert_close(got.entropy[0, 0], want)
        hidden = attention_statistics(q, q, weights=weights, implementation="chunked", mask=nothing)
        for name in ("visible", "mass", "entropy", "support", "maximum", "column_mass", "column_rows", "near_zero"):
            assert not getattr(hidden, name).any(), name


@pytest.mark.parametrize("shape", [(0, 2, 4, 4), (1, 2, 0, 4), (1, 2, 4, 0), (1, 0, 4, 4)], ids=str)
def test_empty(shape: tuple[int, int, int, int], device: torch.device) -> None:
    b, h, t, s = shape
    q, k = torch.zeros((b, h, t, 8), device=device), torch.zeros((b, max(h, 1), s, 8), device=device)
    for weights in ("softmax", "tra"):
        got = attention_statistics(q, k, weights=weights, need=("rows", "columns", "near_zero", "scores"))
        assert got.mass.shape == (b, h, t)
        assert got.column_mass.shape == (b, h, s)
        assert not got.mass.any()


@pytest.mark.parametrize("need", [("rows",), ("columns",), ("near_zero",), ("scores",), ()], ids=str)
@pytest.mark.parametrize("implementation", ["reference", "chunked", "triton"])
def test_only_what_is_needed(
    need: tuple[str, ...], implementation: str, device: torch.device, triton: str, poisoned: None
) -> None:
    if implementation == "triton" and not HAS_CUDA and need not in (("rows",), ()):
        pytest.skip("two are enough for the interpreter")
    for kind in ("softmax", "tda"):
        tensors, options = inputs(Case(kind, t=9, s=9, d=4), device)
        whole = run(tensors, options, implementation)
        got = run(tensors, options, implementation, need=need, levels=(), exponents=())
        pieces = {"mass": "rows", "entropy": "rows", "column_mass": "columns", "near_zero": "near_zero"}
        for name, part in pieces.items():
            assert (getattr(got, name) is not None) == (part in need), name
            if part in need:
                assert torch.equal(getattr(got, name), getattr(whole, name)), name
        assert bool(got.scores) == ("scores" in need)
