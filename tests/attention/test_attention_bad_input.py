"""Bad input and the registry: one error that names the argument and what was received."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_inputs import HIDDEN, NAMES, Inputs, build, inputs, side
from torch import Tensor

from theory_lab.attention import Mechanism, get, list_mechanisms, register, resolve, unregister
from theory_lab.errors import InputError

every = pytest.mark.parametrize("name", NAMES)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def bad(field: str, change: Any) -> Any:
    return pytest.param(field, change, id=f"{field}-{change.__name__}")


def nan(data: Inputs) -> dict[str, Any]:
    data.q[0, 0, 3, 0] = math.nan
    return {}


def dtype(data: Inputs) -> dict[str, Any]:
    data.v = data.v.float()
    return {}


def device(data: Inputs) -> dict[str, Any]:
    data.k = data.k.to("meta")
    return {}


def heads(data: Inputs) -> dict[str, Any]:
    data.k, data.v = data.k[:, :1].repeat(1, 3, 1, 1), data.v[:, :1].repeat(1, 3, 1, 1)
    return {}


def width(data: Inputs) -> dict[str, Any]:
    data.k = data.k[..., :-1]
    return {}


def length(data: Inputs) -> dict[str, Any]:
    data.v = data.v[:, :, :-1]
    return {}


def empty(data: Inputs) -> dict[str, Any]:
    for field in ("q", "k", "v", "q2", "k2"):
        tensor = getattr(data, field)
        if tensor is not None:
            setattr(data, field, tensor[:, :, :0])
    return {}


def rank(data: Inputs) -> dict[str, Any]:
    data.q = data.q[0]
    return {}


def integer(data: Inputs) -> dict[str, Any]:
    data.q = data.q.long()
    return {}


def mask_shape(data: Inputs) -> dict[str, Any]:
    return {"key_mask": torch.ones(2, 5, dtype=torch.bool)}


def mask_dtype(data: Inputs) -> dict[str, Any]:
    return {"key_mask": torch.ones(2, 9)}


def zero_keys(data: Inputs) -> dict[str, Any]:
    return {"n": 0}


@every
@pytest.mark.parametrize(
    ("field", "change"),
    [
        bad("scores", nan),
        bad("v", dtype),
        bad("k", device),
        bad("k", heads),
        bad("k", width),
        bad("v", length),
        bad("scores", empty),
        bad("q", rank),
        bad("q", integer),
        bad("key_mask", mask_shape),
        bad("key_mask", mask_dtype),
        bad("n", zero_keys),
    ],
)
def test_bad_input_names_the_argument(name: str, field: str, change: Any) -> None:
    m = build(name)
    data = inputs(m.views).map(lambda _, t: t.clone())
    options = change(data)
    with pytest.raises(InputError) as caught:
        data.call(m, **options)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
    if change in (heads, width, length, empty, rank, mask_shape):
        assert "shape" in str(caught.value)


@every
def test_second_view_is_asked_for_and_refused(name: str) -> None:
    m = build(name)
    data = inputs(2)
    if m.views == 2:
        data.q2 = None
    with pytest.raises(InputError, match="q2"):
        data.call(m)
    scores = torch.zeros(1, 4, 2, 2, dtype=torch.float64)
    with pytest.raises(InputError, match="scores2"):
        m.weights(scores, None if m.views == 2 else scores, causal=True)


@every
def test_positive_infinity_is_refused(name: str) -> None:
    m = build(name)
    scores = torch.zeros(1, 4, 2, 2, dtype=torch.float64)
    scores[..., 0, 0] = math.inf
    with pytest.raises(InputError, match="scores"):
        m.weights(scores, causal=True, **side(m, scores))


BAD_PARAMETERS = [
    ("entmax", {"alpha": 0.99}, "alpha"),
    ("entmax", {"alpha": math.nan}, "alpha"),
    ("entmax", {"alpha": [1.5, 0.5]}, "alpha"),
    ("entmax", {"alpha": "big"}, "alpha"),
    ("asentmax-theta", {"theta": 0.0}, "theta"),
    ("asentmax", {"heads": 0, "hidden_dim": 3}, "heads"),
    ("tda", {"lam": -0.1}, "lam"),
    ("tda", {"lam": 1.0}, "lam"),
    ("tda", {"p": 0.5}, "p"),
    ("tda", {"beta": 0.0}, "beta"),
    ("tda", {"kappa": 0.0}, "kappa"),
    ("tda", {"eps": -1.0}, "eps"),
    ("tda", {"lam": 0.0}, "lam"),
    ("tda", {"lam": torch.tensor(1.5)}, "lam"),
    ("tra", {"p": 0.99}, "p"),
    ("diff-softmax", {"lam": 1.0}, "lam"),
    ("diff-rela", {"lam": -0.5}, "lam"),
    ("diff-rela", {"p": 0.0}, "p"),
    ("dex", {"value_dim": 3, "lam": 1.0}, "lam"),
    ("rela", {"p": 0.9}, "p"),
    ("lssa", {"power": 0.5}, "power"),
    ("eta-logit", {"tau": 1.0}, "tau"),
    ("eta-weight", {}, "tau"),
    ("eta-weight", {"tau": 0.5, "alpha": 0.0}, "alpha"),
    ("eta-weight", {"tau": 0.5, "prune": "soft"}, "prune"),
    ("streaming-llm", {"window": 0}, "window"),
    ("h2o", {"recent": 0}, "recent"),
    ("sparse-transformer", {"stride": 4, "summary": 5}, "summary"),
    ("sparse-transformer", {"pattern": "dense"}, "pattern"),
    ("landmark", {"block": 0}, "block"),
    ("softmax", {"temperature": -1.0}, "temperature"),
    ("adaptive-temperature", {"coefficients": []}, "coefficients"),
    ("gated-softmax", {"heads": 1}, "gated-softmax"),
    ("softmax", {"tau": 1.0}, "softmax"),
]


@pytest.mark.parametrize(
    ("name", "parameters", "field"), BAD_PARAMETERS, ids=[f"{n}-{f}-{i}" for i, (n, _, f) in enumerate(BAD_PARAMETERS)]
)
def test_bad_parameters_name_the_argument(name: str, parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        get(name, **parameters)
    assert caught.value.field == field


def test_per_head_parameters_must_fit_the_heads() -> None:
    m = get("tda", beta=[0.5, 0.6, 0.7])
    with pytest.raises(InputError, match="beta"):
        inputs(2).call(m)


def test_registry_takes_a_mechanism_of_ones_own() -> None:
    class Uniform(Mechanism):
        def row_weights(self, scores: tuple[Tensor, ...], scope: Any) -> Tensor:
            return scope.visible.to(scores[0]) / scope.n

    register("uniform", Uniform)
    try:
        assert "uniform" in list_mechanisms()
        weights = inputs(1).call(get("uniform")).weights
        close(weights.sum(-1), torch.ones(2, 4, 9, dtype=torch.float64))
        with pytest.raises(InputError, match="name"):
            register("uniform", Uniform)
    finally:
        unregister("uniform")
    with pytest.raises(InputError, match="name"):
        resolve("uniform")
    with pytest.raises(InputError, match="aggregate"):
        register("nothing", object)
    with pytest.raises(InputError, match="name"):
        unregister("uniform")


def test_entry_points_are_found(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "own_mechanism-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-mechanism\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[theory_lab.mechanisms]\nown = own_mechanism:Own\nbroken = own_mechanism:x\n"
    )
    (tmp_path / "own_mechanism.py").write_text(
        "from theory_lab.attention.softmax import Softmax\nclass Own(Softmax):\n    pass\nx = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert {"own", "broken"} <= set(list_mechanisms())
    close(inputs(1).call(get("own")).output, inputs(1).call(get("softmax")).output)
    with pytest.raises(InputError, match="broken"):
        get("broken")


def test_hidden_states_are_asked_for() -> None:
    data = inputs(1)
    for name in ("gated-softmax", "asentmax"):
        with pytest.raises(InputError, match=f"x: None.*{HIDDEN}"):
            build(name)(data.q, data.k, data.v)
