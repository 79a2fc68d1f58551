"""Checks that the public functions share."""

from __future__ import annotations

import importlib.util
import math
import os

import torch

from .geometry import MAX_HEAD_DIM

# Looked up once: torch.compile cannot trace the search.
HAS_TRITON = importlib.util.find_spec("triton") is not None
IMPLEMENTATIONS = ("auto", "reference", "chunked", "triton")


def check_number(name: str, value: float, low: float, inclusive: bool) -> float:
    """Return value as a float; ValueError unless it is finite and above ``low``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    value = float(value)
    if not math.isfinite(value) or value < low or (value == low and not inclusive):
        raise ValueError(f"{name} must be finite and {'>=' if inclusive else '>'} {low:g}, got {value!r}")
    return value


def choose(implementation: str, q: torch.Tensor) -> str:
    """Resolve "auto" and refuse what an implementation cannot do."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    if implementation == "auto":
        fits = q.device.type == "cuda" and q.dtype != torch.float64 and HAS_TRITON
        return "triton" if fits else "chunked"
    if implementation == "triton":
        if not HAS_TRITON:
            raise ValueError("implementation 'triton' needs the triton package, which is not installed")
        if q.dtype == torch.float64:
            raise ValueError("implementation 'triton' takes float32, float16 or bfloat16, got torch.float64")
        interpreted = os.environ.get("TRITON_INTERPRET") == "1" and q.device.type == "cpu"
        if q.device.type != "cuda" and not interpreted:
            raise ValueError(f"implementation 'triton' needs CUDA tensors, got device {q.device}")
    return implementation


def check_heads(q_name: str, q: torch.Tensor, k_name: str, k: torch.Tensor) -> None:
    """ValueError unless q (B, H, T, D) and k (B, G, S, D) fit together."""
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"{k_name} must have batch {q.shape[0]} like {q_name}, got {tuple(k.shape)}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"{k_name} must have head dim {q.shape[3]} like {q_name}, got {tuple(k.shape)}")
    if not 1 <= q.shape[3] <= MAX_HEAD_DIM:
        raise ValueError(f"{q_name} must have a head dim of 1 to {MAX_HEAD_DIM}, got {tuple(q.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q_name} must have a multiple of {k.shape[1]} heads, got {tuple(q.shape)}")
