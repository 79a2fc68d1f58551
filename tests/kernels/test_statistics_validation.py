"""Wrong calls of attention_statistics get one clear line that names the argument."""

from __future__ import annotations

import pytest
import torch
from theory_kernels import attention_statistics

X = torch.randn(1, 2, 4, 8)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q": [1.0]}, TypeError, "q must be a tensor, got list"),
        ({"q": X.long()}, TypeError, "q must be float32.*got torch.int64"),
        ({"k": X.double()}, TypeError, "k must be torch.float32 like q, got torch.float64"),
        ({"q": X[0]}, ValueError, r"q must have shape \(batch, heads, length, head dim\), got \(2, 4, 8\)"),
        ({"k": X[..., :7]}, ValueError, "k must have head dim 8 like q"),
        ({"k": torch.randn(1, 3, 4, 8)}, ValueError, "q must have a multiple of 3 heads"),
        ({"weights": "relu"}, ValueError, "weights must be one of softmax, entmax, tra, tda, eta, got 'relu'"),
        ({"weights": "tda"}, ValueError, "q2 must be given for weights='tda'"),
        ({"weights": "tda", "q2": X}, ValueError, "k2 must be given for weights='tda'"),
        ({"q2": X, "k2": X}, ValueError, "q2 and k2 belong to weights='tda', got them with weights='softmax'"),
        ({"weights": "tda", "q2": X[:, :, :3], "k2": X}, ValueError, "q2 must be shaped like q"),
        ({"weights": "eta"}, ValueError, "eta_threshold must be given for weights='eta'"),
        ({"eta_threshold": 0.1}, ValueError, "eta_threshold belongs to weights eta, got it with weights='softmax'"),
        (
            {"weights": "eta", "eta_threshold": torch.ones(1, 2, 3)},
            ValueError,
            "eta_threshold must be a number or",
        ),
        ({"weights": "eta", "eta_threshold": 0.1, "eta_reading": "both"}, ValueError, "eta_reading must be one of"),
        ({"weights": "tra", "sinks": torch.ones(2)}, ValueError, "sinks belongs to weights softmax"),
        ({"weights": "tra", "softcap": 1.0}, ValueError, "softcap belongs to weights softmax, entmax, eta"),
        ({"softcap": 0.0}, ValueError, "softcap must be finite and > 0"),
        ({"scale": float("nan")}, ValueError, "scale must be finite"),
        ({"sinks": torch.ones(3)}, ValueError, r"sinks must be a scalar or have shape \(2,\), got \(3,\)"),
        ({"weights": "entmax", "alpha": 1.0}, ValueError, "alpha must be finite and > 1"),
        ({"weights": "entmax", "alpha": 2.5}, ValueError, r"alpha must lie in \(1, 2\], got 2.5"),
        ({"weights": "tra", "power": 0.5}, ValueError, "power must be finite and >= 1, got 0.5"),
        ({"weights": "tra", "kappa": 0.0}, ValueError, "kappa must be finite and > 0"),
        ({"weights": "tra", "beta": "1"}, TypeError, "beta must be a number, got str"),
        ({"weights": "tra", "beta": torch.ones(3)}, ValueError, r"beta must be a scalar or have shape \(2,\)"),
        ({"query_offset": 0.5}, TypeError, "query_offset must be an int"),
        ({"query_offset": torch.zeros(2, dtype=torch.int64)}, ValueError, r"query_offset must have shape \(1,\)"),
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"window": 1.5}, TypeError, "window must be an int, got float"),
        ({"lengths": torch.tensor([5])}, ValueError, "lengths must lie in 0..4, got values from 5 to 5"),
        ({"key_starts": torch.tensor([-1])}, ValueError, "key_starts must lie in 0..4"),
        ({"query_lengths": [4]}, TypeError, "query_lengths must be an integer tensor, got list"),
        ({"mask": torch.ones(1, 1, 4, 4)}, TypeError, "mask must be bool, True for visible, got torch.float32"),
        ({"mask": torch.ones(4, 4, dtype=torch.bool)}, ValueError, r"mask must have shape \(1 or 1, 2 or 1, 4, 4\)"),
        ({"near_zero": (0.0,)}, ValueError, "near_zero must be finite and > 0"),
        ({"levels": (float("inf"),)}, ValueError, "levels must be finite"),
        ({"moment_gap": -1}, ValueError, "moment_gap must be at least 0, got -1"),
        ({"need": ("row",)}, ValueError, "need must hold some of rows, columns, near_zero, scores, got 'row'"),
        ({"implementation": "fast"}, ValueError, "implementation must be one of .*, got 'fast'"),
        ({"screen_from": -1}, ValueError, "screen_from must be at least 0, got -1"),
    ],
)
def test_bad_input(changes: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        attention_statistics(**{"q": X, "k": X, **changes})


def test_mask_on_triton(triton: str, device: torch.device) -> None:
    x = X.to(device)
    with pytest.raises(ValueError, match="mask is taken by implementation 'chunked' and 'reference' only"):
        attention_statistics(
            x, x, mask=torch.ones((1, 1, 4, 4), dtype=torch.bool, device=device), implementation="triton"
        )


def test_one_name_for_need() -> None:
    assert attention_statistics(X, X, need="rows").column_mass is None
