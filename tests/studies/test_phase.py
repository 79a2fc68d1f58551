"""The dispersion phase diagram: laws, mechanisms, reproducibility and the picture."""

from __future__ import annotations

import math

import numpy as np
import pytest

from theory_lab.errors import InputError, StoreError
from theory_lab.phase import LAWS, MECHANISMS, phase_diagram
from theory_lab.streams import Stream, cell_digest


def stream(name: str) -> Stream:
    return Stream(cell_digest({"test": name}, 0), 0, 0)


@pytest.fixture(scope="module")
def frame():
    return phase_diagram(scales=(0.5, 2.0, 8.0), lengths=(16, 1024), rows=6, workers=1)


def test_every_cell_once(frame):
    assert len(frame) == 5 * 6 * 3 * 2
    assert not frame.duplicated(["law", "mechanism", "scale", "length"]).any()
    assert frame.normalized_entropy.between(0, 1).all()
    assert (frame.standard_error >= 0).all()
    assert set(frame.rows) == {6}
    assert set(frame.seed) == {0}


def test_bits_do_not_depend_on_workers_or_selection(frame):
    columns = ["law", "mechanism", "scale", "length", "normalized_entropy", "standard_error"]
    two = phase_diagram(scales=(0.5, 2.0, 8.0), lengths=(16, 1024), rows=6, workers=2)
    assert two.equals(frame)
    some = phase_diagram(("laplace",), (2.0,), (1024,), ("tda", "softmax"), rows=6, workers=1)
    want = frame[(frame.law == "laplace") & (frame.scale == 2.0) & (frame.length == 1024)]
    merged = some[columns].merge(want[columns], on=columns)
    assert len(merged) == len(some) == 2
    other = phase_diagram(("laplace",), (2.0,), (1024,), ("softmax",), rows=6, workers=1, seed=1)
    assert not other.normalized_entropy.isin(want.normalized_entropy).any()


# Fourth moments: of a standardized law; infinite for Student's t with 3 degrees of freedom.
FOURTH = {"gaussian": 3.0, "uniform": 1.8, "laplace": 6.0, "spherical": 3.0 * 64 / 66}


@pytest.mark.parametrize("law", FOURTH)
def test_laws_have_unit_variance_and_the_right_tails(law):
    n = 200_000
    x = LAWS[law](stream(law), n)
    limit = 5.0  # standard errors: one in 10^6 runs
    assert abs(x.mean()) < limit / math.sqrt(n)
    assert abs((x**2).mean() - 1.0) < limit * math.sqrt((FOURTH[law] - 1.0) / n)
    spread = np.std(x**4) / math.sqrt(n)
    assert abs((x**4).mean() - FOURTH[law]) < limit * spread


def test_student_law_has_the_quantiles_of_student():
    from scipy import special

    n = 200_000
    x = LAWS["student-t3"](stream("t"), n) * math.sqrt(3.0)
    for q in (0.001, 0.1, 0.5, 0.9, 0.999):
        share = (x < special.stdtrit(3.0, q)).mean()
        assert abs(share - q) < 5.0 * math.sqrt(q * (1 - q) / n)


def test_mechanisms_are_those_of_the_attention_package():
    torch = pytest.importorskip("torch")
    from theory_lab.attention.alpha_entmax import Entmax
    from theory_lab.attention.softmax import Softmax, SSMax
    from theory_lab.attention.tda import TDA, TRA

    n, scale, d = 300, 2.5, 64
    x, second = LAWS["gaussian"](stream("a"), n), LAWS["gaussian"](stream("b"), n)
    z, z2 = (torch.from_numpy(scale * v) for v in (x, second))
    made = {
        "softmax": Softmax().weights(z),
        "ssmax": SSMax(s=0.43).weights(z),
        "entmax-1.5": Entmax(alpha=1.5).weights(z),
        "sparsemax": Entmax(alpha=2.0).weights(z),
        # Cosines: the scale of the scores is sigma / sqrt(d).
        "tra": TRA().weights(z / d**0.5, head_dim=d),
        "tda": TDA(lam=0.5).weights(z / d**0.5, z2 / d**0.5, head_dim=d),
    }
    assert set(made) == set(MECHANISMS)
    for name, weights in made.items():
        p = weights.detach().numpy()
        p = np.abs(p) / np.abs(p).sum()
        p = p[p > 0]
        assert MECHANISMS[name](x, second, scale) == pytest.approx(-(p * np.log(p)).sum(), rel=1e-9), name


def test_what_theory_says_about_the_corners(frame):
    def value(mechanism, law, scale, length):
        cell = frame[
            (frame.mechanism == mechanism) & (frame.law == law) & (frame.scale == scale) & (frame.length == length)
        ]
        return float(cell.normalized_entropy.iloc[0])

    # Gaussian logits: log n - H tends to sigma^2 / 2 for softmax.
    assert value("softmax", "gaussian", 0.5, 1024) == pytest.approx(1 - 0.125 / math.log(1024), abs=0.005)
    assert value("softmax", "gaussian", 8.0, 1024) < 0.3
    assert value("tra", "uniform", 0.5, 1024) == 0.0
    dead = frame[(frame.mechanism == "tra") & (frame.law == "uniform") & (frame.scale == 0.5)]
    assert (dead.dead_rows == 1.0).all()
    assert value("tra", "gaussian", 8.0, 1024) > 0.6


def test_a_single_row_has_no_standard_error():
    one = phase_diagram(("gaussian",), (1.0,), (64,), ("softmax",), rows=1, workers=1)
    assert math.isnan(one.standard_error.iloc[0])


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("laws", {"laws": ("cauchy",)}),
        ("mechanisms", {"mechanisms": ("relu",)}),
        ("scales", {"scales": (0.0,)}),
        ("lengths", {"lengths": (1,)}),
        ("rows", {"rows": 0}),
        ("workers", {"workers": 0}),
        ("seed", {"seed": -1}),
    ],
)
def test_bad_input_names_the_argument(field, arguments):
    with pytest.raises(InputError) as caught:
        phase_diagram(**arguments)
    assert caught.value.field == field


def test_picture(frame, tmp_path):
    pytest.importorskip("matplotlib")
    from theory_lab.figures.phase_plot import plot_phase

    target = tmp_path / "phase.png"
    part = frame[frame.law.isin(["gaussian", "uniform"]) & frame.mechanism.isin(["softmax", "tra"])]
    plot_phase(part, str(target))
    assert target.stat().st_size > 20_000
    with pytest.raises((InputError, StoreError)):
        plot_phase(part, str(tmp_path / "none" / "phase.png"))
    # One length and one scale: nothing to draw a line through.
    plot_phase(frame[(frame.length == 16) & (frame.scale == 2.0)], str(tmp_path / "cell.png"))
