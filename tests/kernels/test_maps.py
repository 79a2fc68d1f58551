"""Maps: the reference against the mechanisms' own definitions, the chunked form against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from theory_kernels import pooled_map, row_normalizers, sparse_rows
from theory_kernels.attention import reference as threshold_reference
from theory_kernels.geometry import build_geometry
from theory_kernels.maps import chunked
from theory_kernels.maps.pixels import pixels_of
from theory_kernels.maps.thresholds import entmax_threshold

from theory_lab.attention.alpha_entmax import entmax
from theory_lab.attention.base import Scope
from theory_lab.attention.eta import ETALogit, ETAWeight

MECHANISMS = {
    "softmax": {},
    "softcap": {"softcap": 0.7, "scale": 0.9},
    "sinks": {"sinks": torch.tensor([0.5, -math.inf])},
    "entmax-1.5": {"weights": "entmax"},
    "entmax-2": {"weights": "entmax", "alpha": 2.0, "scale": 1.0},
    "entmax-1.1": {"weights": "entmax", "alpha": 1.1},
    "entmax-3": {"weights": "entmax", "alpha": 3.0},
    "tra": {"weights": "tra", "beta": torch.tensor([0.4, -0.2])},
    "tra-raw": {"weights": "tra", "normalize": False, "power": 1.5, "kappa": 2.0, "beta": 0.2},
    "tda": {"weights": "tda", "beta": 0.3, "lam": torch.tensor([0.5, 1.5])},
    "eta-logit": {"weights": "eta", "eta_threshold": torch.tensor([0.2, 0.6])},
    "eta-weight": {"weights": "eta", "eta_threshold": 0.4, "eta_reading": "weight", "eta_sharpness": 3.0},
}
SIGHTS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 4},
    "window-full": {"causal": False, "window": 4},
    "padded": {"key_starts": [3, 0], "lengths": [15, 11]},
    "padded-full": {"causal": False, "key_starts": [3, 0], "lengths": [15, 11], "query_starts": [3, 0],
                    "query_lengths": [14, 11]},
    "decoding": {"query_offset": [10, -4]},
    "masked": {"mask": True},
}  # fmt: skip


def _operands(
    seed: int, t: int, s: int, d: int = 6, dtype: torch.dtype = torch.float64, views: int = 1, batch: int = 2
) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = [(batch, 2, t, d), (batch, 1, s, d)] * views
    # Drawn in the low precision and promoted: the float64 reference sees the same numbers.
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


def _options(mechanism: str, sight: str, t: int, s: int, batch: int = 2) -> dict:
    options = {**MECHANISMS[mechanism], **SIGHTS[sight]}
    if options.get("mask") is True:
        g = torch.Generator().manual_seed(7)
        mask = torch.rand((batch, 1, t, s), generator=g) < 0.6
        mask[:, :, 2] = False  # a row that sees nothing
        options["mask"] = mask
    return {name: torch.tensor(x)[:batch] if isinstance(x, list) else x for name, x in options.items()}


def _views(mechanism: str) -> int:
    return 2 if mechanism == "tda" else 1


def _visible(options: dict, b: int, t: int, s: int) -> torch.Tensor:
    """Which pairs are seen, written out pair by pair."""

    def of(name: str, default: int) -> int:
        value = options.get(name)
        return default if value is None else int(value[b])

    offset, start, stop = of("query_offset", 0), of("key_starts", 0), of("lengths", s)
    causal, window = options.get("causal", True), options.get("window")
    seen = torch.zeros(t, s, dtype=torch.bool)
    for i in range(t):
        p = i + offset
        valid = of("query_starts", 0) <= i < of("query_lengths", t)
        if causal and options.get("key_starts") is not None:
            valid = valid and start <= p < stop
        for j in range(start, stop):
            inside = window is None or (p - window < j if causal else abs(p - j) <= window)
            seen[i, j] = valid and not (causal and j > p) and inside
    if options.get("mask") is not None:
        seen &= options["mask"][b, 0]
    return seen


def _dense(operands: list[torch.Tensor], options: dict) -> torch.Tensor:
    """All weights by the mechanisms' own definitions, (B, H, T, S) float64."""
    q, k = operands[:2]
    (batch, heads, t, d), s = q.shape, k.shape[2]
    options = dict(options)
    kind = options.pop("weights", "softmax")
    out = torch.zeros(batch, heads, t, s, dtype=torch.float64)

    def a_head(name: str, h: int, default: float) -> float:
        value = options.get(name, default)
        return float(value[h]) if isinstance(value, torch.Tensor) else value

    for b in range(batch):
        seen = _visible(options, b, t, s)
        for h in range(heads):
            z = q[b, h] @ k[b, 0].T * options.get("scale", d**-0.5)
            if "softcap" in options:
                z = options["softcap"] * torch.tanh(z / options["softcap"])
            if kind == "softmax":
                sink = torch.full((t, 1), a_head("sinks", h, -math.inf), dtype=z.dtype)
                full = torch.cat([z.masked_fill(~seen, -math.inf), sink], 1)
                w = full.softmax(-1)[:, :s].masked_fill(~seen, 0.0)
            elif kind == "entmax":
                w = entmax(z, options.get("alpha", 1.5), seen)
            elif kind == "eta":
                form = ETAWeight if options.get("eta_reading") == "weight" else ETALogit
                eta = form(tau=a_head("eta_threshold", h, 0.5), alpha=options.get("eta_sharpness", 10.0))
                scope = Scope(seen, seen.sum(-1, keepdim=True).clamp_min(1), True)
                w = eta.row_weights((z,), scope).detach()
            else:
                w = torch.zeros(t, s, dtype=torch.float64)
                n = seen.sum(-1).double().clamp_min(1)
                tau = (2 * (n / options.get("kappa", 1.0)).log().clamp_min(0) / d).sqrt() * a_head("beta", h, 1.0)
                for view, factor in ((0, 1.0), (2, -a_head("lam", h, 0.5))):
                    if view >= len(operands):
                        continue
                    a, c = operands[view][b, h], operands[view + 1][b, 0]
                    if options.get("normalize", True):
                        a, c = threshold_reference.unit_rows(a), threshold_reference.unit_rows(c)
                    x = (a @ c.T - tau[:, None]).clamp_min(0)
                    w = w + factor * x ** options.get("power", 2.0)
                w = w.masked_fill(~seen, 0.0)
            out[b, h] = w
    return out


def _pooled(w: torch.Tensor, rows: tuple[int, int], columns: tuple[int, int], size: tuple[int, int], reduce: str):
    """The definition of a pixel, written out."""
    (r0, r1), (c0, c1) = rows, columns
    down, across = min(size[0], r1 - r0), min(size[1], c1 - c0)
    out = torch.zeros(*w.shape[:2], down, across, dtype=w.dtype)
    for r in range(down):
        for c in range(across):
            tile = w[
                :, :, r0 + r * (r1 - r0) // down : r0 + (r + 1) * (r1 - r0) // down,
                c0 + c * (c1 - c0) // across : c0 + (c + 1) * (c1 - c0) // across,
            ].flatten(2)  # fmt: skip
            if reduce == "sum":
                out[:, :, r, c] = tile.sum(-1)
            else:
                high, low = tile.amax(-1), tile.amin(-1)
                out[:, :, r, c] = torch.where(high >= -low, high, low)
    return out


CASES = [
    (mechanism, sight)
    for mechanism in MECHANISMS
    for sight in SIGHTS
    if sight in ("causal", "padded") or mechanism in ("softmax", "tra", "tda", "eta-logit")
]


@pytest.mark.parametrize(("mechanism", "sight"), CASES, ids=lambda x: x)
def test_every_form_against_the_definition(mechanism: str, sight: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """float64, uneven windows; the chunked form with blocks so small that every loop takes several turns."""
    monkeypatch.setattr(chunked, "_budget", lambda device, keys: 60)
    t, s = 15, 17
    operands = _operands(0, t, s, views=_views(mechanism))
    options = _options(mechanism, sight, t, s)
    dense = _dense(operands, options)
    assert dense.any()
    for reduce, rows, columns, size in (
        ("max", (0, t), (0, s), (4, 3)),
        ("sum", (0, t), (0, s), (4, 3)),
        ("max", (3, 13), (2, 14), (20, 5)),
    ):
        want = _pooled(dense, rows, columns, size, reduce)
        for implementation in ("reference", "chunked"):
            got = pooled_map(
                *operands, rows=rows, columns=columns, resolution=size, reduce=reduce,
                implementation=implementation, **options,
            )  # fmt: skip
            assert got.dtype == torch.float64
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_sparse_rows(mechanism: str) -> None:
    operands = _operands(1, 19, 19, views=_views(mechanism))
    options = _options(mechanism, "causal", 19, 19)
    dense = _dense(operands, options)
    for above in (0.0, 0.1):
        found = sparse_rows(*operands, rows=(4, 19), above=above, **options)
        rebuilt = torch.zeros(2 * 2 * 15, 19, dtype=torch.float64)
        for r in range(60):
            span = slice(int(found.pointers[r]), int(found.pointers[r + 1]))
            assert bool((found.columns[span].diff() > 0).all())
            assert bool((found.values[span].abs() > above).all())
            rebuilt[r, found.columns[span]] = found.values[span]
        want = dense[:, :, 4:].flatten(0, 2)
        torch.testing.assert_close(rebuilt, want.where(want.abs() > above, 0.0), rtol=1e-11, atol=1e-13)
        if above:
            assert found.values.numel() < 60 * 19


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(("t", "d"), [(1, 16), (63, 24), (129, 7), (1025, 64)])
def test_error_budget(mechanism: str, t: int, d: int, dtype: torch.dtype) -> None:
    """Error against float64 <= 2 (error of the eager reference in the low precision + rounding band)."""
    if t == 1025 and (dtype == torch.float16 or mechanism not in ("softmax", "entmax-1.5", "tda", "eta-weight")):
        return  # the long case is kept for one of a kind
    operands = _operands(2, t, t, d, dtype, _views(mechanism), batch=1)
    if t == 63:
        operands = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in operands]
    options = _options(mechanism, "causal", t, t, 1)
    for reduce in ("max", "sum"):
        shared = {"reduce": reduce, "resolution": (9, 11), **options}
        exact = pooled_map(*[x.double() for x in operands], implementation="chunked", **shared)
        eager = _eager(operands, exact, shared)
        got = pooled_map(*operands, implementation="chunked", **shared).double()
        for norm in (torch.inf, 2.0):
            size = torch.linalg.vector_norm(exact, norm)
            if mechanism == "tda":
                # A difference rounds with its parts.
                size = size + sum(
                    torch.linalg.vector_norm(
                        pooled_map(*[x.double() for x in pair], **{**shared, "weights": "tra", "lam": 0.5}), norm
                    )
                    for pair in (operands[:2], operands[2:])
                )
            error = torch.linalg.vector_norm(got - exact, norm)
            allowed = 2 * (torch.linalg.vector_norm(eager - exact, norm) + torch.finfo(dtype).eps * size)
            assert float(error) <= float(allowed), (reduce, norm, float(error), float(allowed))


def _eager(operands: list[torch.Tensor], exact: torch.Tensor, shared: dict) -> torch.Tensor:
    """A plain run: all in float32, or half-precision operands normalized in half precision and exact from there on."""
    if operands[0].dtype == torch.float32:
        return pooled_map(*operands, implementation="reference", **shared).double()
    if shared.get("weights") in ("tra", "tda") and shared.get("normalize", True):
        units = [threshold_reference.unit_rows(x).double() for x in operands]
        return pooled_map(*units, implementation="chunked", **{**shared, "normalize": False})
    return exact


def test_pixels_cover_every_entry_once() -> None:
    for begin, end, resolution in ((0, 1, 1), (0, 10, 3), (7, 8, 512), (3, 130, 64), (5, 1030, 512)):
        pixels = pixels_of(begin, end, resolution, None, torch.device("cpu"))
        assert pixels.members[pixels.real].tolist() == list(range(begin, end))
        assert pixels.edges[0] == begin
        assert pixels.edges[-1] == end
        assert int(pixels.sizes.max()) - int(pixels.sizes.min()) <= 1
        for samples in (1, 2, 3):
            few = pixels_of(begin, end, resolution, samples, torch.device("cpu"))
            for r in range(few.members.shape[0]):
                chosen = few.members[r][few.real[r]]
                assert bool((chosen.diff() > 0).all())
                assert int(pixels.edges[r]) <= int(chosen[0])
                assert int(chosen[-1]) < int(pixels.edges[r + 1])


def test_sampled_rows_bound_the_maximum_and_estimate_the_sum() -> None:
    operands = _operands(3, 200, 200, dtype=torch.float32, batch=1)
    exact = pooled_map(*operands, resolution=8)
    sampled = pooled_map(*operands, resolution=8, row_samples=3)
    assert bool((sampled <= exact).all())
    assert bool((sampled < exact).any())
    assert torch.equal(pooled_map(*operands, resolution=8, row_samples=25), exact)
    total = pooled_map(*operands, resolution=8, row_samples=3, reduce="sum")
    # Softmax rows sum to one, whatever is sampled: each pixel row holds as much as it has rows.
    torch.testing.assert_close(total.sum(-1), torch.full((1, 2, 8), 25.0))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_normalizers_are_kept_and_filled_in(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operands = _operands(4, 40, 40, views=_views(mechanism))
    options = _options(mechanism, "causal", 40, 40)
    window = {"rows": (10, 20), "columns": (0, 40), "resolution": 4}
    want = pooled_map(*operands, **window, **options)
    whole = row_normalizers(*operands, **options)
    assert not whole.isnan().any()
    cache = row_normalizers(*operands, rows=(0, 0), **options)
    assert cache.isnan().all()
    assert torch.equal(pooled_map(*operands, normalizers=cache, **window, **options), want)
    torch.testing.assert_close(cache[:, :, 10:20], whole[:, :, 10:20], rtol=1e-13, atol=1e-13)
    assert cache[:, :, :10].isnan().all()
    assert cache[:, :, 20:].isnan().all()
    # With them known, whole rows are not read again.
    monkeypatch.setattr(chunked, "normalizers", None)
    assert torch.equal(pooled_map(*operands, normalizers=cache, **window, **options), want)


def test_signed_maxima_keep_their_sign() -> None:
    """Two views that are alike but for a factor of the scores: the difference of view 2 prevails where it is larger."""
    q1, k1, q2, k2 = _operands(5, 30, 30, views=2)
    image = pooled_map(q1, k1, q2, k2, weights="tda", beta=0.1, lam=1.0, resolution=6)
    assert image.min() < 0 < image.max()
    swapped = pooled_map(q2, k2, q1, k1, weights="tda", beta=0.1, lam=1.0, resolution=6)
    torch.testing.assert_close(swapped, -image)
    tie = pooled_map(q1, k1, q1, k1, weights="tda", beta=0.1, lam=2.0, resolution=6)
    torch.testing.assert_close(tie, -pooled_map(q1, k1, weights="tra", beta=0.1, resolution=6))


@pytest.mark.parametrize("alpha", [1.0625, 1.25, 1.5, 1.75, 2.0, 2.5, 4.0])
def test_entmax_thresholds_solve_their_equation(alpha: float) -> None:
    g = torch.Generator().manual_seed(6)
    z = torch.randn(50, 300, generator=g, dtype=torch.float64) * torch.logspace(-2, 2, 50, dtype=torch.float64)[:, None]
    z[:, 250:] = -math.inf
    x = (alpha - 1.0) * z
    tau = entmax_threshold(x, alpha)
    power = 1.0 / (alpha - 1.0)
    total = (x - tau[:, None]).clamp_min(0).pow(power).sum(-1)
    # One rounding of tau moves the sum by its slope: that is the best an answer in float64 can do.
    gap = (x - tau[:, None]).clamp_min(0)
    slope = torch.where(gap > 0, power * gap.pow(power - 1.0), 0.0).sum(-1)
    assert bool(((total - 1.0).abs() <= 8 * 2.0**-53 * (1.0 + slope * (1.0 + tau.abs()))).all())
    assert entmax_threshold(torch.full((2, 3), -math.inf), alpha).tolist() == [-math.inf] * 2


def test_padding_does_not_matter() -> None:
    """NaN and infinity past the sequence's end, and before its start, change nothing."""
    q, k = _operands(8, 20, 20, batch=1)
    bounds = {"key_starts": torch.tensor([4]), "lengths": torch.tensor([16])}
    want = pooled_map(q, k, resolution=5, **bounds)
    for x in (q, k):
        x[:, :, :4] = math.nan
        x[:, :, 16:] = math.inf
    for weights in ("softmax", "tra", "entmax"):
        assert pooled_map(q, k, resolution=5, weights=weights, **bounds).isfinite().all()
    assert torch.equal(pooled_map(q, k, resolution=5, **bounds), want)
    bounds["lengths"] = torch.tensor([4])
    assert not pooled_map(q, k, resolution=5, **bounds).any()


def test_empty_batch_and_heads() -> None:
    q, k = torch.zeros(0, 2, 5, 4), torch.zeros(0, 1, 5, 4)
    assert pooled_map(q, k, resolution=3).shape == (0, 2, 3, 3)
    assert sparse_rows(q, k).pointers.tolist() == [0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": (3, 3)}, "rows must be a span that is not empty within 0..9, got 3..3"),
        ({"columns": (0, 10)}, "columns must be a span that is not empty within 0..9, got 0..10"),
        ({"rows": (-1, 4)}, "rows must be at least 0, got -1"),
        ({"rows": 4}, "rows must be a pair of integers, got 4"),
        ({"resolution": 0}, "resolution must be at least 1, got 0"),
        ({"resolution": 2.5}, "resolution must be an integer or a pair of them, got 2.5"),
        ({"reduce": "mean"}, "reduce must be one of max, sum, got 'mean'"),
        ({"row_samples": 0}, "row_samples must be at least 1, got 0"),
        ({"weights": "linear"}, "weights must be one of softmax, entmax, tra, tda, eta, got 'linear'"),
        ({"weights": "tda"}, "q2 and k2 belong to weights='tda', which needs both, got weights='tda'"),
        ({"weights": "eta"}, "eta_threshold is needed for weights='eta', got None"),
        ({"weights": "tra", "sinks": 1.0}, "sinks join the partition function of softmax, got weights='tra'"),
        ({"implementation": "triton"}, "implementation must be one of auto, reference, chunked, got 'triton'"),
        ({"alpha": 0.5}, "alpha must be finite and >= 1, got 0.5"),
        ({"scale": -1.0}, "scale must be finite and >= 0, got -1.0"),
        ({"weights": "tra", "scale": 0.1}, "scale and softcap belong to softmax, entmax and eta, got weights='tra'"),
        ({"lengths": torch.tensor([10])}, "lengths must lie in 0..9, got [10]"),
        ({"lengths": torch.tensor([1.0])}, "lengths must be an integer tensor, got dtype torch.float32"),
        ({"beta": torch.zeros(3)}, "beta must be a number or have shape (2,), got (3,)"),
        ({"mask": torch.zeros(9, 9)}, "mask must be a bool tensor, got torch.float32"),
        ({"normalizers": torch.zeros(1, 2, 8)}, "normalizers must be torch.float32 of shape (1, 2, 9)"),
        ({"k": torch.zeros(1, 1, 9, 5)}, "k must have head dim 4 like q, got (1, 1, 9, 5)"),
        ({"k": torch.zeros(1, 1, 9, 4, dtype=torch.float64)}, "k must be torch.float32 like q, got torch.float64"),
        ({"q": [1.0]}, "q must be a tensor, got list"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else None,
)
def test_bad_input_is_named(change: dict, message: str) -> None:
    operands = {"q": torch.zeros(1, 2, 9, 4), "k": torch.zeros(1, 1, 9, 4)}
    with pytest.raises((ValueError, TypeError)) as caught:
        pooled_map(**{**operands, **change})
    assert message in str(caught.value)


def test_against_the_threshold_kernels_own_weights() -> None:
    q, k = _operands(9, 25, 25, batch=1)
    geometry = build_geometry(
        q, k, causal=True, query_offset=0, lengths=None, query_lengths=None, cu_seqlens=None, cu_seqlens_k=None,
        max_seqlen=None,
    )  # fmt: skip
    want = threshold_reference.weights(q, k, torch.tensor([0.5, 1.0]), geometry, 1.0, 2.0, True)
    got = pooled_map(q, k, weights="tra", beta=torch.tensor([0.5, 1.0]))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)
