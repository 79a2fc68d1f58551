"""Checks that the public functions share."""

from __future__ import annotations

import importlib.util
import math
import os
from importlib import metadata

import torch

from .geometry import FLOAT_DTYPES, MAX_HEAD_DIM

_LEAST_TRITON = (3, 6)


def triton_is_usable() -> bool:
    """Whether Triton is installed, and not older than the kernels need; torch 2.9 brings 3.5 along, which is."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        major, minor = metadata.version("triton").split(".")[:2]
        return (int(major), int(minor)) >= _LEAST_TRITON
    except (metadata.PackageNotFoundError, ValueError):  # a build under another name
        return True


# Looked up once: torch.compile cannot trace the search.
HAS_TRITON = triton_is_usable()
NEEDS_TRITON = "implementation 'triton' needs triton 3.6 or later, which is not installed"
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
            raise ValueError(NEEDS_TRITON)
        if q.dtype == torch.float64:
            raise ValueError("implementation 'triton' takes float32, float16 or bfloat16, got torch.float64")
        interpreted = os.environ.get("TRITON_INTERPRET") == "1" and q.device.type == "cpu"
        if q.device.type != "cuda" and not interpreted:
            raise ValueError(f"implementation 'triton' needs CUDA tensors, got device {q.device}")
    return implementation


def check_float(name: str, x: torch.Tensor, *, data: bool = False) -> None:
    """TypeError or ValueError unless x is a dense tensor of a dtype that kernels take.

    ``data``: a tensor on the meta device will not do, as the function reads values or has no shape-only form.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got layout {x.layout}")
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be float32, float16, bfloat16 or float64, got {x.dtype}")
    if data and x.device.type == "meta":
        raise ValueError(f"{name} must hold data, got a tensor on the meta device")


def check_operands(
    names: tuple[str, ...], tensors: tuple[torch.Tensor, ...], *, mixed: bool = False, data: bool = False
) -> None:
    """The same of each, and that all are (B, H, T, D) of one device and, unless ``mixed``, of one dtype."""
    for name, x in zip(names, tensors, strict=True):
        check_float(name, x, data=data)
        if x.dim() != 4:
            raise ValueError(f"{name} must have shape (batch, heads, length, head dim), got {tuple(x.shape)}")
    first = tensors[0]
    for name, x in zip(names, tensors, strict=True):
        if x.device != first.device:
            raise ValueError(f"{name} must be on {first.device} like {names[0]}, got {x.device}")
        if x.dtype != first.dtype and not mixed:
            raise TypeError(f"{name} must be {first.dtype} like {names[0]}, got {x.dtype}")


def check_parameter(name: str, value: torch.Tensor, q: torch.Tensor) -> None:
    """TypeError or ValueError unless a tensor of thresholds, exponents or the like can stand beside q."""
    if not value.is_floating_point():
        raise TypeError(f"{name} must have a floating-point dtype, got {value.dtype}")
    if value.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got layout {value.layout}")
    if value.device.type == "meta" and q.device.type != "meta":
        raise ValueError(f"{name} must hold data for a q on {q.device}, got a tensor on the meta device")


def autocast_device(x: torch.Tensor) -> str:
    """The device type whose autocast counts for x: there is none for tensors without data."""
    return "cpu" if x.device.type == "meta" else x.device.type


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
