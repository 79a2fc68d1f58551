"""Entmax attention: laws that it keeps, what it refuses, and how it behaves as an operator."""

from __future__ import annotations

import math

import pytest
import torch
from theory_kernels.entmax_attention import entmax_attention
from theory_kernels.entmax_attention.operator import entmax_backward, entmax_forward

F64 = torch.float64


def test_appended_keys_below_the_threshold_change_nothing() -> None:
    """float64: weights of the old keys stay (ASEntmax, non-vanishing attention), where softmax would shrink them."""
    g = torch.Generator().manual_seed(8)
    q, k, v = (torch.randn((1, 1, n, 8), generator=g, dtype=F64) for n in (4, 20, 20))
    q = 3 * q
    far = -100.0 * q.mean(2, keepdim=True).expand(1, 1, 5, 8)
    keep = (q @ far.transpose(-1, -2)).amax(-1) < (q @ k.transpose(-1, -2)).amax(-1) - 8**0.5 * 2
    assert bool(keep.any())
    old = entmax_attention(q, k, v, causal=False, implementation="chunked")
    new = entmax_attention(
        q, torch.cat([k, far], 2), torch.cat([v, 9 * v[:, :, :5]], 2), causal=False, implementation="chunked"
    )
    assert float((new - old)[keep].abs().max()) <= 1e-14


def test_alpha_learned_by_adamw_stays_in_its_domain() -> None:
    """500 steps of alpha = 1 + sigmoid(raw), pulled to either end, stay finite and in (1, 2]."""
    g = torch.Generator().manual_seed(9)
    q, k, v = (torch.randn((1, 2, 6, 4), generator=g) for _ in range(3))
    # One head wants its mean over the keys, the other its best key alone.
    wish = torch.stack([v[0, 0].cumsum(0) / torch.arange(1, 7)[:, None], v[0, 1]])[None]
    raw = torch.zeros(2, requires_grad=True)
    best = torch.optim.AdamW([raw], lr=0.1)
    for _ in range(500):
        alpha = 1 + raw.sigmoid()
        loss = (entmax_attention(q, k, v, alpha=alpha, implementation="chunked") - wish).square().sum()
        best.zero_grad()
        loss.backward()
        assert bool(torch.isfinite(raw.grad).all())
        best.step()
        assert bool(((alpha > 1) & (alpha <= 2)).all())
    assert float(alpha[0].detach()) < 1.3 or float(alpha[1].detach()) > 1.7


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"alpha": 1.0}, ValueError, r"alpha must lie in \(1, 2\], got 1.0"),
        ({"alpha": torch.tensor([1.5, 2.5])}, ValueError, r"alpha must lie in \(1, 2\], got values from 1.5 to 2.5"),
        ({"alpha": "1.5"}, TypeError, "alpha must be a number or a tensor, got str"),
        ({"alpha": torch.tensor([1.5, 1.5, 1.5])}, ValueError, r"alpha must be a scalar or have shape \(2,\)"),
        ({"theta": 0.0}, ValueError, "theta must be finite and > 0"),
        ({"theta": torch.tensor([-1.0, 1.0])}, ValueError, "theta must be > 0, got a smallest value of -1"),
        ({"theta": 1.0, "temperature": torch.ones(1)}, ValueError, "theta excludes temperature"),
        (
            {"temperature": torch.ones(3, 2, 4)},
            ValueError,
            r"temperature must broadcast to \(1, 2, 4\), got \(3, 2, 4\)",
        ),
        ({"temperature": -torch.ones(1)}, ValueError, "temperature must be >= 0, got a smallest value of -1"),
        ({"temperature": torch.ones(1, dtype=torch.int32)}, TypeError, "temperature must have a floating-point dtype"),
        ({"scale": math.inf}, ValueError, "scale must be finite and >= 0, got inf"),
        ({"list_from": -1}, ValueError, "list_from must be at least 0, got -1"),
        ({"implementation": "fast"}, ValueError, "implementation must be one of"),
    ],
    ids=lambda x: str(x)[:40] if isinstance(x, dict) else "",
)
def test_bad_input(change: dict, error: type, text: str) -> None:
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(error, match=text):
        entmax_attention(x, x, x, **change)


def test_operators(device: torch.device) -> None:
    """Schemas, shapes under fake tensors and autograd registration."""
    g = torch.Generator().manual_seed(10)
    q, k, v = (torch.randn((1, h, 9, 8), generator=g).to(device).requires_grad_() for h in (2, 1, 1))
    factor = torch.full((1, 2, 9), 0.3, device=device, requires_grad=True)
    eps = torch.tensor([0.5, 0.9], device=device, requires_grad=True)
    static = (None, 1, 9, 9, 0, False, True, 0)
    torch.library.opcheck(entmax_forward, (q, k, v, factor, eps, *static, "chunked", True, True, True, None))
    rows = torch.zeros((2, 1, 2, 9), device=device)
    none = torch.empty((0, 0, 0), dtype=torch.int32, device=device)
    operands = [x.detach() for x in (q, k, v, factor, eps)]
    torch.library.opcheck(
        entmax_backward,
        test_utils=("test_schema", "test_faketensor"),
        args=(torch.ones((1, 2, 9, 8), device=device), *operands, None, v.new_empty((0, 0, 0, 0)).detach(), rows, none,
         none.new_empty((0, 0)), *static[1:], "chunked", True, True),
    )  # fmt: skip


def test_compile(device: torch.device) -> None:
    """One graph, no break, same numbers and gradients."""
    g = torch.Generator().manual_seed(11)
    q, k, v = (torch.randn((1, 2, 9, 8), generator=g).to(device).requires_grad_() for _ in range(3))
    raw = torch.zeros(2, device=device, requires_grad=True)

    def call(q, k, v, raw):  # type: ignore[no-untyped-def]
        return entmax_attention(q, k, v, alpha=1 + raw.sigmoid(), theta=0.5).square()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    want, got = call(q, k, v, raw), compiled(q, k, v, raw)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(x.sum(), [q, k, v, raw]) for x in (want, got)]
    torch.testing.assert_close(grads[1], grads[0])


# numpy, in Triton's interpreter, says where numbers end.
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def _bad(what: str, device: torch.device, t: int = 6) -> tuple[list[torch.Tensor], dict, list[bool]]:
    """q, k, v whose row 3 (or the rows that see key 3) have scores that are no numbers; which rows are sound."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((1, 2, 6, 16), generator=g) for _ in range(3))
    options: dict = {}
    if what == "temperature":
        options["temperature"] = torch.ones(6)
        options["temperature"][3] = math.inf
        q = q.abs()
        k = k.abs()
    elif what == "query":
        q[:, 0, 3, 2] = math.nan
    else:
        q[..., 0] = q[..., 0].abs()
        k[:, 0, 3, 0] = math.nan if what == "key" else math.inf
    sound = [i != 3 if what in ("query", "temperature") else i < 3 for i in range(6)]
    options = {name: x[6 - t :].to(device) for name, x in options.items()}
    return [q[:, :, 6 - t :].to(device), k.to(device), v.to(device)], options, sound[6 - t :]


@quiet
@pytest.mark.parametrize("implementation", ["reference", "chunked", "triton"])
@pytest.mark.parametrize("what", ["key", "infinite key", "query", "temperature"])
def test_scores_that_are_no_numbers_are_not_hidden(
    what: str, implementation: str, device: torch.device, triton: str
) -> None:
    """Outputs of their rows are NaN, and so are the gradients of those rows and of what they see."""
    operands, options, sound = _bad(what, device)
    leaves = [x.requires_grad_() for x in operands]
    alpha = {"infinite key": 2.0, "query": 1.3}.get(what, 1.5)
    lists = {"list_from": 0} if what != "infinite key" else {}
    out = entmax_attention(*leaves, alpha=alpha, implementation=implementation, **lists, **options)
    dq, dk, dv = torch.autograd.grad(out.sum(), leaves)
    assert out.detach().isnan().all(-1)[0, 0].tolist() == [not ok for ok in sound]
    assert out.detach().isfinite().all(-1)[0, 0].tolist() == sound
    # A key of NaN times a gradient of 0 may reach other rows too.
    assert bool(dq[0, 0][~torch.tensor(sound)].isnan().all())
    assert bool(dk[0, 0, 3 if what == "infinite key" else slice(4)].isnan().all())
    assert bool(dv[0, 0, 3].isnan().all())
    if what != "temperature":
        assert all(bool(x.detach()[0, 1].isfinite().all()) for x in (out, dq, dk, dv))


@quiet
@pytest.mark.parametrize(("what", "split"), [("key", False), ("infinite key", True), ("temperature", True)])
def test_nor_in_decoding(
    what: str, split: bool, device: torch.device, triton: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from theory_kernels.entmax_attention import launch

    if split:
        monkeypatch.setattr(launch, "SPLIT_FROM", 1)
        monkeypatch.setattr(launch, "ALONE", 0)
    operands, options, sound = _bad(what, device, 4)
    options["query_offset"] = 2
    out = entmax_attention(*(x[:, :1] for x in operands), implementation="triton", **options)
    assert out.isnan().all(-1)[0, 0].tolist() == [not ok for ok in sound]
    assert out.isfinite().all(-1)[0, 0].tolist() == sound


@quiet
def test_a_huge_key_of_the_future_hides_nothing(device: torch.device, triton: str) -> None:
    """Its norm overflows, and with a query of zeros the margin of the lists was no number: nothing was listed."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((1, 1, 70, 16), generator=g).to(device) for _ in range(3))
    q[:, :, 5], k[:, :, 60] = 0.0, 1e25
    got, want = (entmax_attention(q, k, v, implementation=name, **options)[:, :, :60]
                 for name, options in (("triton", {"list_from": 0}), ("reference", {})))  # fmt: skip
    assert float((got - want).abs().max()) <= 1e-5


@quiet
@pytest.mark.parametrize(
    ("size", "alpha", "rowwise"),
    [(1e6, 1.5, False), (1e8, 1.5, False), (1e8, 1.5, True), (1e8, 2.0, False), (1e8, 1.3, False)],
)
def test_scores_that_float32_cannot_tell_apart(
    size: float, alpha: float, rowwise: bool, device: torch.device, triton: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest score has weight 1 in every kernel, however they round the products of one pair."""
    if device.type == "cpu":
        # The interpreter rounds alike everywhere: bounds and lists come from products that are off.
        from theory_kernels.entmax_attention import lists

        right = lists.dot
        monkeypatch.setattr(lists, "dot", lambda *operands: right(*operands) * (1.0 + 3e-7))
    g = torch.Generator().manual_seed(0)
    q, k, v, w = (torch.randn((1, 2, 70, 16), generator=g).bfloat16().float().to(device) for _ in range(4))
    q = (size * q).bfloat16().float()
    z = (q.double() @ k.double().mT).masked_fill(torch.ones(70, 70, device=device).triu(1) > 0, -math.inf)
    top = z.topk(2, -1).values
    # Rows whose two largest scores differ by more than the temperature that the kernels may go down to.
    clear = (top[..., 0] - top[..., 1] > 2.0**-14 * z[z.isfinite()].abs().max())[..., None]
    assert float(clear.double().mean()) > 0.9
    options = {"temperature": torch.ones(70, device=device)} if rowwise else {}
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = entmax_attention(*leaves, alpha=alpha, implementation="triton", list_from=0, **options)
    dq, dk, dv = torch.autograd.grad((out * w * clear).sum(), leaves)
    first = z.argmax(-1, keepdim=True)
    want = v.detach().gather(2, first.expand(-1, -1, -1, 16))
    # 2^-20 of the score is 2^-3 of the lowest temperature, and 2 2^-7 of a weight what rounding leaves in the backward.
    assert float(((out.detach() - want) * clear).abs().max()) <= 1e-5 * float(v.detach().abs().max())
    exact = torch.zeros_like(v).scatter_add_(2, first.expand(-1, -1, -1, 16), w * clear)
    assert float((dv - exact).norm()) <= 2.0**-5 * float(exact.norm())
    # The exact gradients are 0; these are what they would be of scores of ordinary size.
    for x, other in ((dq, k), (dk, q)):
        assert float(x.abs().max()) <= 2.0**-10 * 16**-0.5 * float(other.detach().norm(dim=-1).max())
