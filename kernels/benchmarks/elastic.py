"""Elastic attention on a GPU: correct first, then times beside FlashAttention-2.

    python kernels/benchmarks/elastic.py --out elastic.csv [--sweep]

bf16, 12 heads of 64, causal, normal inputs, thresholds from a predictor. Gate: a block of rows against the float64
reference, error at most twice that of the reference in bf16 plus bf16's rounding. ``--sweep`` times tile shapes.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from theory_kernels import elastic_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent))
from timing import measure

HEADS, DIM, ROWS = 12, 64, 64


def operands(length: int) -> tuple[torch.Tensor, ...]:
    """q, k, v in bf16, the predictor (w, b) in float32, and the gradient of the output."""
    g = torch.Generator("cuda").manual_seed(0)
    shape = (1, HEADS, length, DIM)
    q, k, v, grad = (torch.randn(shape, generator=g, device="cuda").bfloat16() for _ in range(4))
    w = 0.1 * torch.randn(HEADS, DIM, generator=g, device="cuda")
    return q, k, v, w, torch.randn(HEADS, generator=g, device="cuda"), grad


def gate(call: Callable[..., torch.Tensor], length: int, reading: str) -> float:
    """Error over allowed error of the last rows' output, at most 1."""
    q, k, v, w, b, _ = operands(length)
    got = call(q, k, v, w, b)[:, :, -ROWS:].double()
    errors = []
    for dtype in (torch.float64, torch.bfloat16):
        out = elastic_attention(
            q[:, :, -ROWS:].to(dtype), k.to(dtype), v.to(dtype), predictor=(w, b), reading=reading,
            query_offset=length - ROWS, implementation="reference",
        )  # fmt: skip
        errors.append(out.double())
    exact, eager = errors
    allowed = 2.0 * ((eager - exact).norm() + torch.finfo(torch.bfloat16).eps * exact.norm())
    return float((got - exact).norm() / allowed)


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def elastic(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: torch.Tensor, b: torch.Tensor, reading: str
) -> torch.Tensor:
    return elastic_attention(q, k, v, predictor=(w, b), reading=reading)


def both(call: Callable[..., torch.Tensor], length: int) -> Callable[[], object]:
    """Forward and backward of one call."""
    *leaves, grad = operands(length)
    leaves = [x.requires_grad_() for x in leaves]

    def step() -> object:
        return torch.autograd.grad(call(*leaves), leaves, grad, allow_unused=True)

    return step


def sweep(length: int) -> None:
    from theory_kernels.attention.launch import Tiles
    from theory_kernels.elastic import launch

    original = launch.tiles
    q, k, v, w, b, _ = operands(length)
    for shape in ((64, 64, 4, 3), (128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 8, 2), (128, 128, 8, 2), (128, 32, 4, 3)):
        launch.tiles = lambda kind, dim, dtype, s=shape: Tiles(*s)
        try:
            took = measure(partial(elastic, q, k, v, w, b, "logit"), 20.0).median
            print(f"sweep forward {shape}: {took:.3f} ms", flush=True)
        except Exception as error:
            print(f"sweep forward {shape}: {type(error).__name__}", flush=True)
    for shape in ((64, 64, 4, 1), (64, 64, 4, 2), (64, 64, 8, 1), (64, 64, 8, 2), (32, 64, 4, 2), (64, 32, 4, 2)):
        launch.tiles = lambda kind, dim, dtype, s=shape: Tiles(*s) if kind == "backward" else original(kind, dim, dtype)
        try:
            took = measure(both(partial(elastic, reading="logit"), length), 20.0).median
            print(f"sweep forward+backward {shape}: {took:.3f} ms", flush=True)
        except Exception as error:
            print(f"sweep forward+backward {shape}: {type(error).__name__}", flush=True)
    launch.tiles = original


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="CSV to write")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--sweep", action="store_true", help="time tile shapes at 16,384 instead")
    args = parser.parse_args()
    if args.sweep:
        sweep(16384)
        return
    rows = []
    for length in args.lengths:
        for name in ("logit", "weight", "FlashAttention-2"):
            call = flash if name == "FlashAttention-2" else partial(elastic, reading=name)
            ratio = "" if call is flash else f"{gate(call, length, name):.3f}"
            row: dict[str, object] = {"length": length, "implementation": name, "error_over_allowed": ratio}
            if ratio and not float(ratio) <= 1.0:
                row |= {"forward_ms": "", "both_ms": "", "device": torch.cuda.get_device_name()}
            else:
                *tensors, _ = operands(length)
                took = measure(partial(call, *tensors), 50.0)
                whole = measure(both(call, length), 50.0)
                row |= {
                    "forward_ms": f"{took.median:.4f}", "both_ms": f"{whole.median:.4f}",
                    "device": torch.cuda.get_device_name(),
                }  # fmt: skip
            print(*row.values(), sep=", ", flush=True)
            rows.append(row)
    if args.out:
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
