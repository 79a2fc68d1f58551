"""One protocol test for every registered mechanism."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from attention_inputs import HIDDEN, NAMES, build, inputs, side
from torch import Tensor

from theory_lab.attention import get, resolve
from theory_lab.errors import InputError

every = pytest.mark.parametrize("name", NAMES)


def close(a: Tensor, b: Tensor, rtol: float = 1e-12, atol: float = 1e-13) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_shapes_and_dtype(name: str, dtype: torch.dtype) -> None:
    m = build(name)
    result = inputs(m.views, dtype=dtype).call(m)
    assert result.output.shape == (2, 4, 9, 5)
    assert result.weights.shape == (2, 4, 9, 9)
    assert result.output.dtype == result.weights.dtype == dtype
    assert torch.isfinite(result.output).all()
    assert torch.isfinite(result.weights).all()
    assert (result.weights.triu(1) == 0).all()
    assert (result.weights != 0).any()


@every
def test_float32_agrees_with_float64(name: str) -> None:
    m = build(name)
    wide, narrow = inputs(m.views).call(m), inputs(m.views, dtype=torch.float32).call(m)
    close(narrow.weights.double(), wide.weights, 0.0, 2e-5)
    close(narrow.output.double(), wide.output, 1e-3, 1e-3)


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_floats_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    m = build(name)
    data = inputs(m.views, dtype=dtype)
    narrow, wide = data.call(m), data.map(lambda _, t: t.float()).call(m)
    assert torch.equal(narrow.output, wide.output.to(dtype))
    assert torch.equal(narrow.weights, wide.weights.to(dtype))
    scores = torch.linspace(-0.9, 0.9, 2 * 4 * 6 * 6, dtype=torch.float64).reshape(2, 4, 6, 6).to(dtype)
    extra = side(m, scores)
    again = m.weights(scores.float(), causal=True, **{f: v if f == "head_dim" else v.float() for f, v in extra.items()})
    assert torch.equal(m.weights(scores, causal=True, **extra), again.to(dtype))


@every
def test_everything_stays_on_the_device_of_the_inputs(name: str) -> None:
    """With another default device, a tensor made without naming the device would not mix with the inputs."""
    m = build(name)
    data = inputs(m.views).map(lambda _, t: t.clone().requires_grad_())
    key_mask = torch.arange(9) < 8
    want = data.call(m, key_mask=key_mask).output
    with torch.device("meta"):
        got = data.call(m, key_mask=key_mask).output
        got.sum().backward()
    assert torch.equal(got, want)


@every
def test_copies_and_pickles(name: str) -> None:
    m = build(name)
    data = inputs(m.views)
    want = data.call(m).output
    assert torch.equal(data.call(copy.deepcopy(m)).output, want)
    assert torch.equal(data.call(pickle.loads(pickle.dumps(m))).output, want)
    lowered = copy.deepcopy(m).to(torch.float32)
    assert all(p.dtype == torch.float32 for p in lowered.parameters())
    close(data.call(lowered).output, want, 1e-4, 1e-4)


@every
@pytest.mark.parametrize("start", [1, 4, 8])
def test_causality_bitwise(name: str, start: int) -> None:
    """Whatever the tokens from `start` on are, the rows before keep every bit."""
    m = build(name)
    before = inputs(m.views)
    g = torch.Generator().manual_seed(9)

    def later(field: str, tensor: Tensor) -> Tensor:
        axis = 1 if field == "x" else 2
        noise = 50.0 * torch.randn(tensor.shape, generator=g, dtype=tensor.dtype)
        position = torch.arange(tensor.shape[axis]).reshape([-1 if d == axis else 1 for d in range(tensor.ndim)])
        return torch.where(position >= start, noise, tensor)

    a, b = before.call(m), before.map(later).call(m)
    assert torch.equal(a.weights[:, :, :start], b.weights[:, :, :start])
    assert torch.equal(a.output[:, :, :start], b.output[:, :, :start])
    assert not torch.equal(a.output[:, :, start:], b.output[:, :, start:])


@every
def test_permutation_of_keys(name: str) -> None:
    """Weights follow their keys, except where the mechanism says that positions matter: then they do not."""
    m = build(name)
    g = torch.Generator().manual_seed(3)
    scores = torch.rand(2, 4, 1, 12, generator=g, dtype=torch.float64) * 1.8 - 0.9
    extra = side(m, scores)
    moved = 0.0
    for _ in range(5):
        order = torch.randperm(12, generator=g)
        permuted = {**extra, "scores2": extra["scores2"][..., order]} if m.views == 2 else extra
        a = m.weights(scores, causal=True, **extra)[..., order]
        b = m.weights(scores[..., order], causal=True, **permuted)
        moved = max(moved, float((a - b).detach().abs().max()))
    if m.uses_positions:
        assert moved > 1e-3
    else:
        assert moved < 4e-16


@every
def test_noncausal(name: str) -> None:
    m = build(name)
    data = inputs(m.views)
    if m.causal_only:
        with pytest.raises(InputError, match="causal"):
            data.call(m, causal=False)
        return
    full, last = data.call(m, causal=False), data.call(m, causal=True)
    close(full.weights[:, :, -1], last.weights[:, :, -1])
    assert (full.weights[:, :, 0, 1:] != 0).any()


@pytest.mark.parametrize(
    ("name", "causal"),
    [
        pytest.param(n, c, id=f"{n}-{'causal' if c else 'full'}")
        for n in NAMES
        for c in (True, False)
        if c or not resolve(n).causal_only
    ],
)
def test_gradients(name: str, causal: bool) -> None:
    """gradcheck to q, k, v, hidden states and every parameter: beta, lambda, alpha, temperatures, gates."""
    m = build(name, heads=2, dim=3, value_dim=2)
    data = inputs(m.views, batch=1, heads=2, groups=1, queries=4, keys=4, dim=3, value_dim=2, seed=4)
    tensors: list[Tensor] = [t for t in (data.q, data.k, data.v, data.q2, data.k2, data.x) if t is not None]
    names = [n for n, _ in m.named_parameters()]
    count = len(tensors)
    leaves = tuple(t.detach().clone().requires_grad_() for t in [*tensors, *m.parameters()])

    def run(*values: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = values[:3]
        q2, k2 = (values[3], values[4]) if m.views == 2 else (None, None)
        parameters = dict(zip(names, values[count:], strict=True))
        keywords = {"q2": q2, "k2": k2, "x": values[count - 1], "causal": causal}
        result = torch.func.functional_call(m, parameters, (q, k, v), keywords)
        return result.output, result.weights

    # Entry by entry where there is a mask, the harder case; else along random directions.
    assert torch.autograd.gradcheck(run, leaves, eps=1e-6, atol=2e-6, rtol=1e-3, fast_mode=not causal)
    # A zero gradient passes gradcheck too, so ask that every parameter has an influence.
    out = run(*leaves)
    grads = torch.autograd.grad((out[0] * torch.arange(2)).sum() + out[1].square().sum(), leaves, allow_unused=True)
    for label, gradient in zip(names, grads[count:], strict=True):
        assert gradient is not None, label
        assert (gradient != 0).any(), label


VARIANTS = [
    ("tda", {"beta": [0.3, 0.5], "lam": 0.4, "p": 1.0, "kappa": 2.0}),
    ("tda", {"beta": 0.4, "lam": [0.2, 0.7], "p": 2.7, "eps": 1e-4}),
    ("tra", {"beta": 0.4, "p": 1.0}),
    ("lssa", {"power": 3.0}),
    ("eta-logit", {"tau": 0.3, "prune": "renormalize"}),
    ("eta-weight", {"tau": [0.2, 0.4], "prune": "drop", "alpha": 4.0}),
    ("eta-weight", {"heads": 2, "head_dim": 3, "prune": "exact"}),
    ("softmax", {"temperature": [0.7, 1.9], "learnable": True}),
    ("entmax", {"alpha": [1.0 + 1e-6, 1.3], "learnable": True}),
    ("entmax", {"alpha": [2.0, 3.5], "learnable": True}),
    ("asentmax-theta", {"theta": [0.7, 1.9], "alpha": 2.0}),
    ("asentmax-theta", {"theta": [0.7, 1.9], "alpha": [1.2, 1.7], "learn_alpha": True}),
    ("diff-rela", {"p": 2.5, "lam": 0.3}),
    ("diff-softmax", {"lam": [0.3, 0.6]}),
    ("landmark", {"block": 1, "top": 1}),
    ("sparse-transformer", {"stride": 2, "pattern": "fixed"}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(VARIANTS)])
def test_gradients_of_variants(name: str, options: dict[str, Any]) -> None:
    m = get(name, **options)
    data = inputs(m.views, batch=1, heads=2, groups=1, queries=4, keys=4, dim=3, value_dim=2, seed=11)
    leaves = [t.detach().clone().requires_grad_() for t in (data.q, data.k, data.v, *m.parameters())]
    names = [n for n, _ in m.named_parameters()]

    def run(*values: Tensor) -> tuple[Tensor, Tensor]:
        keywords = {"q2": data.q2, "k2": data.k2, "x": data.x}
        result = torch.func.functional_call(m, dict(zip(names, values[3:], strict=True)), values[:3], keywords)
        return result.output, result.weights

    assert torch.autograd.gradcheck(run, leaves, eps=5e-7, atol=2e-6, rtol=1e-3)


@pytest.mark.parametrize("name", ["entmax", "asentmax-theta", "asentmax"])
@pytest.mark.parametrize("alpha", [1.0, 1.0 + 1e-6, 10.0])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_extreme_alpha_in_float32(name: str, alpha: float, scale: float) -> None:
    options = {"heads": 4, "hidden_dim": HIDDEN} if name == "asentmax" else {}
    m = get(name, alpha=alpha, **options)
    data = inputs(1, dtype=torch.float32).map(lambda f, t: t * scale if f == "q" else t)
    data = data.map(lambda _, t: t.clone().requires_grad_())
    result = data.call(m)
    assert (result.weights.sum(-1) - 1).abs().max() < 2e-6
    result.output.sum().backward()
    for tensor in (data.q, data.k, data.v):
        assert torch.isfinite(tensor.grad).all()


@every
def test_fully_masked_rows(name: str) -> None:
    m = build(name)
    data = inputs(m.views).map(lambda _, t: t.clone().requires_grad_())
    key_mask = torch.ones(2, 9, dtype=torch.bool)
    key_mask[0] = False
    result = data.call(m, key_mask=key_mask)
    assert (result.weights[0] == 0).all()
    assert (result.output[0] == 0).all()
    assert (result.weights[1] != 0).any()
    (result.output.square().sum() + result.weights.square().sum()).backward()
    for tensor in (data.q, data.k, data.v, data.x):
        if tensor.grad is not None:
            assert torch.isfinite(tensor.grad).all()
            assert (tensor.grad[0] == 0).all()
    for parameter in m.parameters():
        assert torch.isfinite(parameter.grad).all()


@every
def test_minus_infinity_is_masked(name: str) -> None:
    """A score of -inf acts as a mask does, rows of nothing else give 0, and gradients stay finite."""
    m = build(name)
    g = torch.Generator().manual_seed(6)
    scores = torch.rand(2, 4, 6, 6, generator=g, dtype=torch.float64) * 1.8 - 0.9
    hidden = torch.rand(2, 4, 6, 6, generator=g) < 0.4
    hidden[0, :, 3] = True
    extra = side(m, scores)
    masked = scores.masked_fill(hidden, -math.inf).requires_grad_()
    a = m.weights(masked, causal=True, **extra)
    b = m.weights(scores, causal=True, mask=~hidden, **extra)
    assert torch.equal(a, b)
    assert (a[0, :, 3] == 0).all()
    assert (a[hidden] == 0).all()
    (gradient,) = torch.autograd.grad(a.square().sum(), masked)
    assert torch.isfinite(gradient).all()
    assert (gradient[hidden] == 0).all()


@every
def test_one_key(name: str) -> None:
    m = build(name)
    data = inputs(m.views)
    first = data.map(lambda f, t: t[:, :1] if f == "x" else t[:, :, :1])
    result = first.call(m)
    assert torch.isfinite(result.output).all()
    close(result.weights, data.call(m).weights[:, :, :1, :1])


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_very_peaked_scores(name: str, dtype: torch.dtype) -> None:
    m = build(name)
    g = torch.Generator().manual_seed(8)
    scores = (1000.0 * torch.randn(2, 4, 9, 9, generator=g, dtype=torch.float64)).to(dtype).requires_grad_()
    weights = m.weights(scores, causal=True, **side(m, scores.detach()))
    assert torch.isfinite(weights).all()
    (gradient,) = torch.autograd.grad(weights.sum(), scores)
    assert torch.isfinite(gradient).all()


@every
def test_padding(name: str) -> None:
    """Right padding, filled with NaN, changes nothing for the rows before it."""
    m = build(name)
    data = inputs(m.views)
    short = data.map(lambda f, t: t[:, :6] if f == "x" else t[:, :, :6])
    key_mask = torch.arange(9) < 6

    def poison(field: str, tensor: Tensor) -> Tensor:
        if field not in ("k", "v", "k2"):
            return tensor
        tensor = tensor.clone()
        tensor[:, :, 6:] = math.nan
        return tensor

    padded, plain = data.map(poison).call(m, key_mask=key_mask), short.call(m)
    close(padded.weights[:, :, :6, :6], plain.weights)
    close(padded.output[:, :, :6], plain.output)
    assert (padded.weights[..., 6:] == 0).all()
    assert torch.isfinite(padded.output).all()
    if not m.causal_only:
        padded, plain = data.map(poison).call(m, key_mask=key_mask, causal=False), short.call(m, causal=False)
        close(padded.weights[:, :, :6, :6], plain.weights)
        close(padded.output[:, :, :6], plain.output)


@every
def test_grouped_query_heads(name: str) -> None:
    m = build(name)
    data = inputs(m.views)
    repeated = data.map(lambda f, t: t.repeat_interleave(2, 1) if f in ("k", "v", "k2") else t)
    close(data.call(m).output, repeated.call(m).output)
    swapped = data.map(lambda f, t: t.flip(1) if f in ("k", "v", "k2") else t)
    assert not torch.allclose(data.call(m).output, swapped.call(m).output)


@every
def test_decoding_step_equals_the_last_row(name: str) -> None:
    """One query against all keys gives the last row of the full call, except for a cache that has a history."""
    m = build(name)
    data = inputs(m.views)
    step = data.map(lambda f, t: t[:, -1:] if f == "x" else (t[:, :, -1:] if f in ("q", "q2") else t))
    if name == "h2o":
        assert step.call(m).weights.shape == (2, 4, 1, 9)
        return
    close(step.call(m).weights[:, :, 0], data.call(m).weights[:, :, -1])
    close(step.call(m).output[:, :, 0], data.call(m).output[:, :, -1])
