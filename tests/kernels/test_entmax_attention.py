"""Entmax attention: every implementation against the float64 reference within a derived error budget, and its laws."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
import torch
from theory_kernels.entmax_attention import entmax_attention
from theory_kernels.entmax_attention.reference import entmax_rows
from theory_kernels.entmax_attention.rows import alpha_terms, anchors, log_weights, slopes, solve

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@dataclass(frozen=True)
class Case:
    """One call. ``scale`` multiplies q; lists in ``options`` become integer tensors, a tuple of alphas one a head."""

    batch: int = 1
    heads: int = 2
    groups: int = 1
    t: int = 40
    s: int = 40
    d: int = 16
    e: int = 16
    alpha: float | tuple[float, ...] = 1.5
    dtype: torch.dtype = F32
    scale: float = 4.0
    transposed: bool = False
    options: dict = field(default_factory=dict)

    def __str__(self) -> str:
        extra = ",".join(f"{k}={v}" for k, v in self.options.items())
        return (
            f"a{self.alpha}-{self.batch}x{self.heads}:{self.groups}-T{self.t}-S{self.s}-D{self.d}-E{self.e}-"
            f"{str(self.dtype).removeprefix('torch.')}-x{self.scale}-{'transposed-' if self.transposed else ''}{extra}"
        )


def _inputs(case: Case, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """q, k, v in the case's dtype, temperatures, and the gradient of the output."""
    g = torch.Generator().manual_seed(1)
    q = torch.randn((case.batch, case.heads, case.t, case.d), generator=g) * case.scale
    k = torch.randn((case.batch, case.groups, case.s, case.d), generator=g)
    v = torch.randn((case.batch, case.groups, case.s, case.e), generator=g)
    grad = torch.randn((case.batch, case.heads, case.t, case.e), generator=g)
    temperature = 0.5 + torch.rand((case.batch, case.heads, case.t), generator=g)
    return [x.to(case.dtype).to(device) for x in (q, k, v)], temperature.to(device), grad.to(case.dtype).to(device)


def _options(case: Case, device: torch.device) -> dict:
    return {
        k: torch.tensor(v, dtype=torch.int32, device=device) if isinstance(v, list) else v
        for k, v in case.options.items()
    }


def _run(case: Case, device: torch.device, implementation: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Output and every gradient of one implementation with operands of ``dtype``."""
    operands, temperature, grad = _inputs(case, device)
    wide = F64 if dtype == F64 else F32
    leaves = [x.to(dtype) for x in operands]
    if case.transposed:
        leaves = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in leaves]
    leaves = [x.detach().requires_grad_() for x in leaves]
    temperature = temperature.to(wide).requires_grad_()
    alpha: float | torch.Tensor = case.alpha if isinstance(case.alpha, float) else 0.0
    wanted = {"q": leaves[0], "k": leaves[1], "v": leaves[2], "temperature": temperature}
    if isinstance(case.alpha, tuple):
        # Rounded to float32 first, so that every dtype means the same alpha.
        alpha = torch.tensor(case.alpha, dtype=F32, device=device).to(wide).requires_grad_()
        wanted["alpha"] = alpha
    options = _options(case, device)
    if implementation != "triton":
        options.pop("list_from", None)
    out = entmax_attention(*leaves, alpha=alpha, temperature=temperature, implementation=implementation, **options)
    grads = torch.autograd.grad(out, list(wanted.values()), grad.to(dtype), allow_unused=True)
    found = {name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(wanted.items(), grads, strict=True)}
    return {"out": out.detach(), **found}


def _magnitudes(case: Case, device: torch.device) -> tuple[dict[str, torch.Tensor], float]:
    """Sums of the absolute contributions to every result, and how far one unit of rounding of a score moves weights.

    Gradients are sums with cancellation, in <do, v>, over keys and rows, and in what is centered out, so their
    rounding scales with such sums. A weight moves with its score, whose rounding is relative to factor |q| |k|.
    """
    operands, temperature, grad = _inputs(case, device)
    q, k, v = (x.double() for x in operands)
    k, v = (x.repeat_interleave(case.heads // case.groups, 1) for x in (k, v))
    do = grad.double()
    alpha = (case.alpha,) * case.heads if isinstance(case.alpha, float) else case.alpha
    eps = torch.tensor(alpha, dtype=F64, device=device)[:, None, None] - 1.0
    factor = temperature.double()[..., None] * case.d**-0.5
    raw = q @ k.transpose(-1, -2)
    # Rows with a mask of their own have fewer keys: sums over what a causal mask leaves bound theirs well enough.
    position = torch.arange(case.t, device=device)[:, None] + case.options.get("query_offset", 0)
    seen = torch.arange(case.s, device=device)[None, :] <= position
    if not case.options.get("causal", True):
        seen = torch.ones_like(seen)
    z = torch.where(seen, raw * factor, -torch.inf)
    u = z - anchors(z)
    log_p = log_weights(u, eps, solve(u, eps))
    p, s, pull = log_p.exp(), slopes(log_p, eps), alpha_terms(log_p, eps).abs()
    size = do.abs() @ v.abs().transpose(-1, -2)
    size = size + (s * size).sum(-1, keepdim=True) / s.sum(-1, keepdim=True).clamp_min(1e-300)
    dz = s * size

    def over_groups(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (case.groups, -1)).sum(2)

    sums = {
        "out": p @ v.abs(),
        "q": (factor * dz) @ k.abs(),
        "k": over_groups((factor * dz).transpose(-1, -2) @ q.abs()),
        "v": over_groups(p.transpose(-1, -2) @ do.abs()),
        "temperature": (dz * raw.abs()).sum(-1) * case.d**-0.5,
        "alpha": (pull * size).sum((0, 2, 3)),
    }
    reach = float((factor[..., 0] * q.norm(dim=-1)).max() * k.norm(dim=-1).max())
    return sums, 1.0 + reach


def _assert_within_budget(case: Case, device: torch.device, implementation: str) -> None:
    """Error against float64 <= 2 (error of the eager reference in the low precision + rounding band)."""
    exact = _run(case, device, "reference", F64)
    eager = _run(case, device, "reference", case.dtype)
    got = _run(case, device, implementation, case.dtype)
    sums, moved = _magnitudes(case, device)
    eps = torch.finfo(case.dtype).eps
    if case.dtype == F32:
        # On tensor cores: three tf32 products leave out low times low, 2^-21 of a product.
        eps = moved * (2.0**-21 if implementation == "triton" else eps)
    for name, want in exact.items():
        have = got[name].double()
        assert have.shape == want.shape, name
        assert bool(torch.isfinite(have).all()), f"{name} has elements that are not finite"
        for norm in (torch.inf, 2.0):
            error = torch.linalg.vector_norm(have - want, norm)
            size = torch.linalg.vector_norm(sums[name], norm)
            allowed = 2 * (torch.linalg.vector_norm(eager[name].double() - want, norm) + eps * size)
            assert float(error) <= float(allowed), f"{name}, norm {norm}: {float(error):.3e} > {float(allowed):.3e}"


SMALL = [
    Case(t=1, s=1, heads=2, groups=2),
    Case(t=63, s=63, heads=1, d=40, e=24, alpha=(1.25,)),
    Case(t=33, s=33, heads=2, dtype=BF16, alpha=(1.5, 2.0), options={"list_from": 0}),
    Case(t=20, s=45, heads=1, alpha=2.0, options={"query_offset": 25, "list_from": 0}),
    Case(t=30, s=45, heads=1, dtype=F16, options={"causal": False}),
    Case(t=40, s=40, batch=2, heads=1, transposed=True, options={"lengths": [33, 0], "list_from": 0}),
    Case(t=40, s=40, heads=1, alpha=(1.001,), options={"cu_seqlens": [0, 17, 17, 19, 40]}),
    Case(t=1, s=130, heads=2, options={"query_offset": 129}),
]

_G = {"heads": 4, "groups": 2}
LARGE = [
    *(Case(t=n, s=n, d=64, e=64, dtype=dt, scale=x, **_G)
      for n in (1, 63, 127, 129, 1025, 4099) for dt in (BF16, F32) for x in (1.0, 8.0)),
    *(Case(t=257, s=257, d=d, e=d, dtype=dt, options={"list_from": y}, **_G)
      for d in (8, 40, 72, 80, 96, 128, 192, 256) for dt in (BF16, F16, F32) for y in (0, 10**6)),
    *(Case(t=700, s=700, d=64, e=64, dtype=dt, alpha=(1.01, 1.25, 1.5, 2.0), options={"list_from": y}, **_G)
      for dt in (BF16, F32) for y in (0, 10**6)),
    *(Case(t=1500, s=1500, d=64, e=64, dtype=BF16, options={"cu_seqlens": [0, 700, 700, 703, 1500], "list_from": y},
           **_G) for y in (0, 10**6)),
    *(Case(batch=2, t=700, s=700, d=128, e=64, dtype=BF16, transposed=True,
           options={"lengths": [660, 3], "list_from": y}, **_G) for y in (0, 10**6)),
    *(Case(t=t, s=3000, d=64, e=64, dtype=BF16, options={"query_offset": 3000 - t}, **_G) for t in (1, 2, 17, 65)),
    *(Case(t=300, s=5000, d=64, e=32, dtype=BF16, options={"causal": False}, alpha=a, **_G) for a in (1.25, 1.5, 2.0)),
]  # fmt: skip


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_chunked(case: Case, device: torch.device) -> None:
    _assert_within_budget(case, device, "chunked")


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_triton(case: Case, device: torch.device, triton: str, poisoned: None) -> None:
    _assert_within_budget(case, device, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_triton_large(case: Case, device: torch.device, triton: str, poisoned: None) -> None:
    _assert_within_budget(case, device, "triton")


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_gradients_are_finite_differences(implementation: str) -> None:
    """float64, by central differences: q, k, v, theta or temperature, and alpha of two heads."""
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn((1, 2, 5, 3), generator=g, dtype=F64, requires_grad=True) for _ in range(3))
    alpha = torch.tensor([1.3, 1.6], dtype=F64, requires_grad=True)
    theta = torch.tensor([0.4, 0.7], dtype=F64, requires_grad=True)

    def call(q, k, v, alpha, theta):  # type: ignore[no-untyped-def]
        return entmax_attention(q, k, v, alpha=alpha, theta=theta, implementation=implementation)

    assert torch.autograd.gradcheck(call, (q, k, v, alpha, theta))


def _sparsemax(z: list[Fraction]) -> list[Fraction]:
    ordered, total = sorted(z, reverse=True), Fraction(0)
    for count, value in enumerate(ordered, 1):
        if 1 + count * value <= total + value:
            break
        total += value
        tau = (total - 1) / count
    return [max(x - tau, Fraction(0)) for x in z]


def test_rows_are_exact_sparsemax() -> None:
    """alpha = 2 against rational arithmetic, to the last bits."""
    g = torch.Generator().manual_seed(3)
    for n in (1, 2, 7, 40):
        z = torch.randint(-64, 65, (n,), generator=g).double() / 32
        want = torch.tensor([float(x) for x in _sparsemax([Fraction(float(x)) for x in z])], dtype=F64)
        got = entmax_rows(z, torch.ones(1, dtype=F64))
        assert float((got - want).abs().max()) <= 4 * torch.finfo(F64).eps
        assert bool(((got > 0) == (want > 4e-16)).all())


def test_rows_near_softmax() -> None:
    """p(alpha) - softmax = (alpha - 1) dp/dalpha + O((alpha - 1)^2), and |dp/dalpha| <= p l^2 / 2 + p E[l^2] / 2."""
    z = torch.linspace(-6.0, 6.0, 30, dtype=F64).sin() * 4
    soft = z.softmax(-1)
    for step in (2.0**-20, 1e-4):
        got = entmax_rows(z, torch.tensor([step], dtype=F64))
        square = soft.log().square()
        bound = step * soft * (square + (soft * square).sum()) / 2
        assert bool(((got - soft).abs() <= 1.01 * bound + 1e-15).all())
        assert float((got - soft).abs().max()) > 0.1 * step * float(soft.max()) * float((soft * square).sum()) / 2


@pytest.mark.parametrize("implementation", ["reference", "chunked", "triton"])
@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_rows_sum_to_one(implementation: str, alpha: float, scale: float, device: torch.device, triton: str) -> None:
    """With values of 1 an output is the sum of its weights, which nothing renormalizes; peaked scores included."""
    g = torch.Generator().manual_seed(4)
    q, k = (torch.randn((1, 1, 48, 16), generator=g).to(device) for _ in range(2))
    v = torch.ones((1, 1, 48, 1), device=device)
    out = entmax_attention(scale * q, k, v, alpha=alpha, implementation=implementation)
    # A sum of n terms, each rounded; log p of any alpha is off by its own rounding too.
    assert float((out - 1).abs().max()) <= (math.log(48) + 8) * torch.finfo(F32).eps


@pytest.mark.parametrize("implementation", ["reference", "chunked", "triton"])
def test_scores_of_minus_infinity(implementation: str, device: torch.device, triton: str) -> None:
    """A column of -inf has weight 0 in every row; a row whose ten scores are all -inf is 0, and neither is NaN."""
    g = torch.Generator().manual_seed(5)
    # Whole tiles of rows: where there are none, a product would be 0 times infinity.
    q, k, v = (torch.randn((1, 1, n, 4), generator=g) for n in (64, 10, 10))
    q[..., 0] = 1.0 + torch.arange(64) % 2
    k[:, :, 4, 0] = -torch.inf
    q, k, v = (x.to(device) for x in (q, k, v))
    rest = [0, 1, 2, 3, 5, 6, 7, 8, 9]
    got = entmax_attention(q, k, v, causal=False, implementation=implementation)
    want = entmax_attention(q, k[:, :, rest], v[:, :, rest], causal=False, implementation="reference")
    assert float((got - want).abs().max()) <= 16 * torch.finfo(F32).eps
    k[..., 0] = -torch.inf
    assert not entmax_attention(q, k, v, causal=False, implementation=implementation).any()


@pytest.mark.parametrize("implementation", ["reference", "chunked", "triton"])
def test_rows_without_keys(implementation: str, device: torch.device, triton: str) -> None:
    """Rows before the first key and sequences of length zero give exactly 0 and gradients without NaN."""
    g = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn((1, 1, 12, 8), generator=g).to(device).requires_grad_() for _ in range(3))
    out = entmax_attention(q, k, v, query_offset=-5, implementation=implementation)
    assert not out[:, :, :5].any()
    assert bool((out[:, :, 5:] != 0).any(-1).all())
    assert all(torch.isfinite(x).all() for x in torch.autograd.grad(out.sum(), [q, k, v]))
    cu = torch.tensor([0, 5, 5, 12], dtype=torch.int32, device=device)
    q, k, v = (x.detach() for x in (q, k, v))
    packed = entmax_attention(q, k, v, cu_seqlens=cu, implementation=implementation)
    for low, high in ((0, 5), (5, 12)):
        cut = [x[:, :, low:high] for x in (q, k, v)]
        one = entmax_attention(*cut, implementation="reference")
        assert float((packed[:, :, low:high] - one).abs().max()) <= 16 * torch.finfo(F32).eps
    for shape in ((1, 1, 0, 8), (0, 1, 3, 8)):
        nothing = torch.zeros(shape, device=device, requires_grad=True)
        empty = entmax_attention(nothing, nothing, nothing, implementation=implementation)
        assert empty.shape == shape
        assert torch.autograd.grad(empty.sum(), nothing)[0].shape == shape


def test_lists_hold_the_support(device: torch.device, triton: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key with a weight is missing from its block's list, nor a row from that of a key block; few others are in."""
    from theory_kernels.entmax_attention import launch, plan
    from theory_kernels.geometry import Geometry

    t = 150
    g = torch.Generator().manual_seed(7)
    q, k = (torch.randn((1, 1, t, 16), generator=g).to(device) for _ in range(2))
    q = 40 * q
    factor, eps = torch.full((1, 1, 1), 0.25, device=device), torch.full((1,), 0.5, device=device)
    geometry = Geometry(None, 1, t, t, 0, False, True)
    made = plan.make_plan("triton", 1, q, k, t, t, True, 0)
    _, _, rows, items, counts = launch.forward(q, k, k, factor, eps, geometry, 1, True, made)
    z = (q.double() @ k.double().transpose(-1, -2)) * 0.25
    z = z.masked_fill(torch.ones(t, t, dtype=torch.bool, device=device).triu(1), -torch.inf)
    alive = entmax_rows(z, torch.tensor([0.5], dtype=F64, device=device))[0, 0] > 1e-9
    by_rows = items.new_empty((1, 3, plan.room(t, True))), counts.new_empty((1, 3))
    launch._Call(q, k, k, factor, eps, geometry, 1).lists(rows[2], *by_rows, True)
    for (found, lengths), support in (((items, counts), alive), (by_rows, alive.T)):
        for block, length in enumerate(lengths[0].tolist()):
            hit = set(support[64 * block : 64 * block + 64].any(0).nonzero()[:, 0].tolist())
            if length < 0:
                assert 2 * len(hit) > t // 4
                continue
            # Items that only a part of the block sees follow, then none that exists: a whole tile at least.
            end = found[0, block].tolist().index(0x7FFFFFFF)
            listed = found[0, block, :end].tolist()
            assert length <= end <= length + plan.BLOCK
            assert len(set(listed)) == end
            assert hit <= set(listed)
            assert (found[0, block, end : length + plan.PAD] == 0x7FFFFFFF).all()
    assert int((counts >= 0).sum()) >= 2
    assert int(counts.clamp_min(0).sum()) <= 2 * int(sum(alive[64 * b : 64 * b + 64].any(0).sum() for b in range(3)))


def test_lists_are_bounded() -> None:
    """Lists grow with the length, not its square; packed sequences of unknown lengths do without."""
    from theory_kernels.entmax_attention.plan import make_plan

    for t in (16_384, 131_072):
        x = torch.empty((1, 12, t, 64), dtype=BF16, device="meta")
        assert make_plan("triton", 1, x, x, t, t, True, None).items == (12, t // 64, 4096 + 64 + 128)
        assert not make_plan("triton", 32, x, x, t, t, True, None).listed
        assert make_plan("triton", 32, x, x, t // 32, t // 32, True, 0).listed


def test_blocks_that_overflow_walk_everything(
    device: torch.device, triton: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from theory_kernels.entmax_attention import plan

    monkeypatch.setattr(plan, "CAPACITY", 4)
    _assert_within_budget(Case(t=70, s=70, heads=1, scale=40.0, options={"list_from": 0}), device, "triton")


@pytest.mark.parametrize("implementation", ["chunked", "triton"])
def test_two_runs_are_bitwise_equal(implementation: str, device: torch.device, triton: str) -> None:
    case = Case(t=33, s=33, heads=1, dtype=BF16, options={"list_from": 0})
    first, second = (_run(case, device, implementation, BF16) for _ in range(2))
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("d", [72, 80, 96, 192])
def test_four_large_runs_are_bitwise_equal(d: int, device: torch.device, triton: str) -> None:
    case = Case(t=2000, s=2000, d=d, e=d, dtype=BF16, scale=2.0, heads=8, groups=2)
    first, *others = (_run(case, device, "triton", BF16) for _ in range(4))
    for other in others:
        for name, x in first.items():
            assert torch.equal(x, other[name]), name


@pytest.mark.gpu
def test_grid_beyond_65535(device: torch.device, triton: str) -> None:
    _assert_within_budget(Case(batch=70_000, heads=1, t=40, s=40, dtype=BF16), device, "triton")


@pytest.mark.gpu
def test_offsets_beyond_int32(device: torch.device, triton: str) -> None:
    """A fused projection of 131,072 tokens: the last rows lie more than 2^31 elements from the first."""
    t, last = 131_072, 64
    fused = torch.empty((1, t, 3, 96, 64), dtype=BF16, device=device)
    assert fused.stride(1) * t > 2**31
    g = torch.Generator(device).manual_seed(0)
    fused[:, :, :, :2] = torch.randn((1, t, 3, 2, 64), generator=g, device=device).to(BF16)
    q, k, v = (fused[:, :, i, :2].transpose(1, 2) for i in range(3))
    want = entmax_attention(
        q[:, :, -last:].contiguous(), k.contiguous(), v.contiguous(), query_offset=t - last, implementation="chunked"
    )
    for got in (
        entmax_attention(q, k, v)[:, :, -last:],
        torch.cat([entmax_attention(x, k, v, query_offset=t - last + 16 * i)
                   for i, x in enumerate(q[:, :, -last:].split(16, 2))], 2),
    ):  # fmt: skip
        assert float((got.double() - want.double()).norm()) <= 2 * 2**-8 * float(want.double().norm())


@pytest.mark.gpu
def test_a_graph_captures_training(device: torch.device, triton: str) -> None:
    """Forward and backward never wait for the device: a CUDA graph replays them with new inputs."""
    q, k, v = (torch.randn((1, 2, 2000, 64), device=device, dtype=BF16, requires_grad=True) for _ in range(3))

    def call() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(entmax_attention(q, k, v).square().sum(), (q, k, v))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    with torch.no_grad():
        q.mul_(2.0)
    graph.replay()
    for got, want in zip(found, call(), strict=True):
        assert torch.equal(got, want)
