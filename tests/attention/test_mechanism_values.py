"""Values of single mechanisms, against formulas evaluated another way."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from attention_inputs import HIDDEN, build, inputs
from torch import Tensor

from theory_lab.attention import entmax, get
from theory_lab.attention.base import Scope, rms_norm
from theory_lab.attention.differential import dex_lambda, lambda_init, reparametrized_lambda
from theory_lab.attention.eta import block_screen
from theory_lab.attention.lssa import log_softplus
from theory_lab.attention.rela import relu_power
from theory_lab.errors import InputError

F64 = torch.float64


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=F64)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def close(a: Tensor, b: Tensor, rtol: float = 1e-12, atol: float = 1e-14) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def test_importing_the_package_does_not_import_torch() -> None:
    code = (
        "import sys, theory_lab.attention as a, theory_lab.attention.streaming as s\n"
        "assert 'tda' in a.list_mechanisms() and s.row_statistics([__import__('numpy').zeros(4)]).n == 4\n"
        "assert not {'torch', 'scipy', 'pandas'} & set(sys.modules), set(sys.modules) & {'torch', 'scipy', 'pandas'}\n"
        "a.get('tda'); assert 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- softmax and its relatives --------------------------------------------------------------------


def test_softmax_and_temperature() -> None:
    z = draw(3, 7)
    close(get("softmax").weights(z), torch.softmax(z, -1))
    close(get("softmax", temperature=2.5).weights(z), torch.softmax(z / 2.5, -1))
    close(get("softmax").weights(z[0]), torch.softmax(z[0], -1))


def test_ssmax_is_n_to_the_power_of_s_z() -> None:
    z = draw(5, 5)
    w = get("ssmax", s=0.43).weights(z, causal=True)
    for i in range(5):
        powers = (i + 1.0) ** (0.43 * z[i, : i + 1])
        close(w[i, : i + 1], powers / powers.sum())
    counted = get("ssmax", s=1.0).weights(z, n=1000)
    close(counted, torch.softmax(z * math.log(1000), -1))


def test_lssa_against_the_formula() -> None:
    s = torch.rand(6, 6, generator=torch.Generator().manual_seed(0), dtype=F64) * 2 - 1
    w = get("lssa").weights(s, causal=True, head_dim=64)
    for i in range(6):
        a = torch.log1p(torch.exp(math.log(64) * math.log(i + 1) * s[i, : i + 1]))
        close(w[i, : i + 1], a / a.sum())
    x = row(-1000.0, -41.0, -39.0, -25.0, 0.0, 30.0, 1000.0)
    middle = np.log(np.log1p(np.exp([-39.0, -25.0, 0.0, 30.0])))
    close(log_softplus(x), row(-1000.0, -41.0, *middle, math.log(1000.0)), 1e-14)
    with pytest.raises(InputError, match="head_dim"):
        get("lssa").weights(s)


def test_lssa_reweighting() -> None:
    s = torch.rand(8, 8, generator=torch.Generator().manual_seed(0), dtype=F64) * 2 - 1
    base = get("lssa").weights(s, causal=True, head_dim=64)
    sharp = get("lssa", power=15.0).weights(s, causal=True, head_dim=64)
    for i in range(8):
        a = torch.relu(base[i] * (i + 1) - (1.0 if i >= 3 else 0.0)) ** 15
        close(sharp[i], a / a.sum())


def test_adaptive_temperature_only_sharpens() -> None:
    z = 0.1 * draw(4, 40)
    p, w = torch.softmax(z, -1), get("adaptive-temperature").weights(z)
    h = -(p * p.log()).sum(-1)
    factor = np.maximum(np.polyval([-0.037, 0.481, -2.3, 4.917, -1.791], h.numpy()), 1.0)
    assert (factor > 1).all()
    close(w, torch.softmax(z * torch.tensor(factor)[:, None], -1))
    low = row(0.0, 9.0)
    close(get("adaptive-temperature").weights(low), torch.softmax(low, -1))


def test_gate_elementwise_and_headwise() -> None:
    data = inputs(1)
    head = get("gated-softmax", heads=4, hidden_dim=HIDDEN)
    plain = data.call(get("softmax")).output
    close(data.call(head).output, 0.5 * plain)
    wide = get("gated-softmax", heads=4, hidden_dim=HIDDEN, value_dim=5)
    with torch.no_grad():
        wide.gate.copy_(draw(4, 5, HIDDEN, seed=3))
    gate = torch.sigmoid(torch.einsum("btc,hvc->bhtv", data.x, wide.gate))
    close(data.call(wide).output, gate * plain)
    with pytest.raises(InputError, match="scope"):
        wide.aggregate(torch.zeros(1, 4, 2, 2, dtype=F64), torch.zeros(1, 4, 2, 5, dtype=F64))


# ---- entmax with a temperature --------------------------------------------------------------------


def test_theta_divides_so_a_larger_one_gives_more_support() -> None:
    z = draw(1, 1, 50, 60)
    supports = []
    for theta in (0.25, 1.0, 4.0):
        w = get("asentmax-theta", theta=theta, alpha=1.5).weights(z)
        close(w, entmax(z / theta, 1.5))
        supports.append(float((w > 0).double().mean()))
    assert supports[0] < supports[1] < supports[2]


@pytest.mark.parametrize("offset", [0, 1])
def test_asentmax_scale(offset: int) -> None:
    m = get("asentmax", heads=2, hidden_dim=3, delta=0.5, offset=offset)
    with torch.no_grad():
        m.w_beta.copy_(draw(2, 3, seed=1))
        m.w_gamma.copy_(draw(2, 3, seed=2))
    x, z = draw(1, 6, 3, seed=3), draw(1, 2, 6, 6, seed=4)
    w = m.weights(z, causal=True, x=x)
    for h in range(2):
        for i in range(6):
            beta = math.log1p(math.exp(float(x[0, i] @ m.w_beta[h].detach())))
            gamma = math.tanh(float(x[0, i] @ m.w_gamma[h].detach()))
            length = math.log(i + 1 + offset)
            scale = 0.5 + (beta * length**gamma if length > 0 else 0.0)
            close(w[0, h, i, : i + 1].detach(), entmax(scale * z[0, h, i, : i + 1], 1.5))


# ---- rectified and differential -------------------------------------------------------------------


def test_rms_norm() -> None:
    x = draw(3, 8)
    close(rms_norm(x, 0.0).square().mean(-1), torch.ones(3, dtype=F64))
    close(rms_norm(x, 1e-2), x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-2))
    zero = torch.zeros(2, 8, dtype=F64, requires_grad=True)
    for eps in (0.0, 1e-2):
        y = rms_norm(zero, eps)
        assert (y == 0).all()
        (g,) = torch.autograd.grad(y.sum(), zero)
        close(g, torch.full_like(g, eps**-0.5 if eps else 0.0))


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0])
def test_rectified_power_is_flat_at_and_below_zero(p: float) -> None:
    x = torch.tensor([-1.0, 0.0, 2.0], dtype=F64, requires_grad=True)
    y = relu_power(x, p)
    close(y.detach(), torch.tensor([0.0, 0.0, 2.0**p], dtype=F64))
    (slope,) = torch.autograd.grad(y.sum(), x)
    close(slope, torch.tensor([0.0, 0.0, p * 2.0 ** (p - 1)], dtype=F64))


def test_rela_gate() -> None:
    data = inputs(1)
    plain, gated = data.call(get("rela")), data.call(get("rela", gate_dim=5))
    close(gated.output, 0.5 * plain.output)
    z = data.q @ data.k.repeat_interleave(2, 1).transpose(-1, -2) / math.sqrt(6)
    close(plain.weights, torch.relu(z).tril())


def test_differential_softmax() -> None:
    z1, z2 = draw(2, 4, 5, 6), draw(2, 4, 5, 6, seed=1)
    m = get("diff-softmax", lam=0.3, start=0.2)
    w = m.weights(z1, z2)
    close(w, torch.softmax(z1, -1) - 0.3 * torch.softmax(z2, -1))
    v = draw(2, 4, 6, 3)
    o = w @ v
    close(m.aggregate(w, v), 0.8 * o / torch.sqrt(o.square().mean(-1, keepdim=True) + 1e-5))
    close(get("diff-rela", lam=0.3, p=2).weights(z1, z2), torch.relu(z1) ** 2 - 0.3 * torch.relu(z2) ** 2)
    assert lambda_init(1) == pytest.approx(0.2)
    assert lambda_init(50) == pytest.approx(0.8, abs=1e-6)
    a = torch.full((4,), 0.1, dtype=F64)
    assert float(reparametrized_lambda(a, a, a, -a, 0.8)) == pytest.approx(math.exp(0.04) - math.exp(-0.04) + 0.8)


def test_dex_changes_the_output_and_keeps_the_map() -> None:
    data = inputs(1)
    plain = data.call(get("softmax"))
    m = get("dex", value_dim=5, lam=0.4, adapted=[True, False, True, False])
    close(data.call(m).output, plain.output)
    with torch.no_grad():
        m.projection.copy_(draw(5, 5, seed=7))
    changed = data.call(m)
    close(changed.weights, plain.weights)
    close(changed.output[:, 0], plain.output[:, 0] @ (torch.eye(5, dtype=F64) - 0.4 * m.projection))
    close(changed.output[:, 1], plain.output[:, 1])
    learned = torch.tensor(0.6, dtype=F64)
    assert float(dex_lambda(0, 100, 0.2, learned)) == 0.0
    assert float(dex_lambda(100, 100, 0.2, learned)) == pytest.approx(0.6)
    assert float(dex_lambda(25, 100, 0.2, learned)) == pytest.approx(0.75 * 0.25 * 0.2 + 0.25 * 0.6)
    with pytest.raises(InputError, match="adapted"):
        data.call(get("dex", value_dim=5, adapted=[True]))
    with pytest.raises(InputError, match="channels"):
        data.call(get("dex", value_dim=4))


# ---- thresholds -----------------------------------------------------------------------------------


def scope(n: Tensor, head_dim: int) -> Scope:
    return Scope(torch.ones(*n.shape[:-1], 1, dtype=torch.bool), n, True, head_dim)


@pytest.mark.parametrize(("beta", "kappa", "p"), [(1.0, 1.0, 2.0), (0.8, 4.0, 1.0), (0.5, 0.5, 2.7)])
def test_tda_against_the_formula(beta: float, kappa: float, p: float) -> None:
    s1 = torch.rand(1, 1, 30, 30, generator=torch.Generator().manual_seed(0), dtype=F64) * 2 - 1
    s2 = s1.flip(-1) * 0.9
    w = get("tda", beta=beta, lam=0.25, kappa=kappa, p=p).weights(s1, s2, causal=True, head_dim=16)
    for i in range(30):
        tau = beta * math.sqrt(2 * max(0.0, math.log((i + 1) / kappa)) / 16)
        a1, a2 = (np.maximum(s[0, 0, i, : i + 1].numpy() - tau, 0) ** p for s in (s1, s2))
        close(w[0, 0, i, : i + 1], torch.tensor(a1 - 0.25 * a2), 1e-12, 1e-15)


def test_views_and_thresholds_are_within_reach() -> None:
    m = get("tda", beta=0.4, lam=0.3)
    s1, s2 = (torch.tanh(draw(2, 3, 8, 8, seed=k)) for k in (0, 1))
    scope_, views = m.prepare(s1, s2, causal=True, head_dim=16)
    a1, a2 = m.both_views(views, scope_)
    close(a1 - 0.3 * a2, m.weights(s1, s2, causal=True, head_dim=16))
    assert torch.equal(scope_.n[0, 0, :, 0], torch.arange(1.0, 9.0, dtype=F64))
    tau = m.thresholds(scope_, s1)
    assert torch.equal(a1 > 0, (s1 > tau) & scope_.visible)
    for wrong in ((s1,), (s1, s2, s2), (s1[0, 0, 0], s2[0, 0, 0])):
        with pytest.raises(InputError, match=r"views|scores2"):
            m.prepare(*wrong)


def test_threshold_is_clamped_and_its_slope_is_tau_over_beta() -> None:
    m = get("tra", beta=0.7, kappa=5.0)
    n = torch.arange(1.0, 30.0, dtype=F64)[:, None]
    tau = m.thresholds(scope(n, 64), n)
    assert (tau[:5] == 0).all()
    assert (tau[5:] > 0).all()
    (slope,) = torch.autograd.grad(tau[20, 0], m.beta_)
    assert float(slope) == pytest.approx(tau[20, 0].item() / 0.7)


def test_survivors_are_strictly_above_the_threshold() -> None:
    m = get("tra", beta=1.0, p=1.0, learnable=False)
    n = torch.tensor([[3.0]], dtype=F64)
    tau = float(m.thresholds(scope(n, 16), n))
    w = m.weights(row(tau, math.nextafter(tau, 1.0), math.nextafter(tau, 0.0)), head_dim=16)
    assert [float(v) > 0 for v in w[0]] == [False, True, False]


def test_dead_rows_give_exactly_zero_for_every_eps() -> None:
    for eps in (0.0, 1.2e-7, 1e-2):
        data = inputs(2).map(lambda f, t: t.clone().requires_grad_())
        result = data.call(get("tda", beta=50.0, eps=eps))
        dead = (result.weights == 0).all(-1)
        assert dead[:, :, 1:].all()
        assert (result.output[dead] == 0).all()
        result.output.sum().backward()
        assert all(torch.isfinite(t.grad).all() for t in (data.q, data.k, data.v, data.q2, data.k2))


def test_learnable_values_are_the_ones_given_and_lambda_stays_inside() -> None:
    m = get("tda", beta=0.8, lam=0.3)
    assert m.beta.item() == 0.8
    assert m.lam.item() == pytest.approx(0.3, rel=1e-15)
    assert {name for name, _ in m.named_parameters()} == {"beta_", "lam_"}
    with torch.no_grad():
        m.lam_.fill_(30.0)
    assert 0 < m.lam.item() <= 1
    fixed = get("tda", beta=0.8, lam=0.0, learnable=False)
    assert not list(fixed.parameters())
    assert float(fixed.lam) == 0.0
    beta = torch.tensor(0.8, dtype=F64, requires_grad=True)
    inputs(2).call(get("tda", beta=beta)).output.sum().backward()
    assert beta.grad is not None
    assert float(beta.grad) != 0


# ---- ETA ------------------------------------------------------------------------------------------

WORKED = row(0.9, 0.3, 0.7, 0.1, 0.85, 0.4)


def eta(reading: str, **options: object) -> Tensor:
    m = get(f"eta-{reading}", heads=1, head_dim=3, **options)
    with torch.no_grad():
        m.w.copy_(row(0.1, 0.3, -0.2))
        m.b.fill_(0.1)
    q = row(0.5, -0.2, 0.8)[None, None]
    assert m.thresholds(Scope(torch.ones(1), torch.ones(1), False, q=q), q).item() == pytest.approx(0.482507, abs=5e-7)
    return m.weights(WORKED[None, None], q=q)[0, 0, 0].detach()


def test_eta_worked_example() -> None:
    weight, logit = eta("weight"), eta("logit")
    close(weight, torch.tensor([0.3375, 0.0261, 0.2519, 0.0033, 0.3179, 0.0633], dtype=F64), 0.0, 5e-5)
    close(logit, torch.tensor([0.2484, 0.1067, 0.1920, 0.1026, 0.2346, 0.1157], dtype=F64), 0.0, 5e-5)
    exact = eta("weight", prune="exact")
    kept = torch.softmax(WORKED[0, [0, 2, 4]], 0)
    close(exact[[0, 2, 4]], kept)
    assert (exact[[1, 3, 5]] == 0).all()
    for reading, soft in (("weight", weight), ("logit", logit)):
        dropped, again = eta(reading, prune="drop"), eta(reading, prune="renormalize")
        suppressed = float(soft[[1, 3, 5]].sum())
        assert float((soft - dropped).abs().sum()) == pytest.approx(suppressed)
        assert float((soft - again).abs().sum()) == pytest.approx(2 * suppressed)
        assert float(again.sum()) == pytest.approx(1.0)


def test_eta_floor_is_in_one_reading_only() -> None:
    s = row(*([0.9] * 4), *([-30.0] * 100))
    logit = get("eta-logit", tau=0.5, learnable=False).weights(s)[0]
    weight = get("eta-weight", tau=0.5, learnable=False).weights(s)[0]
    assert float(logit[-1]) == pytest.approx(1 / (4 * math.exp(0.9 / (1 + math.exp(-4))) + 100), rel=1e-6)
    assert float(weight[-1]) < 1e-30


def test_eta_without_survivors_is_a_row_of_zeros() -> None:
    for prune in ("drop", "renormalize", "exact"):
        for reading in ("logit", "weight"):
            assert (get(f"eta-{reading}", tau=0.99, prune=prune).weights(WORKED) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_block_screen_never_drops_a_key_that_reaches_the_threshold(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(40, 8, generator=g, dtype=F64).to(dtype)
    k = torch.randn(203, 8, generator=g, dtype=F64).to(dtype)
    k[::7] = q[torch.arange(29) % 40] * 1.5  # parallel keys attain the bound
    s = (q.float() @ k.float().T) / math.sqrt(8)
    for tau in (0.3, 1.0, 3.0):
        kept = block_screen(q, k, torch.tensor(tau), 16)
        assert kept.shape == (40, 13)
        assert (kept.repeat_interleave(16, -1)[:, :203] | (s < tau)).all()
    exact = s.max(-1, keepdim=True).values
    assert (block_screen(q, k, exact, 16).repeat_interleave(16, -1)[:, :203] | (s < exact)).all()
    assert not block_screen(q, k, torch.tensor(3.0), 16).all()
    with pytest.raises(InputError, match="block"):
        block_screen(q, k, exact, 0)


# ---- selections and patterns ----------------------------------------------------------------------


def test_streaming_llm_selection() -> None:
    w = get("streaming-llm", sinks=2, window=3).weights(torch.zeros(10, 10, dtype=F64), causal=True)
    for i in range(10):
        cache = {j for j in range(i + 1) if j < 2 or i - j < 3}
        close(w[i], torch.tensor([1 / len(cache) if j in cache else 0.0 for j in range(10)], dtype=F64))


def test_h2o_against_a_loop_over_dictionaries() -> None:
    z = draw(14, 14) * 2
    w = get("h2o", heavy=3, recent=2).weights(z, causal=True)
    heat: dict[int, float] = {}
    for i in range(14):
        heat[i] = 0.0
        keys = sorted(heat)
        p = torch.softmax(z[i, keys], -1)
        want = torch.zeros(14, dtype=F64)
        want[keys] = p
        close(w[i], want)
        for j, share in zip(keys, p.tolist(), strict=True):
            heat[j] += share
        if len(heat) > 4:
            old = [j for j in heat if j <= i - 1]
            heat.pop(min(old, key=lambda j: (heat[j], j)))
    assert (w[-1] > 0).sum() == 5


def test_sparse_transformer_patterns() -> None:
    z = torch.zeros(1, 2, 13, 13, dtype=F64)

    def sets(h: int = 0, **options: object) -> list[set[int]]:
        w = get("sparse-transformer", stride=4, **options).weights(z, causal=True)
        return [{j for j in range(13) if w[0, h, i, j] > 0} for i in range(13)]

    past = [set(range(i + 1)) for i in range(13)]
    local = [{j for j in past[i] if i - j < 4} for i in range(13)]
    strided = [{j for j in past[i] if (i - j) % 4 == 0} for i in range(13)]
    assert sets(part="local") == local
    assert sets(part="summary") == strided
    assert sets() == [a | b for a, b in zip(local, strided, strict=True)]
    assert (sets(0, part="alternate"), sets(1, part="alternate")) == (local, strided)
    fixed = [{j for j in past[i] if j // 4 == i // 4 or j % 4 >= 2} for i in range(13)]
    assert sets(pattern="fixed", summary=2) == fixed
    with pytest.raises(InputError, match="alternate"):
        get("sparse-transformer", part="alternate").weights(z[0, 0], causal=True)


def test_landmark_grouped_softmax() -> None:
    """Blocks of two tokens and a landmark: 0 1 [2] 3 4 [5] 6 7 ..."""
    z = draw(8, 8)
    w = get("landmark", block=2).weights(z, causal=True)
    i = 7
    stage = torch.softmax(z[i, [2, 5, 6, 7]], 0)
    want = torch.zeros(8, dtype=F64)
    want[[6, 7]] = stage[2:]
    want[[0, 1]] = stage[0] * torch.softmax(z[i, [0, 1]], 0)
    want[[3, 4]] = stage[1] * torch.softmax(z[i, [3, 4]], 0)
    close(w[i], want)
    # A landmark's own query reads its block's tokens, not itself; every row sums to one.
    assert w[5, 5] == 0
    close(w.sum(-1), torch.ones(8, dtype=F64))
    one = get("landmark", block=2, top=1).weights(z, causal=True)[i]
    best = 0 if z[i, 2] > z[i, 5] else 3
    assert {j for j in range(8) if one[j] > 0} == {best, best + 1, 6, 7}
    close(one.sum(), torch.tensor(1.0, dtype=F64))


def test_state_dict_round_trip() -> None:
    for name in ("tda", "eta-weight", "asentmax", "entmax"):
        a, b = build(name, seed=1), build(name, seed=2)
        with torch.no_grad():
            for parameter in a.parameters():
                parameter.add_(0.01)
        b.load_state_dict(a.state_dict())
        data = inputs(a.views)
        assert torch.equal(data.call(a).output, data.call(b).output)
