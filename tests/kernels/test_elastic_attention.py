"""Elastic attention: both readings, every pruning, every gradient, against the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from theory_kernels import elastic_attention
from theory_kernels.elastic import reference
from theory_kernels.elastic.chunked import effective
from theory_kernels.elastic.operator import elastic_backward, elastic_forward

from .cases import _arrange

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
BOTH = pytest.mark.parametrize("implementation", ["chunked", "triton"])


@dataclass(frozen=True)
class Case:
    """One call. Lists in ``options`` become integer tensors."""

    batch: int = 1
    heads: int = 2
    groups: int = 2
    t: int = 40
    s: int = 40
    d: int = 16
    e: int = 16
    dtype: torch.dtype = F32
    reading: str = "logit"
    prune: str | None = None
    sharpness: float = 10.0
    layout: str = "plain"
    options: dict = field(default_factory=dict)

    def __str__(self) -> str:
        extra = ",".join(f"{k}={v}" for k, v in self.options.items())
        return (
            f"{self.reading}-{self.prune}-{self.batch}x{self.heads}:{self.groups}-T{self.t}-S{self.s}-D{self.d}-E{self.e}-"
            f"{str(self.dtype).removeprefix('torch.')}-{self.layout}-{extra}"
        )


def inputs(case: Case, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v, tau (B, H, T) and the gradient of the output."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(case.dtype).to(device)

    b, h, kh = case.batch, case.heads, case.groups
    q, k, v = draw(b, h, case.t, case.d), draw(b, kh, case.s, case.d), draw(b, kh, case.s, case.e)
    tau = torch.rand((b, h, case.t), generator=g).to(device)
    return [q, k, v, tau], draw(b, h, case.t, case.e)


def run(case: Case, operands: list[torch.Tensor], grad: torch.Tensor, implementation: str, dtype: torch.dtype) -> dict:
    wide = F64 if dtype == F64 else F32
    q, k, v, tau = operands
    leaves = [_arrange(x.to(dtype), case.layout).detach().requires_grad_() for x in (q, k, v)]
    tau = tau.to(wide).detach().requires_grad_()
    slope = torch.full((case.heads,), case.sharpness, dtype=wide, device=q.device, requires_grad=True)
    options = {
        n: torch.tensor(x, dtype=torch.int32, device=q.device) if isinstance(x, list) else x
        for n, x in case.options.items()
    }
    out = elastic_attention(
        *leaves,
        tau=tau,
        sharpness=slope,
        reading=case.reading,
        prune=case.prune,
        implementation=implementation,
        **options,
    )
    wanted = [*leaves, tau, slope]
    grads = torch.autograd.grad(out, wanted, grad.to(dtype), allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)]
    return {"out": out.detach(), **dict(zip(("q", "k", "v", "tau", "sharpness"), zeros, strict=True))}


def magnitudes(case: Case, operands: list[torch.Tensor], grad: torch.Tensor) -> dict[str, torch.Tensor]:
    """Norms of sums of absolute contributions, of the plain layout that sees at least what the case sees.

    A score is off by eps scale <|q|, |k|>; that moves a weight by |dy/ds| as much, relatively, and the derivatives by
    the sharpness as much again: contributions are weighed by 1 + both.
    """
    q, k, v, tau = (x.double() for x in operands)
    group = case.heads // case.groups
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1).abs()
    scale = case.options.get("scale", case.d**-0.5)
    s, rounding = scale * (q @ k.mT), scale * (q.abs() @ k.abs().mT)
    _, by_s, by_tau, by_slope = effective(
        s, tau[..., None], torch.tensor(case.sharpness), case.reading, case.prune == "exact"
    )
    # Every subset of the keys may be what a row sees: a key's largest weight is 1.
    p = reference.softmax(s, torch.ones_like(s, dtype=torch.bool)) ** 0
    p = p / s.shape[-1] ** 0.5
    grown = 1.0 + rounding * (by_s.abs() + case.sharpness)
    do = grad.double().abs()
    dy = p * grown * (do @ v.mT + (do * v.amax(-2, keepdim=True)).sum(-1, keepdim=True))
    ds = scale * dy * by_s.abs()
    return {
        "out": ((p * grown) @ v).norm(),
        "q": (ds @ k.abs()).norm(),
        "k": (ds.mT @ q.abs()).norm(),
        "v": ((p * grown).mT @ do).norm(),
        "tau": (dy * by_tau.abs()).sum(-1).norm(),
        "sharpness": (dy * by_slope.abs()).sum((0, 2, 3)).norm(),
    }


def assert_within_budget(case: Case, device: torch.device, implementation: str) -> None:
    """Error against float64 <= 2 (error of the eager reference in the low precision + rounding band)."""
    operands, grad = inputs(case, device)
    exact = run(case, operands, grad, "reference", F64)
    eager = run(case, operands, grad, "reference", case.dtype)
    got = run(case, operands, grad, implementation, case.dtype)
    sums = magnitudes(case, operands, grad)
    # float32 on tensor cores leaves out low times low of three tf32 products.
    eps = 2.0**-21 if implementation == "triton" and case.dtype == F32 else torch.finfo(case.dtype).eps
    if case.dtype != F32:
        # Scores are sums in float32 and weights are rounded once: the growth of the band is float32's.
        sums = {name: exact[name].norm() + float(size) * 2.0**-21 / eps for name, size in sums.items()}
    for name, want in exact.items():
        have = got[name].double()
        assert have.shape == want.shape, name
        assert bool(torch.isfinite(have).all()), f"{name} has elements that are not finite"
        error, allowed = (have - want).norm(), 2 * ((eager[name].double() - want).norm() + eps * sums[name])
        assert float(error) <= float(allowed), f"{name}: {float(error):.3e} > {float(allowed):.3e}"


SMALL = [
    Case(t=1, s=1, heads=8, groups=8),
    Case(t=63, s=63, heads=1, groups=1, d=40, e=24, reading="weight"),
    Case(t=33, s=33, heads=2, groups=1, dtype=BF16),
    Case(t=33, s=33, heads=1, groups=1, dtype=BF16, reading="weight"),
    Case(t=20, s=45, heads=1, groups=1, options={"query_offset": 25, "scale": 0.4}),
    Case(t=30, s=45, heads=1, groups=1, dtype=F16, reading="weight", options={"causal": False}),
    Case(t=40, s=40, batch=2, heads=1, groups=1, layout="fused", options={"lengths": [33, 0]}),
    Case(t=50, s=50, heads=1, groups=1, reading="weight", options={"cu_seqlens": [0, 20, 20, 23, 50]}),
    *(Case(t=33, s=33, heads=1, groups=1, prune=p) for p in ("drop", "renormalize", "exact")),
    Case(t=33, s=33, heads=1, groups=1, prune="drop", reading="weight", sharpness=3.0),
]

_G = {"heads": 4, "groups": 2}
LARGE = [
    *(Case(t=n, s=n, d=64, e=64, dtype=dt, reading=r, **_G)
      for n in (1, 63, 127, 129, 1025) for dt in (BF16, F32) for r in ("logit", "weight")),
    *(Case(t=257, s=257, d=d, e=d, dtype=dt, **_G)
      for d in (8, 40, 72, 80, 96, 128, 192, 256) for dt in (BF16, F16, F32)),
    *(Case(t=1500, s=1500, d=64, e=64, dtype=BF16, reading=r, options={"cu_seqlens": [0, 700, 700, 703, 1500]}, **_G)
      for r in ("logit", "weight")),
    *(Case(batch=2, t=300, s=300, d=64, e=32, dtype=BF16, layout=x, options={"lengths": [260, 3]}, **_G)
      for x in ("transposed", "fused", "columns")),
    *(Case(t=300, s=500, d=64, e=64, dtype=F32, prune=p, reading=r, options={"query_offset": 200}, **_G)
      for p in ("drop", "renormalize", "exact") for r in ("logit", "weight")),
    Case(t=300, s=500, d=64, e=64, dtype=BF16, options={"causal": False}, **_G),
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


@pytest.mark.parametrize("implementation", ["reference", "chunked", "triton"])
def test_worked_example(implementation: str, device: torch.device, triton: str) -> None:
    """tau of the predictor and the weights of both readings, to the digits printed for arXiv 2609.20888's example."""
    dtype = F32 if implementation == "triton" else F64
    q = torch.tensor([0.5, -0.2, 0.8], dtype=dtype, device=device)
    scores = torch.tensor([0.9, 0.3, 0.7, 0.1, 0.85, 0.4], dtype=dtype, device=device)
    w, b = torch.tensor([[0.1, 0.3, -0.2]], dtype=dtype), torch.tensor([0.1], dtype=dtype)
    k = (scores[:, None] * (q / (q @ q)))[None, None]
    v = torch.eye(6, dtype=dtype, device=device)[None, None]
    want = {
        "logit": (0.2484, 0.1067, 0.1920, 0.1026, 0.2346, 0.1157),
        "weight": (0.3375, 0.0261, 0.2519, 0.0033, 0.3179, 0.0633),
    }
    for reading, weights in want.items():
        for given in ({"predictor": (w, b)}, {"tau": 0.482507}):
            got = elastic_attention(
                q[None, None, None],
                k,
                v,
                scale=1.0,
                reading=reading,
                causal=False,
                implementation=implementation,
                **given,
            )
            assert got.flatten().tolist() == pytest.approx(weights, abs=5.1e-5)


@pytest.mark.parametrize("reading", ["logit", "weight"])
@pytest.mark.parametrize("prune", [None, "drop", "renormalize", "exact"])
def test_gradcheck(reading: str, prune: str | None) -> None:
    case = Case(t=5, s=5, heads=2, groups=1, d=3, e=2, dtype=F64)
    (q, k, v, _), _ = inputs(case, torch.device("cpu"))
    w, b = torch.randn(2, 3, dtype=F64), torch.randn(2, dtype=F64)
    slope = torch.tensor([4.0, 9.0], dtype=F64)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, w, b, slope)]
    for implementation in ("reference", "chunked"):

        def call(q, k, v, w, b, slope, how=implementation):
            return elastic_attention(
                q, k, v, predictor=(w, b), sharpness=slope, reading=reading, prune=prune, implementation=how
            )

        torch.autograd.gradcheck(call, leaves)


@BOTH
def test_pruned_rows_without_a_survivor_are_zero(implementation: str, device: torch.device, triton: str) -> None:
    case = Case(t=20, s=20)
    (q, k, v, _), grad = inputs(case, device)
    for prune in ("drop", "renormalize", "exact"):
        leaf = q.clone().requires_grad_()
        out = elastic_attention(leaf, k, v, tau=100.0, prune=prune, implementation=implementation)
        assert not out.any()
        (dq,) = torch.autograd.grad(out, leaf, grad)
        assert not dq.any()


# numpy, in Triton's interpreter, says where numbers end.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("implementation", ["reference", "chunked", "triton"])
@pytest.mark.parametrize("prune", [None, "drop", "renormalize", "exact"])
@pytest.mark.parametrize("what", ["key", "infinite key", "tau"])
def test_what_is_no_number_is_not_hidden(
    what: str, prune: str | None, implementation: str, device: torch.device, triton: str
) -> None:
    (q, k, v, tau), grad = inputs(Case(t=6, s=6, heads=1, groups=1), torch.device("cpu"))
    if what == "tau":
        tau[0, 0, 3] = float("nan")
    else:
        q[..., 0] = 1.0
        k[0, 0, 3, 0] = float("nan" if what == "key" else "inf")
    leaves = [x.to(device).requires_grad_() for x in (q, k, v)]
    reading = "weight" if prune in ("drop", "exact") else "logit"
    out = elastic_attention(
        *leaves, tau=tau.to(device), reading=reading, prune=prune, implementation=implementation
    )  # fmt: skip
    bad = [i == 3 if what == "tau" else i >= 3 for i in range(6)]
    assert out.detach().isnan().all(-1).flatten().tolist() == bad
    assert out.detach().isfinite().all(-1).flatten().tolist() == [not x for x in bad]
    dq, dk, dv = torch.autograd.grad(out, leaves, grad.to(device))
    if not (what == "tau" and prune == "exact" and implementation == "reference"):
        # There the reference's scores are not part of the output that is NaN.
        assert bool(dq[0, 0][torch.tensor(bad)].isnan().all())
        assert bool(dk[0, 0, 3].isnan().all())
    assert bool(dv[0, 0, 3].isnan().all())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("implementation", ["reference", "chunked", "triton"])
@pytest.mark.parametrize("prune", [None, "drop", "renormalize", "exact"])
def test_scores_of_minus_infinity(prune: str | None, implementation: str, device: torch.device, triton: str) -> None:
    """A column of -inf has weight 0 in every row, and a row of nothing else is 0."""
    (q, k, v, tau), _ = inputs(Case(t=32, s=6, heads=1, groups=1), torch.device("cpu"))
    q[..., 0] = 1.0 + torch.arange(32) % 2
    k[0, 0, 3, 0] = -torch.inf
    q, k, v, tau = (x.to(device) for x in (q, k, v, tau))
    rest = [0, 1, 2, 4, 5]
    for reading in ("logit", "weight"):
        options = {"tau": tau, "reading": reading, "prune": prune, "causal": False}
        got = elastic_attention(q, k, v, implementation=implementation, **options)
        want = elastic_attention(q, k[:, :, rest], v[:, :, rest], implementation="reference", **options)
        assert float((got - want).abs().max()) <= 1e-5
        masked = torch.full_like(k[..., :1], -torch.inf)
        assert not elastic_attention(q[..., :1], masked, v, implementation=implementation, **options).any()


@BOTH
def test_far_below_the_threshold(implementation: str, device: torch.device, triton: str) -> None:
    """Where all of a row is: the weights go on falling with the score, as log m does."""
    case = Case(t=20, s=20, reading="weight", sharpness=30.0)
    (q, k, v, tau), grad = inputs(case, device)
    operands = [q, k, v, tau + 20.0]
    exact, got = (run(case, operands, grad, *how)["out"] for how in (("reference", F64), (implementation, F32)))
    # A score is rounded to 2^-21 of |q| |k| / sqrt(D), and weighed by 1 + the sharpness.
    reach = float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) / 4
    assert float((got - exact).norm()) <= 2 * 2.0**-21 * (1 + 30) * (reach + 20) * float(exact.norm())


@BOTH
def test_a_low_threshold_is_softmax(implementation: str, device: torch.device, triton: str) -> None:
    """With m = 1 everywhere both readings and every pruning are plain attention."""
    (q, k, v, _), _ = inputs(Case(t=20, s=20), device)
    want = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    for reading in ("logit", "weight"):
        for prune in (None, "drop", "renormalize", "exact"):
            got = elastic_attention(q, k, v, tau=-50.0, reading=reading, prune=prune, implementation=implementation)
            assert float((got - want).abs().max()) <= 1e-5


@pytest.mark.parametrize("implementation", ["chunked", "reference", "triton"])
@pytest.mark.parametrize("shape", [{"t": 0, "s": 0}, {"t": 5, "s": 0}, {"t": 0, "s": 5}, {"batch": 0}], ids=str)
def test_nothing_to_do(shape: dict, implementation: str, device: torch.device, triton: str) -> None:
    case = Case(**shape, options={"causal": False})
    operands, grad = inputs(case, device)
    got = run(case, operands, grad, implementation, F32)
    assert got["out"].shape == grad.shape
    assert not any(x.any() for x in got.values())


def test_two_runs_are_bitwise_equal(device: torch.device, triton: str) -> None:
    case = Case(t=20, s=20, heads=2, groups=1, dtype=BF16)
    operands, grad = inputs(case, device)
    first, second = (run(case, operands, grad, "triton", BF16) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [72, 80, 96, 192])
def test_four_large_runs_are_bitwise_equal(d: int, device: torch.device, triton: str) -> None:
    case = Case(t=2000, s=2000, heads=4, groups=2, d=d, e=d, dtype=BF16)
    operands, grad = inputs(case, device)
    first, *others = (run(case, operands, grad, "triton", BF16) for _ in range(4))
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_opcheck(device: torch.device) -> None:
    (q, k, v, tau), grad = inputs(Case(t=7, s=7, groups=1), device)
    slope = torch.full((2,), 5.0, device=device)
    rest = (1, 7, 7, 0, False, True, 0.25, "logit", "", "chunked")
    leaves = [x.requires_grad_() for x in (q, k, v, tau, slope)]
    torch.library.opcheck(elastic_forward, (*leaves, None, *rest))
    plain = [x.detach() for x in leaves]
    torch.library.opcheck(elastic_backward, (grad, *plain, None, grad, tau.detach(), *rest))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({}, ValueError, "give tau or predictor, one of the two, got neither"),
        ({"tau": 0.5, "predictor": (torch.ones(2, 16), torch.ones(2))}, ValueError, "got both"),
        ({"tau": "0.5"}, TypeError, "tau must be a number"),
        ({"tau": torch.ones(3)}, ValueError, "tau must broadcast"),
        ({"tau": torch.ones(2, dtype=torch.int64)}, TypeError, "floating-point"),
        ({"predictor": (torch.ones(2, 3), torch.ones(2))}, ValueError, "predictor w must have shape"),
        ({"tau": 0.5, "sharpness": 0.0}, ValueError, "sharpness must be finite and > 0, got 0.0"),
        ({"tau": 0.5, "sharpness": torch.ones(3)}, ValueError, "sharpness"),
        ({"tau": 0.5, "reading": "mask"}, ValueError, "reading must be one of"),
        ({"tau": 0.5, "prune": "all"}, ValueError, "prune must be"),
        ({"tau": 0.5, "scale": -1.0}, ValueError, "scale must be"),
        ({"tau": 0.5, "implementation": "fast"}, ValueError, "implementation must be one of"),
    ],
    ids=str,
)
def test_bad_input(arguments: dict, error: type[Exception], match: str) -> None:
    (q, k, v, _), _ = inputs(Case(t=4, s=4), torch.device("cpu"))
    with pytest.raises(error, match=match):
        elastic_attention(q, k, v, **arguments)
