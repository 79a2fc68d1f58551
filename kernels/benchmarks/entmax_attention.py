"""Time entmax attention beside FlashAttention-2 and AdaSplash-2, each only after its correctness gate.

    python kernels/benchmarks/entmax_attention.py --out results.csv [--adasplash FOLDER]

A row without a time failed its gate, or could not run; the note says why. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from bench import Bench
from mechanisms import Mechanism, adasplash, sdpa
from theory_kernels.entmax_attention import entmax_attention, operator
from theory_kernels.entmax_attention.api import ANY, ONE_AND_A_HALF, TWO
from theory_kernels.entmax_attention.plan import BLOCK
from timing import measure
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import normalize, scaled_dot_product_attention


def random_normal(
    heads: int, length: int, dim: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    """q, k, v of independent normal entries: scores with a standard deviation of 1."""
    g = torch.Generator(device).manual_seed(0)
    return [torch.randn((1, heads, length, dim), generator=g, device=device).to(dtype) for _ in range(3)]


def topics(
    share: float, heads: int, length: int, dim: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    """Blocks of 64 positions with one of 1 / share topics: rows look at keys of their own topic, 64 to a tile.

    A pair of one topic has a score of 8 more than another, beside normal noise with a standard deviation of 1.
    """
    g = torch.Generator(device).manual_seed(0)
    count, blocks = round(1 / share), -(-length // 64)
    # Coordinates of topics are apart from those of the noise.
    centers = torch.zeros((count, dim), device=device)
    centers[torch.arange(count), torch.arange(count)] = 8.0
    own = torch.randint(0, count, (heads, blocks), generator=g, device=device).repeat_interleave(64, 1)[:, :length]

    def draw() -> torch.Tensor:
        noise = torch.randn((heads, length, dim), generator=g, device=device) * (dim / (dim - count)) ** 0.25
        noise[..., :count] = 0.0
        return (noise + centers[own])[None].to(dtype)

    v = torch.randn((1, heads, length, dim), generator=g, device=device).to(dtype)
    return [draw(), draw(), v]


def unit_scores(heads: int, length: int, dim: int, device: torch.device) -> list[torch.Tensor]:
    """Unit queries and keys: at a scale of D^-0.5 every key is in the support, the worst case of lists."""
    q, k, v = random_normal(heads, length, dim, device, torch.float32)
    return [normalize(q, dim=-1).bfloat16(), normalize(k, dim=-1).bfloat16(), v.bfloat16()]


def mechanism(alpha: float) -> Mechanism:
    """This package's kernel."""

    def reference(q, k, v, first):  # type: ignore[no-untyped-def]
        return entmax_attention(q, k, v, alpha=alpha, query_offset=first, implementation="reference")

    return Mechanism(f"entmax {alpha:g}", 1, partial(entmax_attention, alpha=alpha), reference)


def facts(operands: list[torch.Tensor], alpha: float) -> dict[str, object]:
    """Share of the pairs of a block of 64 rows and a visible key that are listed, and how many blocks are not."""
    q, k, v = operands
    t = q.shape[2]
    one = torch.ones((1, 1, 1), device=q.device) * q.shape[-1] ** -0.5
    eps = torch.full((q.shape[1],), alpha - 1, device=q.device)
    mode = {1.5: ONE_AND_A_HALF, 2.0: TWO}.get(alpha, ANY)
    *_, counts = operator.entmax_forward(
        q, k, v, one, eps, None, 1, t, t, 0, False, True, mode, "triton", False, False, False, None
    )
    if not counts.numel():
        return {"paths": "no lists"}
    blocks = torch.arange(1, counts.shape[1] + 1, device=q.device) * BLOCK
    walked = counts < 0
    shown = torch.where(walked, blocks, counts).sum() / (blocks.sum() * counts.shape[0])
    return {"keys64": float(shown), "paths": f"{int(walked.sum())} of {counts.numel()} blocks unlisted"}


def decode(bench: Bench, heads: int = 16, length: int = 524_288, dim: int = 128) -> None:
    """One query against a long cache."""
    q, k, v = random_normal(heads, length, dim, bench.device)
    q = q[:, :, -1:].contiguous()

    def flash() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v)

    def ours(alpha: float) -> torch.Tensor:
        return entmax_attention(q, k, v, alpha=alpha, query_offset=length - 1)

    wide = [x.double() for x in (q, k, v)]
    for name, call, want in (
        ("FA2", flash, scaled_dot_product_attention(*wide)),
        *((f"entmax {a:g}", partial(ours, a),
           entmax_attention(*wide, alpha=a, query_offset=length - 1, implementation="reference"))
          for a in (1.25, 1.5)),
    ):  # fmt: skip
        size = float(want.norm())
        error, allowed = float((call().double() - want).norm()) / size, 2.0**-7
        row = {
            "case": "decode", "pattern": "normal", "mechanism": name, "direction": "forward", "batch": 1,
            "heads": heads, "groups": heads, "length": length, "dim": dim, "dtype": "bfloat16", "error": error,
            "allowed": allowed,
        }  # fmt: skip
        if not error <= allowed:
            bench.write({**row, "note": f"gate failed: {error / allowed:.2f} times the allowed error"})
            continue
        timing = measure(call)
        bench.write({
            **row, "ms": timing.median, "ms_p10": timing.low, "ms_p90": timing.high, "method": timing.method,
            "eager_ms": timing.eager,
        })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    parser.add_argument("--adasplash", type=Path, help="folder that holds the adasplash package")
    parser.add_argument("--adasplash-configs", type=int, default=3, help="configurations its autotuner may try")
    parser.add_argument("--quick", action="store_true", help="16,384 tokens at head dim 64, and decoding, only")
    options = parser.parse_args()
    device = torch.device("cuda")
    bench = Bench(options.out, device)
    flash, ours = sdpa()[0], mechanism(1.5)

    def both(
        case: str, pattern: str, mechanisms: list[Mechanism], operands: list[torch.Tensor], alpha: float = 1.5
    ) -> None:
        known = facts(operands, alpha)
        for one in mechanisms:
            for backward in (False, True):
                bench.row(case, pattern, one, operands, backward, known if one.name.startswith("entmax") else {})

    both("length", "normal", [flash, ours], random_normal(12, 16384, 64, device))
    both("active", "topics 10%", [flash, ours], topics(0.1, 12, 16384, 64, device))
    decode(bench)
    torch.cuda.empty_cache()
    if options.adasplash is not None:
        peer = adasplash(options.adasplash, options.adasplash_configs)
        both("length", "normal", [peer], random_normal(12, 16384, 64, device))
        both("active", "topics 10%", [peer], topics(0.1, 12, 16384, 64, device))
    if not options.quick:
        for length in (512, 1024, 2048, 4096, 8192, 32768, 65536):
            both("length", "normal", [flash, ours], random_normal(12, length, 64, device))
        for share in (0.05, 0.25):
            both("active", f"topics {share:.0%}", [ours], topics(share, 12, 16384, 64, device))
        both("active", "unit", [ours], unit_scores(12, 16384, 64, device))
        for alpha in (1.1, 1.25, 1.75, 2.0):
            both("alpha", "normal", [mechanism(alpha)], random_normal(12, 16384, 64, device), alpha)
        for dim in (80, 128, 256):
            both("dim", "normal", [flash, ours], random_normal(12, 8192, dim, device))
    bench.file.close()


if __name__ == "__main__":
    main()
