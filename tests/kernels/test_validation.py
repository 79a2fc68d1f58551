"""Wrong calls get one clear line."""

from __future__ import annotations

import pytest
import torch
from theory_kernels import (
    Noise,
    attention_statistics,
    consensus_counts,
    differential_threshold_attention,
    elastic_attention,
    elastic_decode,
    entmax,
    entmax_attention,
    exceedance_counts,
    make_block_bounds,
    row_normalizers,
    sparse_rows,
    survivor_counts,
    threshold_attention,
    validation,
)

X = torch.randn(1, 2, 4, 8)


def _call(**changes):
    arguments = {"q": X, "k": X, "v": X, "beta": 0.5, **changes}
    return threshold_attention(**arguments)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q": [1.0]}, TypeError, "q must be a tensor, got list"),
        ({"q": torch.ones(1, 2, 4, 8, dtype=torch.int64)}, TypeError, "q must be float32.*got torch.int64"),
        ({"k": X.double()}, TypeError, "k must be torch.float32 like q, got torch.float64"),
        ({"q": X[0]}, ValueError, r"q must have shape \(batch, heads, length, head dim\), got \(2, 4, 8\)"),
        ({"k": X[..., :7]}, ValueError, r"k must have head dim 8 like q, got \(1, 2, 4, 7\)"),
        ({"k": torch.randn(2, 2, 4, 8)}, ValueError, "k must have batch 1 like q"),
        ({"k": torch.randn(1, 3, 4, 8), "v": torch.randn(1, 3, 4, 8)}, ValueError, "q must have a multiple of 3"),
        ({"v": X[:, :, :3]}, ValueError, r"v must have shape \(1, 2, 4\) \+ \(E,\) like k"),
        ({"q": torch.randn(1, 1, 2, 300), "k": torch.randn(1, 1, 2, 300)}, ValueError, "head dim of 1 to 256"),
        ({"kappa": 0.0}, ValueError, "kappa must be finite and > 0, got 0.0"),
        ({"power": 0.5}, ValueError, "power must be finite and >= 1, got 0.5"),
        ({"power": float("nan")}, ValueError, "power must be finite"),
        ({"rms_eps": 0.0}, ValueError, "rms_eps must be finite and > 0"),
        ({"beta": "1"}, TypeError, "beta must be a number or a tensor, got str"),
        ({"beta": torch.ones(3)}, ValueError, r"beta must be a scalar or have shape \(2,\), got \(3,\)"),
        ({"beta": torch.ones(2, dtype=torch.int64)}, TypeError, "beta must have a floating-point dtype"),
        ({"query_offset": 0.5}, TypeError, "query_offset must be an int"),
        ({"lengths": torch.tensor([5])}, ValueError, "lengths must lie in 0..4, got values from 5 to 5"),
        ({"lengths": torch.tensor([1.0])}, TypeError, "lengths must be an integer tensor, got dtype torch.float32"),
        ({"lengths": torch.tensor([1, 2])}, ValueError, r"lengths must have shape \(1,\), got \(2,\)"),
        ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, r"cu_seqlens must rise from 0 to 4, got \[0, 5\]"),
        ({"cu_seqlens_k": torch.tensor([0, 4])}, ValueError, "cu_seqlens_k needs cu_seqlens"),
        ({"implementation": "fast"}, ValueError, "implementation must be one of .*, got 'fast'"),
        ({"screen_from": -1}, ValueError, "screen_from must be at least 0, got -1"),
    ],
)
def test_attention(changes: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        _call(**changes)


def test_views_must_match() -> None:
    with pytest.raises(ValueError, match=r"q2 must be shaped like q1 \(1, 2, 4, 8\), got \(1, 2, 3, 8\)"):
        differential_threshold_attention(X, X, X[:, :, :3], X, X, beta=1.0, lam=0.5)
    with pytest.raises(ValueError, match="k2 must be shaped like k1"):
        consensus_counts(X, X, X, X[:, :, :3], 0.1)


def test_float64_on_triton(triton: str) -> None:
    with pytest.raises(ValueError, match=r"takes float32, float16 or bfloat16, got torch\.float64"):
        threshold_attention(X.double(), X.double(), X.double(), beta=1.0, implementation="triton")


def test_cpu_tensors_on_triton(triton: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="'triton' needs CUDA tensors, got device cpu"):
        _call(implementation="triton")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("gaussian", 0.1, 4, 4, 0), TypeError, "noise must be a theory_kernels.Noise, got str"),
        ((Noise("cauchy"), 0.1, 4, 4, 0), ValueError, "noise.family must be one of .*, got 'cauchy'"),
        ((Noise(variance=0.0), 0.1, 4, 4, 0), ValueError, "noise.variance must be finite and > 0"),
        ((Noise("student-t", dof=2.0), 0.1, 4, 4, 0), ValueError, "noise.dof must be finite and > 2"),
        ((Noise(correlation=1.5), 0.1, 4, 4, 0), ValueError, r"noise.correlation must lie in \[-1, 1\]"),
        ((Noise(), [0.1, 0.2], [4, 4, 4], 4, 0), ValueError, "tau must have 1 or 3 entries, got 2"),
        ((Noise(), 0.1, -1, 4, 0), ValueError, "length must lie in 0"),
        ((Noise(), 0.1, 4.0, 4, 0), TypeError, "length must hold int values, got float"),
        ((Noise(), 0.1, 4, -4, 0), ValueError, "trials must lie in 0"),
        ((Noise(), 0.1, 4, 4, -1), ValueError, "seed must lie in 0"),
        ((Noise(), float("nan"), 4, 4, 0), ValueError, "tau must not be NaN"),
    ],
)
def test_exceedances(arguments: tuple, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        exceedance_counts(*arguments)


def test_counts() -> None:
    with pytest.raises(TypeError, match="tau must be a number or a tensor, got str"):
        survivor_counts(X, X, "0.1")
    with pytest.raises(ValueError, match=r"tau must broadcast to \(1, 2, 4\), got \(3,\)"):
        survivor_counts(X, X, torch.ones(3))
    with pytest.raises(TypeError, match="q must be float32"):
        survivor_counts(X.long(), X.long(), 0.1)


# With an operator behind them they give shapes where there is no data.
REGISTERED = {
    "threshold_attention": lambda x: threshold_attention(x, x, x, beta=0.3),
    "differential_threshold_attention": lambda x: differential_threshold_attention(x, x, x, x, x, beta=0.3, lam=0.2),
    "entmax_attention": lambda x: entmax_attention(x, x, x, theta=torch.ones(2)),
    "elastic_attention": lambda x: elastic_attention(x, x, x, tau=0.2),
    "entmax": lambda x: entmax(x, 1.3),
    "elastic_decode": lambda x: elastic_decode(x, x, x, None, 0.1),
    "make_block_bounds": lambda x: make_block_bounds(x, "norm", block=16).norm.expand(x.shape[:3]),
}
OTHERS = {
    "survivor_counts": lambda x: survivor_counts(x, x, 0.1),
    "consensus_counts": lambda x: consensus_counts(x, x, x, x, 0.1),
    "attention_statistics": lambda x: attention_statistics(x, x),
    "sparse_rows": lambda x: sparse_rows(x, x, weights="entmax"),
    "row_normalizers": lambda x: row_normalizers(x, x),
}


@pytest.mark.parametrize("name", [*REGISTERED, *OTHERS])
def test_what_no_function_takes(name: str) -> None:
    call = (REGISTERED | OTHERS)[name]
    with pytest.raises(ValueError, match=r"must be a dense tensor, got layout torch\.sparse_coo"):
        call(X.to_sparse())
    for dtype in (torch.int32, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match=f"must be float32, float16, bfloat16 or float64, got {dtype}"):
            call(X.to(dtype))


@pytest.mark.parametrize("name", OTHERS)
def test_functions_that_need_data_say_so(name: str) -> None:
    with pytest.raises(ValueError, match="must hold data, got a tensor on the meta device"):
        OTHERS[name](X.to("meta"))


@pytest.mark.parametrize("name", REGISTERED)
def test_shapes_without_data(name: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    made = REGISTERED[name](X.to("meta")) if name != "entmax_attention" else entmax_attention(*[X.to("meta")] * 3)
    assert made.shape[:3] == X.shape[:3]
    assert made.device.type == "meta"
    if name != "entmax_attention":
        with FakeTensorMode():
            assert REGISTERED[name](torch.empty(X.shape)).shape == made.shape


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: threshold_attention(X, X, X, beta=m), "beta must hold data for a q on cpu"),
        (lambda m: entmax_attention(X, X, X, alpha=m), "alpha must hold data for a q on cpu"),
        (lambda m: elastic_attention(X, X, X, tau=m), "tau must hold data for a q on cpu"),
        (lambda m: elastic_decode(X, X, X, None, m), "tau must hold data for a q on cpu"),
        (lambda m: entmax_attention(X, X.to("meta"), X), "k must be on cpu like q, got meta"),
        (lambda m: elastic_decode(X.to("meta"), X, X, None, 0.1), "q must be on cpu like k_cache, got meta"),
    ],
)
def test_operands_that_lie_apart(call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(torch.ones(2, device="meta"))


@pytest.mark.parametrize(
    ("version", "usable"), [("3.5.1", False), ("2.3.0", False), ("3.6.0", True), ("3.10.1", True), ("4.0+x", True)]
)
def test_a_triton_too_old_for_the_kernels_is_none(version: str, usable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.9 brings triton 3.5 along: everything must run without it then."""
    monkeypatch.setattr(validation.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(validation.metadata, "version", lambda name: version)
    assert validation.triton_is_usable() is usable
    monkeypatch.setattr(validation, "HAS_TRITON", usable)
    if not usable:
        with pytest.raises(ValueError, match=r"needs triton 3\.6 or later"):
            _call(implementation="triton")
    monkeypatch.setattr(validation.importlib.util, "find_spec", lambda name: None)
    assert not validation.triton_is_usable()
