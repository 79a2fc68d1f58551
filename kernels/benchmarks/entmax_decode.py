"""Time entmax decoding, one token against a cache, beside torch's attention; each only after its correctness gate.

    python kernels/benchmarks/entmax_decode.py --out entmax-decode.csv [--quick]
    python kernels/benchmarks/entmax_decode.py --dry-run

Scores from sparse to flat, rows solved by one program and by several, several depths of the pipeline of values: one row
of the table each; "as shipped" is what a call gets. ``--dry-run`` runs every variant once at small sizes in Triton's
interpreter, gates it, and times nothing.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
from theory_kernels.interpreter import let_numpy_index_tensors

# (tokens, query heads, key heads, head dim)
SHAPES = [(tokens, *heads) for heads in ((16, 16, 128), (12, 12, 64), (32, 8, 128)) for tokens in (8192, 65536, 524288)]
# (alpha, what queries are multiplied with): 29 keys have weight at the first, all of them at a scale near 0.
SCORES = [(1.5, 1.0), (1.5, 0.05), (1.5, 0.002), (1.25, 0.05), (2.0, 0.002)]
# Launch options of the package that a variant replaces.
VARIANTS: dict[str, dict[str, object]] = {
    "as shipped": {},
    "one program a row, 1 stage": {"SPLIT_FROM": 1 << 30, "VALUE_STAGES": 1},
    "one program a row, 3 stages": {"SPLIT_FROM": 1 << 30, "VALUE_STAGES": 3},
    "several, 1 stage": {"SPLIT_FROM": 1, "VALUE_STAGES": 1},
    "several, 3 turns": {"SPLIT_FROM": 1, "TURNS": (3, 3, 3)},
    "several, 5 turns": {"SPLIT_FROM": 1, "TURNS": (5, 5, 5)},
}


def sums_allowed(tokens: int) -> float:
    """How far the sum of a row's weights may be from 1, in the output's bf16 or as float32 sums of ``tokens`` terms."""
    return 2.0**-8 + tokens**0.5 * 2.0**-23


def rows_of(shape: tuple[int, int, int, int], device: torch.device, dry: bool) -> Iterator[dict[str, object]]:
    """Rows of the table for a shape, timed unless ``dry``."""
    from theory_kernels.entmax_attention import entmax_attention, launch
    from timing import measure

    tokens, h, g, d = shape
    dtype = torch.bfloat16
    gen = torch.Generator(device).manual_seed(0)
    q = torch.randn((1, h, 1, d), generator=gen, device=device).to(dtype)
    k, v = (torch.randn((1, g, tokens, d), generator=gen, device=device).to(dtype) for _ in range(2))
    ones = torch.ones_like(v[..., :1])
    facts: dict[str, object] = {"tokens": tokens, "heads": h, "groups": g, "dim": d}
    if not dry:
        peer = measure(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True))
        yield {**facts, "variant": "torch's softmax", "ms": f"{peer.median:.4f}", "eager_ms": f"{peer.eager:.4f}"}
    few = slice(0, h // g)
    for alpha, scale in SCORES[2:4] if dry else SCORES:
        x = scale * q
        # The query heads of one key head, in float64, and what an eager call in bf16 makes of them.
        cut = (x[:, few], k[:, :1], v[:, :1])
        exact = entmax_attention(
            *(y.double() for y in cut), alpha=alpha, query_offset=tokens - 1, implementation="chunked"
        )
        eager = entmax_attention(*cut, alpha=alpha, query_offset=tokens - 1, implementation="reference")
        size = float(exact.norm())
        allowed = 2 * (float((eager.double() - exact).norm()) / size + torch.finfo(dtype).eps)
        for name, options in VARIANTS.items():
            with ExitStack() as stack:
                # Rows of the few tiles of a dry run are shared out too.
                for option, value in {**options, **({"ALONE": 0} if dry else {})}.items():
                    stack.enter_context(mock.patch.object(launch, option, value))

                def call(v: torch.Tensor = v, x: torch.Tensor = x, alpha: float = alpha) -> torch.Tensor:
                    return entmax_attention(x, k, v, alpha=alpha, query_offset=tokens - 1, implementation="triton")

                row = {**facts, "alpha": alpha, "scale": scale, "variant": name}
                try:
                    error = float((call()[:, few].double() - exact).norm()) / size
                    off = float((call(ones).float() - 1.0).abs().max())
                    row |= {"error": f"{error:.2e}", "allowed": f"{allowed:.2e}", "sum_error": f"{off:.2e}"}
                    if not (error <= allowed and off <= sums_allowed(tokens)):
                        yield {**row, "note": "gate failed"}
                    elif dry:
                        yield row
                    else:
                        took = measure(call, 40.0)
                        yield {**row, "ms": f"{took.median:.4f}", "eager_ms": f"{took.eager:.4f}"}
                except Exception as failure:
                    yield {**row, "note": " ".join(f"not run: {type(failure).__name__}: {failure}".split())[:100]}


FIELDS = [
    "tokens", "heads", "groups", "dim", "alpha", "scale", "variant", "ms", "eager_ms", "error", "allowed", "sum_error",
    "note", "gpu",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="CSV to write")
    parser.add_argument("--quick", action="store_true", help="the longest cache only")
    parser.add_argument("--dry-run", action="store_true", help="small sizes in the interpreter, no times")
    args = parser.parse_args()
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
        let_numpy_index_tensors()
        shapes, device = [(130, 2, 1, 16)], torch.device("cpu")
    elif torch.cuda.is_available():
        shapes, device = [s for s in SHAPES if not args.quick or s[0] == SHAPES[-1][0]], torch.device("cuda")
    else:
        parser.error("needs a CUDA device, or --dry-run")
    file = args.out.open("w", newline="") if args.out else None
    writer = csv.DictWriter(file or sys.stdout, FIELDS)
    writer.writeheader()
    gpu = "" if args.dry_run else torch.cuda.get_device_name()
    failed = 0
    with torch.no_grad():
        for shape in shapes:
            for row in rows_of(shape, device, args.dry_run):
                writer.writerow({**row, "gpu": gpu})
                failed += "note" in row
                (file or sys.stdout).flush()
                if file is not None:
                    print(*row.values(), sep=", ", flush=True)
    if file is not None:
        file.close()
    if failed:
        sys.exit(f"{failed} rows without a time: see their notes")


if __name__ == "__main__":
    main()
