"""Elastic decoding: every implementation against float64, and no key that reaches its threshold ever dropped."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from theory_kernels import (
    elastic_decode,
    make_block_bounds,
    threshold_attention,
    update_block_bounds,
)
from theory_kernels.attention.reference import unit_rows
from theory_kernels.decode.bounds import KINDS, upper

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@dataclass(frozen=True)
class Case:
    """One call; ``page`` 0 is a contiguous cache."""

    batch: int = 1
    heads: int = 2
    groups: int = 1
    t: int = 1
    s: int = 70
    d: int = 16
    e: int = 16
    dtype: torch.dtype = F32
    weights: str = "softmax"
    kind: str | None = "minmax"
    block: int = 16
    page: int = 0
    lengths: tuple[int, ...] | None = None
    layout: str = "plain"
    options: dict = field(default_factory=dict)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        extra = "".join(f"-{k}{v}" for k, v in self.options.items())
        return (
            f"{self.weights}-{self.kind}{self.block}-{self.batch}x{self.heads}:{self.groups}-T{self.t}-S{self.s}-D{self.d}-"
            f"E{self.e}-{dtype}-page{self.page}-{self.layout}{extra}"
        )


# Few and tiny: the interpreter takes a second for each.
SMALL = [
    Case(),
    Case(batch=2, heads=3, groups=3, t=2, s=33, d=24, e=40, dtype=BF16, kind="ball", page=16, lengths=(33, 1)),
    Case(heads=4, t=5, s=40, dtype=F16, kind="cap", block=32, page=10, weights="tra", layout="transposed"),
    Case(t=2, s=34, dtype=BF16, weights="tda", kind="int8", options={"rms_eps": 1e-2}),
    Case(batch=2, s=17, kind=None, lengths=(0, 9), weights="tra", options={"power": 2.5}),
]
LARGE = [
    *(Case(batch=2, heads=4, groups=2, t=t, s=n, d=64, e=64, dtype=dt, kind=kind, block=64)
      for n, t in ((1, 1), (63, 3), (129, 1), (1025, 16)) for dt in (BF16, F32) for kind in ("minmax", "cap")),
    *(Case(batch=2, heads=4, groups=g, t=t, s=2000, d=d, e=e, dtype=dt, kind="ball", block=64, page=p,
           lengths=(1999, 70))
      for d, e in ((40, 24), (80, 128), (192, 256)) for dt in (BF16, F16, F32) for g, t, p in ((4, 1, 64), (1, 9, 16))),
    *(Case(batch=2, heads=16, groups=2, t=t, s=3000, d=128, e=128, dtype=dt, weights=w, kind=kind, block=128)
      for dt in (BF16, F16, F32) for w in ("tra", "tda") for kind, t in (("cap", 1), ("minmax", 4))),
    *(Case(batch=130, heads=16, groups=16, s=300, d=64, e=64, dtype=BF16, kind=kind, block=b, layout="transposed")
      for kind, b in (("minmax", 64), ("norm", 32), ("norm", 256))),
    *(Case(batch=2, heads=4, groups=2, t=t, s=2000, d=d, e=d, dtype=dt, weights=w, kind="int8", page=p)
      for t, d, w, p in ((1, 128, "softmax", 0), (5, 40, "tda", 0), (16, 64, "tra", 48), (1, 256, "softmax", 256))
      for dt in (BF16, F16, F32)),
]  # fmt: skip


def _pages(x: torch.Tensor, page: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A contiguous cache cut into shuffled pages, with one page of NaN that no sequence uses."""
    b, g, s, d = x.shape
    count = -(-s // page)
    whole = x.new_full((b, g, count * page, d), float("nan"))
    whole[:, :, :s] = x
    order = torch.randperm(b * count + 1, generator=generator)
    table = order[: b * count].view(b, count).to(torch.int32)
    pages = x.new_full((b * count + 1, g, page, d), float("nan"))
    pages[table.long()] = whole.unflatten(2, (count, page)).transpose(1, 2)
    return pages, table


@dataclass
class Inputs:
    """Operands of a case in its dtype, and thresholds that no score comes near."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: torch.Tensor
    tau: torch.Tensor
    options: dict

    @classmethod
    def of(cls, case: Case, device: torch.device) -> Inputs:
        g = torch.Generator().manual_seed(1)
        views = 2 if case.weights == "tda" else 1
        q = [torch.randn((case.batch, case.heads, case.t, case.d), generator=g) for _ in range(views)]
        k = [torch.randn((case.batch, case.groups, case.s, case.d), generator=g) for _ in range(views)]
        v = torch.randn((case.batch, case.groups, case.s, case.e), generator=g).to(case.dtype)
        if case.weights != "softmax":
            q, k = [unit_rows(x) for x in q], [unit_rows(x) for x in k]
        q, k = [x.to(case.dtype) for x in q], [x.to(case.dtype) for x in k]
        options: dict = dict(case.options)
        lengths = torch.full((case.batch,), case.s, dtype=torch.int32)
        if case.lengths is not None:
            lengths = torch.tensor(case.lengths, dtype=torch.int32)
            options["lengths"] = lengths.to(device)
            for x in (*k, v):
                x[torch.arange(case.s) >= lengths[:, None, None].expand(-1, case.groups, 1)] = float("nan")
        tau = _thresholds(case, q[0], k[0], lengths)
        if case.page:
            paged = [_pages(x, case.page, torch.Generator().manual_seed(2)) for x in (*k, v)]
            options["page_table"] = paged[0][1].to(device)
            *k, v = (x for x, _ in paged)
        if case.layout == "transposed":
            *k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (*k, v))
        if views == 2:
            options["lam"] = 0.4
        return cls([x.to(device) for x in q], [x.to(device) for x in k], v.to(device), tau.to(device), options)

    def slopes(self, case: Case) -> torch.Tensor:
        """Sum over keys of ``|d output / d score|``, float64: how far an error of all scores moves the output."""
        power = self.options.get("power", 2.0)
        plain = {k: v for k, v in self.options.items() if k not in ("rms_eps", "lam")}
        changed = plain | {"power": power - 1.0} | ({"lam": -0.4} if len(self.q) == 2 else {})
        steep = Inputs(self.q, self.k, self.v.abs(), self.tau, changed).run(case, "reference", F64)[0] * power
        if "rms_eps" in self.options:
            raw = Inputs(self.q, self.k, self.v, self.tau, self.options | {"rms_eps": None}).run(case, "reference", F64)
            # The norm's own derivative at most doubles it.
            steep = 2 * steep * (raw[0].square().mean(-1, keepdim=True) + self.options["rms_eps"]).rsqrt()
        return steep

    def run(self, case: Case, implementation: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and survivors with operands of ``dtype``."""
        q, k, v = [x.to(dtype) for x in self.q], [x.to(dtype) for x in self.k], self.v.to(dtype)
        options = dict(self.options)
        table = options.get("page_table")
        length = options.get("lengths", case.s)
        making = "triton" if implementation == "triton" else "chunked"
        bounds = [
            make_block_bounds(x, case.kind, block=case.block, lengths=length, page_table=table, implementation=making)
            if case.kind
            else None
            for x in k
        ]
        if len(q) == 2:
            options |= {"q2": q[1], "k2_cache": k[1], "block_bounds2": bounds[1]}
        if case.page and case.lengths is None:
            options["lengths"] = torch.full((case.batch,), case.s, dtype=torch.int32, device=v.device)
        out, found = elastic_decode(
            q[0], k[0], v, bounds[0], self.tau, weights=case.weights, return_statistics=True,
            implementation=implementation, **options,
        )  # fmt: skip
        return out, found.survivors


def _thresholds(case: Case, q: torch.Tensor, k: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """In the widest gap between neighboring scores of a row, among the upper half of them."""
    q, k = q.double(), k.double().nan_to_num().repeat_interleave(case.heads // case.groups, 1)
    score = q @ k.transpose(-1, -2) * (case.d**-0.5 if case.weights == "softmax" else 1.0)
    last = lengths[:, None] - case.t + torch.arange(case.t)
    score = torch.where(torch.arange(case.s) <= last[:, None, :, None], score, -torch.inf)
    top = score.sort(-1, descending=True).values[..., : case.s // 2 + 1]
    top = top.clamp_min(-1e3)
    if top.shape[-1] < 2:
        return top[..., 0].float() - 0.5
    gap = top[..., :-1] - top[..., 1:]
    at = torch.where(top[..., 1:] > -1e3, gap, 0.0).argmax(-1, keepdim=True)
    return ((top.gather(-1, at) + top.gather(-1, at + 1)) / 2)[..., 0].float()


def assert_within_budget(case: Case, device: torch.device, implementation: str) -> None:
    """Error against float64 <= 2 (error of the eager reference in the low precision + rounding band)."""
    given_ = Inputs.of(case, device)
    (exact, survivors), (eager, _) = (given_.run(case, "reference", x) for x in (F64, case.dtype))
    got, found = given_.run(case, implementation, case.dtype)
    assert torch.equal(found, survivors)
    assert bool(torch.isfinite(got).all())
    eps = torch.finfo(case.dtype).eps
    if implementation == "triton" and case.dtype == F32:
        # Three tf32 products leave out low times low; a real power is exp2(p log2 x) with both to about 2^-22.
        power = case.options.get("power", 2.0)
        eps = 2.0**-21 * (1.0 if power == 2.0 else 1.0 + power)
    # A power of the excess is as steep as the excess is small: a score's own rounding counts too.
    steep = given_.slopes(case) if case.weights != "softmax" else torch.zeros_like(exact)
    for norm in (torch.inf, 2.0):
        error, low = (torch.linalg.vector_norm(x.double() - exact, norm) for x in (got, eager))
        size, slope = (torch.linalg.vector_norm(x, norm) for x in (exact, steep))
        allowed = 2 * (low + eps * size + 2.0**-21 * slope)
        assert float(error) <= float(allowed), f"norm {norm}: {float(error):.3e} > {float(allowed):.3e}"


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


def _exact_maximum_survives(q: torch.Tensor, k: torch.Tensor, kind: str, block: int, implementation: str) -> None:
    """With the threshold at a row's largest computed score, that key must be found, by each of the bounds.

    One row a key head, so that no other row can ask for the block.
    """
    v = torch.ones_like(k)
    _, free = elastic_decode(q, k, v, None, -torch.inf, return_statistics=True, implementation=implementation)
    bounds = make_block_bounds(k, kind, block=block, implementation=implementation)
    out, found = elastic_decode(q, k, v, bounds, free.maximum, return_statistics=True, implementation=implementation)
    _, plain = elastic_decode(q, k, v, None, free.maximum, return_statistics=True, implementation=implementation)
    assert torch.equal(found.survivors, plain.survivors)
    assert int(found.survivors.min()) >= 1
    # Each row averages ones; a GPU's quotient of equal numbers may miss 1 by a unit or two.
    assert float((out.double() - 1).abs().max()) <= 4 * torch.finfo(out.dtype).eps


def _adversary(rng: np.random.Generator, heads: int, s: int, d: int, dtype: torch.dtype) -> tuple:
    """Queries and keys made to sit on the bounds: parallel, equal, alone in their direction, huge and tiny."""
    q = torch.from_numpy(rng.standard_normal((1, heads, 1, d)))
    k = torch.from_numpy(rng.standard_normal((1, heads, s, d)))
    mode = torch.from_numpy(rng.integers(0, 5, (1, heads, s, 1)))
    along = q * torch.from_numpy(rng.choice([1.0, 0.999, 1.001, -1.0], (1, heads, s, 1)))
    signs = torch.sign(q) * torch.from_numpy(rng.choice([0.5, 1.0, 2.0], (1, heads, s, 1)))
    k = torch.where(mode == 0, k, torch.where(mode == 1, along, torch.where(mode == 2, signs, k * 1e-3)))
    k = torch.where(mode == 4, along * q.sign().abs() + k * 1e-3, k)
    size = torch.from_numpy(rng.choice([2.0**-40, 2.0**-8, 1.0, 2.0**8, 2.0**30], (1, heads, 1, 1)))
    if dtype == F16:
        size = size.clamp(2.0**-8, 2.0**3)
    return (q * size).to(dtype), (k * size).to(dtype)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(KINDS), dtype=st.sampled_from([BF16, F16, F32]),
    d=st.sampled_from([1, 3, 16, 64]), block=st.sampled_from([16, 64]),
)  # fmt: skip
def test_no_survivor_is_dropped(seed: int, kind: str, dtype: torch.dtype, d: int, block: int) -> None:
    """Searched adversarially, against scores summed in several orders, and with the rounding of any order added."""
    q, k = _adversary(np.random.default_rng(seed), 4, 70, d, dtype)
    _exact_maximum_survives(q, k, kind, block, "chunked")
    bounds = make_block_bounds(k, kind, block=block, implementation="chunked")
    bound = upper(bounds, q, slice(None))[:, :, 0].double()
    product = q.double() * k.double()
    worst = product.sum(-1) + d * 2.0**-23 * product.abs().sum(-1)
    single = q.float() * k.float()
    computed = torch.stack([single.sum(-1).double(), single.cumsum(-1)[..., -1].double(), worst]).amax(0)
    computed = torch.nn.functional.pad(computed, (0, -70 % block), value=-torch.inf).unflatten(-1, (-1, block)).amax(-1)
    assert bool((bound >= computed).all())


@pytest.mark.parametrize("kind", KINDS)
def test_no_survivor_is_dropped_by_the_kernel(kind: str, device: torch.device, triton: str) -> None:
    heads = 128 if device.type == "cuda" else 1
    for dtype in (BF16, F16, F32) if device.type == "cuda" else (BF16,):
        for d in (128, 64, 40) if device.type == "cuda" else (16,):
            q, k = _adversary(np.random.default_rng(d), heads, 300 if device.type == "cuda" else 20, d, dtype)
            _exact_maximum_survives(q.to(device), k.to(device), kind, 16, "triton")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", ["chunked", pytest.param("triton", marks=pytest.mark.gpu)])
def test_appending_gives_the_same_bounds(kind: str, implementation: str, device: torch.device) -> None:
    g = torch.Generator().manual_seed(0)
    k = torch.randn((2, 2, 150, 16), generator=g).to(BF16).to(device)
    whole = make_block_bounds(k, kind, block=16, implementation=implementation)
    grown = make_block_bounds(k, kind, block=16, lengths=0)
    at = 0
    for count in (1, 15, 1, 40, 0, 3, 70, 20):
        start = torch.tensor([at, at], dtype=torch.int32, device=device) if count % 2 else at
        update_block_bounds(grown, k, start, count, implementation=implementation)
        at += count
    assert at == 150
    for a, b in zip(
        (whole.norm, whole.vectors, whole.scalars), (grown.norm, grown.vectors, grown.scalars), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_triton_bounds_hold(kind: str, device: torch.device, triton: str, poisoned: None) -> None:
    """Radius, norm and least of the kernel, measured anew in float64 from what it stored."""
    g = torch.Generator().manual_seed(0)
    k = (torch.randn((1, 2, 37, 24), generator=g) + 0.5).to(BF16).to(device)
    bounds = make_block_bounds(k, kind, block=16, implementation="triton")
    wide = torch.nn.functional.pad(k.double(), (0, 0, 0, 11)).unflatten(2, (3, 16))
    there = (torch.arange(48, device=device) < 37).view(3, 16)
    assert bool((bounds.norm.double()[..., None] >= wide.norm(dim=-1)).all())
    if kind == "minmax":
        assert torch.equal(bounds.vectors[..., 0, :].double(), torch.where(there[..., None], wide, torch.inf).amin(3))
        assert torch.equal(bounds.vectors[..., 1, :].double(), torch.where(there[..., None], wide, -torch.inf).amax(3))
    if kind == "ball":
        apart = (wide - bounds.vectors.double()).norm(dim=-1)
        assert bool((torch.where(there, apart, 0.0) <= bounds.scalars.double()).all())
    if kind == "cap":
        axis = bounds.vectors.double()[..., 0, :]
        along = (wide * axis[..., None, :]).sum(-1) / axis.norm(dim=-1)[..., None]
        assert bool((torch.where(there, along, torch.inf) >= bounds.scalars.double()).all())
    if kind == "int8":
        step, missed = bounds.scalars.double().unbind(-1)
        apart = (wide - bounds.vectors.double() * step[..., None, None]).norm(dim=-1)
        assert bool((torch.where(there, apart, 0.0) <= missed[..., None]).all())


def test_bounds_screen_what_they_can() -> None:
    """Blocks of keys around far centers: each kind reads those near the query only, in its order of tightness."""
    g = torch.Generator().manual_seed(0)
    center = unit_rows(torch.randn((1, 1, 32, 1, 64), generator=g))
    k = unit_rows(center + 0.05 * torch.randn((1, 1, 32, 64, 64), generator=g) / 8).flatten(2, 3)
    q = unit_rows(center[:, :, 5])
    read = {}
    for kind in KINDS:
        bounds = make_block_bounds(k, kind, block=64)
        _, found = elastic_decode(q, k, k, bounds, 0.9, scale=1.0, return_statistics=True)
        read[kind] = int(found.blocks_read)
        assert int(found.survivors) == 64
    assert read["norm"] == 32
    assert read["ball"] == read["cap"] == read["minmax"] == read["int8"] == 1


@pytest.mark.parametrize("weights", ["tra", "tda"])
@pytest.mark.parametrize("t", [1, 3])
def test_equals_threshold_attention(weights: str, t: int, device: torch.device) -> None:
    g = torch.Generator().manual_seed(0)
    q, q2 = (torch.randn((2, 4, t, 16), generator=g, dtype=F64).to(device) for _ in range(2))
    k, k2, v = (torch.randn((2, 2, 90, 16), generator=g, dtype=F64).to(device) for _ in range(3))
    k, k2 = unit_rows(k), unit_rows(k2)
    lengths = torch.tensor([90, 41], dtype=torch.int32, device=device)
    beta = torch.tensor([0.5, 0.8, 1.0, 0.3], dtype=F64, device=device)
    bounds = [make_block_bounds(x, "cap", block=16) for x in (k, k2)]
    options: dict = {"beta": beta, "lengths": lengths, "weights": weights, "rms_eps": 1e-2}
    call = {"beta": beta, "lengths": lengths, "query_offset": lengths - t, "rms_eps": 1e-2}
    if weights == "tra":
        got = elastic_decode(q, k, v, bounds[0], **options)
        want = threshold_attention(q, k, v, **call)
    else:
        from theory_kernels import differential_threshold_attention

        second = {"q2": q2, "k2_cache": k2, "block_bounds2": bounds[1], "lam": 0.4}
        got = elastic_decode(q, k, v, bounds[0], **options, **second)
        want = differential_threshold_attention(q, k, q2, k2, v, lam=0.4, **call)
    assert float((got - want).abs().max()) <= 90 * 16 * torch.finfo(F64).eps * float(want.abs().max())


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["tra", "tda"])
def test_serves_trained_thresholds(weights: str, device: torch.device, triton: str) -> None:
    """At one token the kernels of prefill and decode agree within the budget of both."""
    g = torch.Generator(device).manual_seed(0)
    q, q2 = (torch.randn((2, 8, 1, 128), generator=g, device=device).to(BF16) for _ in range(2))
    k, k2, v = (torch.randn((2, 2, 5000, 128), generator=g, device=device) for _ in range(3))
    k, k2, v = unit_rows(k).to(BF16), unit_rows(k2).to(BF16), v.to(BF16)
    bounds = [make_block_bounds(x, "cap") for x in (k, k2)]
    one = {"beta": 0.8, "query_offset": 4999}
    if weights == "tra":
        got = elastic_decode(q, k, v, bounds[0], beta=0.8, weights="tra")
        want, exact = (
            threshold_attention(q, k, v, **one),
            threshold_attention(q.double(), k.double(), v.double(), **one),
        )
    else:
        from theory_kernels import differential_threshold_attention as both

        second = {"q2": q2, "k2_cache": k2, "block_bounds2": bounds[1], "lam": 0.4}
        got = elastic_decode(q, k, v, bounds[0], beta=0.8, weights="tda", **second)
        want = both(q, k, q2, k2, v, lam=0.4, **one)
        exact = both(*(x.double() for x in (q, k, q2, k2, v)), lam=0.4, **one)
    size = exact.norm()
    assert float((got.double() - exact).norm()) <= 2 * float((want.double() - exact).norm() + 2**-7 * size)


@pytest.mark.parametrize("implementation", ["chunked", "triton"])
def test_two_runs_are_bitwise_equal(implementation: str, device: torch.device, triton: str) -> None:
    case = Case(heads=1, s=20, dtype=BF16)
    inputs = Inputs.of(case, device)
    first, second = (inputs.run(case, implementation, BF16)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [72, 80, 96, 192])
def test_four_large_runs_are_bitwise_equal(d: int, device: torch.device, triton: str) -> None:
    case = Case(batch=2, heads=8, groups=4, s=9000, d=d, e=d, dtype=BF16, block=64)
    inputs = Inputs.of(case, device)
    first, *others = (inputs.run(case, "triton", BF16)[0] for _ in range(4))
    assert all(torch.equal(first, x) for x in others)


@pytest.mark.gpu
def test_a_captured_graph_follows_a_growing_sequence(device: torch.device, triton: str) -> None:
    g = torch.Generator(device).manual_seed(0)
    q = torch.randn((2, 4, 1, 64), generator=g, device=device).to(BF16)
    k, v = (torch.randn((2, 2, 1000, 64), generator=g, device=device).to(BF16) for _ in range(2))
    lengths = torch.tensor([500, 63], dtype=torch.int32, device=device)
    tau = torch.full((2, 4, 1), 1.0, device=device)
    bounds = make_block_bounds(k, "minmax", lengths=lengths)

    def step() -> torch.Tensor:
        update_block_bounds(bounds, k, lengths - 1, 1)
        return elastic_decode(q, k, v, bounds, tau, lengths=lengths)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(70):
        lengths += 1
        graph.replay()
    assert torch.equal(out, elastic_decode(q, k, v, make_block_bounds(k, "minmax"), tau, lengths=lengths))


# numpy, in Triton's interpreter, says where numbers end.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("implementation", ["reference", "chunked", "triton"])
@pytest.mark.parametrize(
    ("what", "kind", "weights"),
    [("k", "minmax", "softmax"), ("k", "int8", "tra"), ("q", "ball", "softmax"), ("tau", "cap", "softmax"),
     ("v", "norm", "softmax"), ("inf", "norm", "softmax")],
)  # fmt: skip
def test_what_is_no_number_is_not_hidden(
    what: str, kind: str, weights: str, implementation: str, device: torch.device, triton: str
) -> None:
    """Head 0 reads it in a block that its bounds could have left out; its row is NaN, and that of head 1 is not."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((1, 2, n, 16), generator=g) for n in (1, 40, 40))
    k[:, :, 16:32] *= 0.01
    tau = torch.full((1, 2, 1), 0.2)
    if what in ("k", "inf"):
        q[..., 3] = 1.0
        k[0, 0, 20, 3] = float("nan" if what == "k" else "inf")
    elif what == "q":
        q[0, 0, 0, 3] = float("nan")
    elif what == "tau":
        tau[0, 0] = float("nan")
    else:
        v[0, 0, :, 3] = float("nan")
    q, k, v, tau = (x.to(device) for x in (q, k, v, tau))
    making = "triton" if implementation == "triton" else "chunked"
    bounds = make_block_bounds(k, kind, block=16, implementation=making)
    power = 2.5 if weights == "tra" else 2.0
    out, found = elastic_decode(
        q, k, v, bounds, tau, weights=weights, power=power, return_statistics=True, implementation=implementation
    )  # fmt: skip
    assert bool(out[0, 1].isfinite().all())
    if what == "v":
        assert out[0, 0, 0].isnan().tolist() == [i == 3 for i in range(16)]
        return
    assert bool(out[0, 0].isnan().all())
    if found.logsumexp is not None and what != "inf":
        assert found.logsumexp[0].isnan().flatten().tolist() == [True, False]
        assert found.maximum[0].isnan().flatten().tolist() == [True, False]
