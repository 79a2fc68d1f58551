"""Parts of the model with pluggable attention: the entmax of a static graph, thresholds, positions, configuration."""

from __future__ import annotations

import math

import numpy as np
import pytest

from theory_lab import InputError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from theory_lab.attention.alpha_entmax import entmax  # noqa: E402
from theory_lab.models.lab import SIZES, LabConfig, language_mechanisms, make_config  # noqa: E402
from theory_lab.models.lab.entmax import static_entmax  # noqa: E402
from theory_lab.models.lab.mechanisms import build_mechanism, sharp_thresholds  # noqa: E402
from theory_lab.models.lab.positions import linear_bias, nape_slopes, rotate, rotations  # noqa: E402


def scores(kind: str, keys: int, rows: int = 5) -> torch.Tensor:
    g = torch.Generator().manual_seed(keys)
    z = torch.randn(rows, keys, generator=g, dtype=torch.float64)
    if kind == "peaked":
        z = z * 1000.0
    elif kind == "ties":
        z = z.round()
    elif kind == "equal":
        z = torch.zeros_like(z) + 3.0
    return z


@pytest.mark.parametrize("kind", ["normal", "peaked", "ties", "equal"])
@pytest.mark.parametrize("alpha", [1.05, 1.5, 1.77, 2.0])
def test_static_entmax_is_entmax(alpha, kind):
    for keys in (1, 2, 63, 1025):
        z = scores(kind, keys)
        wanted = entmax(z, alpha)
        found = static_entmax(z, alpha, torch.ones_like(z, dtype=torch.bool))
        # A weight is p = gap^(1/(alpha-1)): the rounding of a gap of order 1 moves it by p^(2-alpha) eps / (alpha-1).
        step = wanted.pow(2.0 - alpha) / (alpha - 1.0) + wanted
        budget = 16 * torch.finfo(z.dtype).eps * (1.0 + z.abs().amax() * (alpha - 1.0)) * step
        alone = (wanted == 0) != (found == 0)  # a key at the threshold itself may fall on either side
        assert ((found - wanted).abs()[~alone] <= budget[~alone]).all()
        assert (torch.maximum(found, wanted)[alone] ** (alpha - 1.0) < 1e-11).all()


@pytest.mark.parametrize("alpha", [1.5, 1.77, 2.0])
def test_static_entmax_has_the_same_gradients(alpha):
    z = scores("normal", 40)
    visible = torch.ones_like(z, dtype=torch.bool)
    visible[1, 7:] = False
    visible[2] = False
    upstream = torch.randn(z.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    made = []
    for function in (entmax, static_entmax):
        own, a = z.clone().requires_grad_(), torch.tensor([[alpha]], dtype=torch.float64, requires_grad=True)
        p = function(own, a, visible)
        p.backward(upstream)
        made.append((p.detach(), own.grad, a.grad))
    for found, wanted in zip(made[1], made[0], strict=True):
        # A sum of 40 products, each rounded, divided by a slope of order 1.
        assert torch.allclose(
            found, wanted, rtol=0, atol=40 * 64 * torch.finfo(z.dtype).eps * float(upstream.abs().max())
        )
    p, gradient, _ = made[1]
    assert (p[2] == 0).all()
    assert (p[1, 7:] == 0).all()
    assert (gradient[2] == 0).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("kappa", [0.5, 1.0, 4.0])
def test_sharp_thresholds_let_kappa_through(kappa):
    special = pytest.importorskip("scipy.special")
    for d in (2, 16, 64):
        table = sharp_thresholds(3000, d, kappa)
        n = np.arange(len(table))
        above = table > 0
        # P(cos > t) = betaSF(t^2; 1/2, (d-1)/2) / 2, by the complement of the incomplete beta function.
        tail = 0.5 * special.betainc((d - 1) / 2, 0.5, 1.0 - table[above] ** 2)
        assert np.allclose(n[above] * tail, kappa, rtol=1e-9)
        assert (n[~above] <= 2 * kappa).all()
        assert (np.diff(table) >= 0).all()


def test_rotary_positions_and_their_stretching():
    d, factor = 64, 4.0
    positions = torch.tensor([[0, 1, 5, 700]])
    plain = rotations(positions, d, 10_000.0)
    stretched = rotations(positions, d, 10_000.0, factor)
    assert torch.equal(plain[0][..., 0], stretched[0][..., 0])  # the highest frequency stays
    slow = torch.atan2(stretched[1][0, 0, 1:, -1], stretched[0][0, 0, 1:, -1])
    were = torch.atan2(plain[1][0, 0, 1:, -1], plain[0][0, 0, 1:, -1])
    assert torch.allclose(slow, were / factor, rtol=1e-5)  # the lowest is stretched by the factor
    # Scores depend on distances alone: moving all positions changes none.
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 4, d, generator=g, dtype=torch.float64) for _ in range(2))
    near, far = (rotations(positions + shift, d, 10_000.0) for shift in (0, 12_345))
    first, second = (rotate(q, *turn) @ rotate(k, *turn).transpose(-1, -2) for turn in (near, far))
    # Cosines and sines are float32: an error of eps in each of D products.
    assert (first - second).abs().max() <= 8 * torch.finfo(torch.float32).eps * (
        q.norm(dim=-1).max() * k.norm(dim=-1).max()
    )


def test_nape_is_half_without_positions():
    slopes = nape_slopes(6)
    assert slopes.tolist() == [0, 0, 0, 2, 1, 0.5]
    bias = linear_bias(slopes, 2, 5)
    assert bias.shape == (6, 2, 5)
    assert nape_slopes(2, steepest=0.25).tolist() == [0, 0.25]
    assert bias[5, 0].tolist() == [-1.5, -1, -0.5, 0, 0]  # later keys are masked elsewhere


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"size": "huge"}, "size"),
        ({"attention": "tdaa"}, "attention"),
        ({"attention": 3}, "attention"),
        ({"attention_parameters": {"betta": 1.0}}, "attention_parameters"),
        ({"attention_parameters": {"beta": -1.0}}, "beta"),
        ({"attention_parameters": {"lam": 1.5}}, "lam"),
        ({"attention": "entmax", "attention_parameters": {"alpha": 2.5}}, "alpha"),
        ({"attention": "entmax", "attention_parameters": {"alpha": [1.5, 1.0]}}, "alpha"),
        ({"positions": "nape"}, "positions"),
        ({"positions": "learned"}, "positions"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"head_dim": 63}, "head_dim"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"hidden_size": 100}, "hidden_size"),
        ({"rope_ntk_factor": 0.5}, "rope_ntk_factor"),
        ({"rope_theta": math.inf}, "rope_theta"),
        ({"layers": 3}, "override"),
    ],
)
def test_bad_settings_are_named(change, field):
    good = {"size": "pico", "attention": "tda", "vocab_size": 64}
    with pytest.raises(InputError) as error:
        make_config(**{**good, **change})
    assert error.value.field == field


def test_a_configuration_says_where_training_starts():
    config = make_config("pico", "tda", vocab_size=64, attention_parameters={"beta": 0.5})
    assert config.attention_parameters == {"beta": 0.5, "kappa": 1.0, "p": 2.0, "eps": 1e-1, "lam": 0.5}
    mechanism = build_mechanism(config, 0)
    assert mechanism.beta.tolist() == [0.5] * 3
    assert mechanism.beta_.dtype == torch.float32
    again = LabConfig(**{k: v for k, v in config.to_dict().items() if k != "model_type"})
    assert again.to_dict() == config.to_dict()


def test_sizes_are_what_they_say():
    from theory_lab.models.lab import LabForCausalLM

    def count(size: str, attention: str, vocabulary: int) -> int:
        with torch.device("meta"):
            model = LabForCausalLM(make_config(size, attention, vocab_size=vocabulary))
        return sum(p.numel() for p in model.parameters())

    assert count("pico", "tda", 2048) <= 2_450_000
    assert 161_000_000 < count("paper", "softmax", 50_257) < 163_000_000
    assert 28_000_000 < count("small", "tda", 8192) < 33_000_000
    assert set(SIZES) == {"recall", "pico", "small", "paper"}
    assert {"tda", "tda-sharp", "asentmax", "softmax"} <= set(language_mechanisms())
