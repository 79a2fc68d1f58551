"""Marks of single keys and rows, the paths that use them, and the kernels on every path."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from .cases import Case, assert_within_budget, inputs, run

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every screened head lists single keys."""
    from theory_kernels.attention import plan

    for name in ("LIST_FROM", "LIST_FROM_KEYS", "LIST_LENGTH"):
        monkeypatch.setattr(plan, name, 0)
    monkeypatch.setattr(plan, "LIST_MOST", 2000)
    monkeypatch.setattr(plan, "LIST_SHARE", float("inf"))


_S = {"screen_from": 0}
SMALL = [
    Case(t=100, s=100, heads=2, groups=1, dtype=BF16, beta=0.6, options=_S),
    Case(t=66, s=70, heads=1, groups=1, d=8, e=24, views=2, options={**_S, "query_offset": 4, "rms_eps": 1e-2}),
    Case(t=90, s=90, heads=1, groups=1, beta=-0.2, options={**_S, "cu_seqlens": [0, 20, 20, 90]}),
]

_G = {"heads": 4, "groups": 2}
LARGE = [
    *(Case(t=n, s=n, d=64, e=64, dtype=BF16, beta=b, options=_S, **_G) for n in (65, 127, 1025, 4099, 8300)
      for b in (0.3, 0.9)),
    *(Case(t=257, s=257, d=d, e=d, dtype=BF16, options=_S, **_G) for d in (40, 128, 256)),
    Case(t=257, s=257, d=64, e=16, dtype=F16, views=2, options=_S, **_G),
    Case(t=257, s=257, d=64, e=128, dtype=F32, views=2, options=_S, **_G),
    *(Case(t=4500, s=4500, d=64, e=64, dtype=BF16, views=n, beta=0.5, options={**_S, "causal": False}, **_G)
      for n in (1, 2)),
    *(Case(t=300, s=5000, d=64, e=64, dtype=BF16, views=n, options={**_S, "query_offset": 4700}, **_G)
      for n in (1, 2)),
    *(Case(batch=2, t=700, s=700, d=128, e=128, dtype=BF16, layout=x, options={**_S, "lengths": [660, 3]}, **_G)
      for x in ("plain", "fused")),
    *(Case(t=9000, s=9000, d=64, e=64, dtype=BF16, views=n, beta=b,
           options={**_S, "cu_seqlens": [0, 700, 700, 4900, 9000]}, **_G) for n in (1, 2) for b in (-0.1, 0.6)),
    *(Case(t=300, s=500, d=64, e=64, dtype=dt, options={**_S, "query_offset": 200, "power": p}, **_G)
      for dt, p in ((BF16, 1.5), (F32, 3.0))),
]  # fmt: skip


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_lists(case: Case, device: torch.device, triton: str, lists: None, poisoned: None) -> None:
    assert_within_budget(case, device, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_lists_large(case: Case, device: torch.device, triton: str, lists: None, poisoned: None) -> None:
    assert_within_budget(case, device, "triton")


def _listed(q: torch.Tensor, k: torch.Tensor, tau: torch.Tensor, rows: bool, causal: bool) -> torch.Tensor:
    """What the lists hold as a bool (heads, blocks of 64, items); every item at most once."""
    from theory_kernels.attention import lists, plan
    from theory_kernels.geometry import build_geometry
    from theory_kernels.screen import prepare, quantize

    geometry = build_geometry(
        q, k, causal=causal, query_offset=0, lengths=None, query_lengths=None, cu_seqlens=None, cu_seqlens_k=None,
        max_seqlen=None,
    )  # fmt: skip
    heads, count, blocks = q.shape[1], q.shape[2] if rows else k.shape[2], -(-(k if rows else q).shape[2] // 64)
    paths = torch.full((heads + k.shape[1],), plan.LISTS, dtype=torch.int32, device=q.device)
    x = prepare(q, k, False, True, tau, None, torch.empty_like(tau))
    words = plan.mark_words(count)
    bitmap = torch.full((heads, blocks, -(-count // 2048)), -1, dtype=torch.int32, device=q.device)
    found = lists.make_lists((heads, blocks, words), blocks * (count + 256), q.device)
    lists.fill_lists(found, [quantize(x, None)], geometry, words, bitmap, paths, rows)
    assert (paths == plan.LISTS).all()
    out = torch.zeros((heads, blocks, count + 256), dtype=torch.int32)
    spans, items = found.spans.tolist(), found.items.to("cpu", torch.int64) & 0xFFFF
    for h in range(heads):
        for b in range(blocks):
            first = spans[1][h][b]
            out[h, b].index_add_(0, items[h, first : first + spans[0][h][b]], torch.ones(spans[0][h][b]).int())
    assert out.max() <= 1
    if not rows:
        tiles = (bitmap[..., None] >> torch.arange(32, device=q.device)).flatten(2) & 1
        wanted = F.pad(out, (0, -out.shape[-1] % 64)).unflatten(-1, (-1, 64)).any(-1)
        seen = min(tiles.shape[-1], wanted.shape[-1])
        assert torch.equal(tiles[..., :seen].bool().cpu() & wanted[..., :seen], wanted[..., :seen])
        assert not (tiles[..., :seen].bool().cpu() & ~wanted[..., :seen])[:, -1].any()
    # Items past the end are false alarms of a last tile; the exact kernels mask them.
    return out[..., :count].bool().to(q.device)


def _by_block(alive: torch.Tensor) -> torch.Tensor:
    """Any survivor of an item with a block of 64: (heads, blocks, items)."""
    return F.pad(alive, (0, 0, 0, -alive.shape[1] % 64)).unflatten(1, (-1, 64)).any(2)


@pytest.mark.parametrize(("rows", "causal"), [(False, True), (True, True), (True, False)])
def test_no_survivor_is_missed(rows: bool, causal: bool, device: torch.device, triton: str) -> None:
    """Random and adversarial scores: rows of unequal size, an outlier that makes int8 coarse, thresholds at a score."""
    t = 4300 if device.type == "cuda" else 330
    for seed in range(4 if device.type == "cuda" else 1):
        g = torch.Generator().manual_seed(seed)
        q, k = (torch.randn((1, h, t, 16), generator=g) for h in (2, 1))
        q *= 2.0 ** torch.randint(-3, 3, (1, 2, t, 1), generator=g)
        k[:, :, 5, 0] = 10.0
        q, k = q.bfloat16().to(device), k.bfloat16().to(device)
        score = q.double() @ k.double().transpose(-1, -2)
        tau = (score.amax(-1) * 0.9 + 0.01).float()
        tau[..., ::7] = score[..., ::7, :].topk(3).values[..., 2].float() - 1e-5
        alive = score > tau[..., None]
        past = torch.ones(t, t, dtype=torch.bool, device=device).tril()
        found = _listed(q, k, tau, rows, causal)
        wanted, above = (_by_block(x[0].transpose(1, 2) if rows else x[0]) for x in (alive & past, alive))
        assert wanted.any()
        assert not ((wanted if causal else above) & ~found).any()
        # The margin costs false alarms (the outlier makes int8 coarse), but the lists are far from full.
        assert found.sum() < 0.6 * found.numel(), int(found.sum())


def _with_density(kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One head of 128 positions that should take the path ``kind``: which keys lie along the queries' common axis."""
    t = 128
    g = torch.Generator().manual_seed(0)
    axis = torch.eye(32)
    # 60 degrees from the axis 0 that they share, so that half a gradient survives the projection of the norm.
    q = 0.5 * axis[0] + 0.75**0.5 * axis[torch.randint(2, 32, (t,), generator=g)]
    hot = {"dense": 1, "lists": 32, "tiles": t + 1}[kind]
    k = axis[torch.where((torch.arange(t) + 1) % hot == 0, 0, 1)]
    return q[None, None], k[None, None], torch.randn((1, 1, t, 16), generator=g)


def test_paths_follow_density(device: torch.device, triton: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three heads, each of another kind: every one takes its path, and the results agree with the reference."""
    from theory_kernels import threshold_attention
    from theory_kernels.attention import plan
    from theory_kernels.attention.operator import threshold_forward

    monkeypatch.setattr(plan, "LIST_LENGTH", 0)
    kinds = ["dense", "tiles", "lists"]
    operands = [torch.cat(x, 1).to(device) for x in zip(*(_with_density(x) for x in kinds), strict=True)]
    beta = torch.full((3,), 0.4, device=device)
    runs = []
    for name, dtype in (("reference", torch.float64), ("reference", F32), ("triton", F32)):
        leaves = [x.to(dtype).requires_grad_() for x in operands]
        if name == "triton":
            q, k, v = leaves
            out, *_, items, _, paths = threshold_forward(
                q, k, None, None, v, beta, None, None, 1, 128, 128, 0, False, True, 0.01, 2.0, True, None, name, 0
            )
            assert items.numel() > 0
            # A query head lists keys where few columns are hit; a key head lists rows where few are, here never.
            assert paths.tolist() == [plan.DENSE, plan.TILES, plan.LISTS, plan.DENSE, plan.TILES, plan.DENSE]
        else:
            out = threshold_attention(*leaves, beta=beta, kappa=0.01, implementation=name)
        runs.append([x.detach().double() for x in (out, *torch.autograd.grad(out.sum(), leaves))])
    for want, eager, got in zip(*runs, strict=True):
        # Three tf32 products leave 2^-21; the projection takes out half of what is rounded.
        allowed = 2 * ((eager - want).norm() + 2 * 2.0**-21 * want.norm())
        assert float((got - want).norm()) <= float(allowed)


def test_a_head_that_does_not_fit_goes_dense(
    device: torch.device, triton: str, lists: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tile sampled calls for lists, but there is no room for more than 100 items."""
    from theory_kernels import threshold_attention
    from theory_kernels.attention import operator, plan

    (q, k, v), _ = inputs(Case(t=70, s=70, heads=1, groups=1), device)
    original = operator.make_plan
    monkeypatch.setattr(operator, "make_plan", lambda *a: original(*a)._replace(capacity=100))
    beta = torch.full((1,), 0.1, device=device)
    out, *_, paths = operator.threshold_forward(
        q, k, None, None, v, beta, None, None, 1, 70, 70, 0, False, True, 1.0, 2.0, True, None, "triton", 0
    )
    # The key head is only tried in the backward.
    assert paths.tolist() == [plan.DENSE, plan.LISTS]
    want = threshold_attention(q.double(), k.double(), v.double(), beta=0.1, implementation="reference")
    # Scores and products are three tf32 products each.
    assert float((out - want).norm()) <= 8 * 2.0**-21 * float(want.norm())


def test_lists_are_small() -> None:
    """None at 65,536 tokens or below 4,096; between, marks and lists take at most a quarter of K and V each."""
    from theory_kernels.attention.plan import make_plan

    for length in (2048, 4096, 16384, 32768, 65536):
        x = torch.empty((1, 12, length, 64), dtype=BF16, device="meta")
        plan = make_plan("triton", 1, x, x, length, length, True, 1, 0)
        marks, items = 4 * plan.marks[0] * plan.marks[1] * plan.marks[2], 2 * plan.marks[0] * plan.capacity
        assert (items > 0) == (4096 <= length < 65536)
        assert max(marks, items) <= 0.25 * 2 * x.numel() * x.element_size()


@pytest.mark.gpu
def test_two_runs_with_lists_are_bitwise_equal(device: torch.device, triton: str, lists: None) -> None:
    case = Case(t=4500, s=4500, heads=8, groups=2, d=64, e=64, dtype=BF16, views=2, beta=0.8, options=_S)
    operands, grad = inputs(case, device)
    first = run(case, operands, grad, "triton", BF16)
    second = run(case, operands, grad, "triton", BF16)
    for name, x in first.items():
        assert torch.equal(x, second[name]), name
