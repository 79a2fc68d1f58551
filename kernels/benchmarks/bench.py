"""Time the kernels and their peers, each only after it has passed its correctness gate.

    python kernels/benchmarks/bench.py --out results.csv [--authors FILE] [--adasplash FOLDER] [--flex]

A row without a time failed its gate, or could not run; the note says why. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
from functools import partial
from pathlib import Path

import patterns
import torch
import triton
from mechanisms import BETA, Mechanism, adasplash, authors, flex, ours, sdpa
from theory_kernels import Noise, exceedance_counts, threshold_attention
from theory_kernels.attention import plan
from theory_kernels.attention.operator import threshold_forward
from timing import Timing, ceiling, measure
from torch.nn.attention import SDPBackend, sdpa_kernel

FIELDS = (
    "case", "pattern", "mechanism", "direction", "batch", "heads", "groups", "length", "dim", "dtype", "ms",
    "ms_p10", "ms_p90", "method", "eager_ms", "tiles64", "keys64", "entries", "paths", "tflops", "of_ceiling", "error",
    "allowed", "peak_mb", "gpu", "date", "torch", "triton", "note",
)  # fmt: skip
GATE_ROWS = 64


def _norm(x: torch.Tensor) -> float:
    return float(x.double().norm())


def gate(mechanism: Mechanism, operands: list[torch.Tensor], backward: bool) -> tuple[float, float, str]:
    """Worst ratio of error to allowed error (<= 1 passes), over two row blocks; worst relative error; and where.

    Allowed: 2 (error of the reference run in the low precision + rounding band), against the reference in
    float64. The gradient of the output is zero outside the block, so that the gradients of all keys and
    values are sums over its rows alone.
    """
    length = operands[0].shape[2]
    worst, relative, where = 0.0, 0.0, ""
    names = ["output", *("dq" if i % 2 == 0 else "dk" for i in range(len(operands) - 1)), "dv"]
    for first in sorted({max(0, length // 2 - GATE_ROWS), length - GATE_ROWS}):
        rows = slice(first, first + GATE_ROWS)
        runs = []
        for dtype in (torch.float64, operands[0].dtype):
            cut = [x[:, :, rows] if i % 2 == 0 and i < len(operands) - 1 else x for i, x in enumerate(operands)]
            leaves = [x.detach().to(dtype).requires_grad_(backward) for x in cut]
            out = mechanism.reference(*leaves, first)
            g = torch.Generator(out.device).manual_seed(first)
            do = torch.randn(out.shape, generator=g, device=out.device).to(operands[0].dtype)
            grads = torch.autograd.grad(out, leaves, do.to(out.dtype)) if backward else ()
            runs.append([out.detach(), *grads])
        leaves = [x.detach().requires_grad_(backward) for x in operands]
        out = mechanism.call(*leaves)
        grads = ()
        if backward:
            whole = torch.zeros_like(out)
            whole[:, :, rows] = do
            grads = torch.autograd.grad(out, leaves, whole)
        got = [out.detach()[:, :, rows]]
        got += [x[:, :, rows] if i % 2 == 0 and i < len(operands) - 1 else x for i, x in enumerate(grads)]
        eps = torch.finfo(operands[0].dtype).eps
        for name, have, want, eager in zip(names if backward else names[:1], got, *runs, strict=True):
            error, size = _norm(have.double() - want), _norm(want)
            allowed = 2 * (_norm(eager.double() - want) + eps * size)
            ratio = error / allowed if allowed else float(error > 0)
            ratio = ratio if math.isfinite(error) else math.inf
            if ratio > worst:
                worst, where = ratio, name
            relative = max(relative, error / size if size else error)
    return worst, relative, where


def screened(operands: list[torch.Tensor], tiles_only: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Bitmap of tiles and paths of the heads, as the screen of a training call makes them."""
    q, k, v = operands[0], operands[1], operands[-1]
    length = q.shape[2]
    beta = torch.full((q.shape[1],), BETA, device=q.device)
    q2, k2 = (operands[2], operands[3]) if len(operands) == 5 else (None, None)
    old = plan.DENSE_FROM, plan.LIST_FROM
    if tiles_only:
        plan.DENSE_FROM = plan.LIST_FROM = 10**6
    _, _, words, _, _, paths = threshold_forward(
        q, k, q2, k2, v, beta, None if q2 is None else beta, None, q.shape[0], length, length, 0, False, True, 1.0,
        2.0, True, None, "triton", 0,
    )  # fmt: skip
    plan.DENSE_FROM, plan.LIST_FROM = old
    return words, paths


def tile_fraction(operands: list[torch.Tensor]) -> float:
    """Share of the causal 64x64 tiles that the screen keeps (rounded up by its margin), union of the views."""
    q = operands[0]
    words, _ = screened(operands, True)
    bits = sum(int(((words >> i) & 1).sum()) for i in range(32))
    n = -(-q.shape[2] // 64)
    return bits / (q.shape[0] * q.shape[1] * n * (n + 1) / 2)


def path_counts(operands: list[torch.Tensor]) -> str:
    """Query heads on the paths of tiles, lists and everything, then key heads, where the call is screened."""
    _, paths = screened(operands, False)
    heads = operands[0].shape[0] * operands[0].shape[1]
    parts = [paths[:heads].tolist(), paths[heads:].tolist()]
    return " ".join("/".join(str(part.count(code)) for code in (plan.TILES, plan.LISTS, plan.DENSE)) for part in parts)


class Bench:
    """Collects rows; every timing passes through :meth:`row`."""

    def __init__(self, out: Path, device: torch.device):
        self.device, self.path = device, out
        out.parent.mkdir(parents=True, exist_ok=True)
        self.file = out.open("w", newline="")
        self.writer = csv.DictWriter(self.file, FIELDS)
        self.writer.writeheader()
        self.top = ceiling(device)
        self.common = {
            "gpu": torch.cuda.get_device_name(device), "date": datetime.date.today().isoformat(),
            "torch": torch.__version__, "triton": triton.__version__,
        }  # fmt: skip
        self.write({"case": "ceiling", "note": "bf16 matrix product, 8192 cubed", "tflops": self.top / 1e12})

    def write(self, row: dict) -> None:
        row = {k: f"{v:.5g}" if isinstance(v, float) else v for k, v in {**self.common, **row}.items()}
        self.writer.writerow(row)
        self.file.flush()
        shown = ("case", "pattern", "mechanism", "direction", "length", "ms", "eager_ms", "tiles64", "paths", "note")
        print(" ".join(f"{row.get(k, '')!s:>9}" for k in shown), flush=True)

    def row(
        self, case: str, pattern: str, mechanism: Mechanism, operands: list[torch.Tensor], backward: bool, facts: dict
    ) -> None:
        """Gate, time and record one direction of one mechanism."""
        q, k = operands[0], operands[1]
        length, dim = q.shape[2], q.shape[3]
        row = {
            "case": case, "pattern": pattern, "mechanism": mechanism.name,
            "direction": "forward+backward" if backward else "forward", "batch": q.shape[0], "heads": q.shape[1],
            "groups": k.shape[1], "length": length, "dim": dim, "dtype": str(q.dtype).removeprefix("torch."), **facts,
        }  # fmt: skip
        try:
            ratio, relative, where = gate(mechanism, operands, backward)
            torch.cuda.empty_cache()
            row |= {"error": relative, "allowed": relative / ratio if ratio else math.inf}
            if not ratio <= 1.0:
                self.write({**row, "note": f"gate failed: {where} has {ratio:.2f} times the allowed error"})
                return
            leaves = [x.detach().requires_grad_(backward) for x in operands]
            do = torch.randn_like(mechanism.call(*operands))

            def call() -> object:
                out = mechanism.call(*leaves)
                return torch.autograd.grad(out, leaves, do) if backward else out

            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            torch.cuda.synchronize()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
            timing: Timing = measure(call)
        except Exception as error:
            torch.cuda.synchronize()
            self.write({**row, "note": f"not run: {type(error).__name__}: {str(error)[:80]}"})
            return
        # Operations of the dense causal computation: what a dense kernel would have to do in this time.
        flops = (3.5 if backward else 1.0) * 2.0 * q.shape[0] * q.shape[1] * length**2 * dim * mechanism.views
        rate = flops / (timing.median * 1e-3)
        self.write({
            **row, "ms": timing.median, "ms_p10": timing.low, "ms_p90": timing.high, "method": timing.method,
            "eager_ms": timing.eager, "tflops": rate / 1e12, "of_ceiling": rate / self.top, "peak_mb": peak,
        })  # fmt: skip

    def both(self, case: str, pattern: str, mechanisms: list[Mechanism], one, two=None, facts=None) -> None:
        for mechanism in mechanisms:
            operands = one if mechanism.views == 1 else two
            if operands is None:
                continue
            kept = dict(facts or {})
            if mechanism.name in ("TRA", "TDA"):
                kept["tiles64"] = tile_fraction(operands)
                if operands[0].shape[2] >= plan.SCREEN_FROM_TRAINING:
                    kept["paths"] = path_counts(operands)
            for backward in (False, True):
                self.row(case, pattern, mechanism, operands, backward, kept)


def decode(bench: Bench) -> None:
    """One new token against a cache of 32,768 keys: 8 sequences, 32 query heads, 8 key heads, head dim 128."""
    device, length = bench.device, 32768
    g = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn((8, h, t, 128), generator=g, device=device).to(torch.bfloat16)
        for h, t in ((32, 1), (8, length), (8, length))
    )
    unit_q, unit_k = (torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype) for x in (q, k))
    attend = partial(threshold_attention, beta=BETA, query_offset=length - 1)

    def flash() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    wide = [x.double() for x in (q, k, v)]
    softmax = torch.nn.functional.scaled_dot_product_attention(*wide, enable_gqa=True)
    exact = attend(*wide, implementation="reference")
    eager = attend(q, k, v, implementation="reference")
    for name, call, want, low in (
        ("FA2", flash, softmax, None),
        ("TRA", lambda: attend(q, k, v), exact, eager),
        ("TRA, normalized cache", lambda: attend(unit_q, unit_k, v, normalize=False), exact, eager),
    ):
        size = _norm(want)
        allowed = 2 * ((_norm(low.double() - want) if low is not None else 0.0) + 2**-7 * size)
        error = _norm(call().double() - want)
        row = {
            "case": "decode", "pattern": "random", "mechanism": name, "direction": "forward", "batch": 8, "heads": 32,
            "groups": 8, "length": length, "dim": 128, "dtype": "bfloat16", "error": error / size,
            "allowed": allowed / size,
        }  # fmt: skip
        if not error <= allowed:
            bench.write({**row, "note": f"gate failed: {error / allowed:.2f} times the allowed error"})
            continue
        timing = measure(call)
        bench.write({
            **row, "ms": timing.median, "ms_p10": timing.low, "ms_p90": timing.high, "method": timing.method,
            "eager_ms": timing.eager,
        })  # fmt: skip


def exceedances(bench: Bench) -> None:
    """Gaussian decisions a second, against torch.randn plus compare."""
    device, n, trials = bench.device, 10**6, 10**4
    tau = math.sqrt(2 * math.log(n) / 64)
    noise = Noise("gaussian", 1 / 64)
    counts = exceedance_counts(noise, tau, n, trials, 1, device=device).first.double()
    want = n * 0.5 * math.erfc(tau * 8 / math.sqrt(2))
    if abs(float(counts.mean()) - want) > 5 * math.sqrt(want / trials):
        bench.write({"case": "exceedances", "note": f"gate failed: mean {float(counts.mean()):.5f}, want {want:.5f}"})
        return
    few = 64
    x = torch.empty((few, n), device=device)

    def plain() -> object:
        return (x.normal_() > tau * 8).sum(1)

    for name, draws, timing in (
        ("exceedance_counts", n * trials, measure(lambda: exceedance_counts(noise, tau, n, trials, 1, device=device))),
        ("torch.randn + compare", n * few, measure(plain)),
    ):
        bench.write({
            "case": "exceedances", "pattern": "gaussian", "mechanism": name, "length": n, "ms": timing.median,
            "ms_p10": timing.low, "ms_p90": timing.high, "method": timing.method,
            "note": f"{draws / timing.median * 1e3:.3g} draws/s",
        })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    parser.add_argument("--authors", type=Path, help="the TDA authors' Triton file")
    parser.add_argument("--adasplash", type=Path, help="folder that holds the adasplash package")
    parser.add_argument("--adasplash-configs", type=int, default=3, help="configurations its autotuner may try")
    parser.add_argument("--flex", action="store_true", help="include FlexAttention (compiles for a minute)")
    options = parser.parse_args()
    device, dtype = torch.device("cuda"), torch.bfloat16
    bench = Bench(options.out, device)

    def case(name: str, pattern: str, make, length: int, mechanisms: list[Mechanism], second: bool = True) -> None:
        q, k, v = make(12, length, 64, dtype, 0, device)
        q2, k2, _ = make(12, length, 64, dtype, 1, device)
        facts = {}
        if length <= 16384:
            rows = torch.arange(1, length + 1, device=device, dtype=torch.float64)
            tau = BETA * (2 * rows.log() / 64).sqrt().float()
            found = patterns.fractions(q, k, tau)
            facts |= {"entries": found["entries"], "keys64": found["keys64"]}
        bench.both(name, pattern, mechanisms, [q, k, v], [q, k, q2, k2, v] if second else None, facts)

    base = [*sdpa(), *ours()]
    case("length", "random", patterns.random_scores, 65536, base)
    extra = list(base)
    if options.authors is not None:
        extra += authors(options.authors)
    case("length", "random", patterns.random_scores, 16384, extra)
    for length in (512, 1024, 2048, 4096, 8192, 32768):
        case("length", "random", patterns.random_scores, length, base)
    case("active", "trained", patterns.trained_regime, 16384, base, True)
    for length in (16384, 65536):
        for share in (0.01, 0.1, 0.5, 1.0):
            case("active", f"stripes {share:.0%}",
                 lambda *a, share=share: patterns.planted_stripes(share, *a), length, ours()[:1], False)  # fmt: skip
    g = torch.Generator(device).manual_seed(0)
    for length in (8192, 16384):
        q, k, v = (torch.randn((4, h, length, 128), generator=g, device=device).to(dtype) for h in (32, 8, 8))
        bench.both("GQA 32:8", "random", [*sdpa(), ours()[0]], [q, k, v])
    decode(bench)
    exceedances(bench)
    peers = []
    if options.flex:
        peers.append(flex(16384, device))
    if options.adasplash is not None:
        peers.append(adasplash(options.adasplash, options.adasplash_configs))
    for peer in peers:
        case("length", "random", patterns.random_scores, 16384, [peer], False)
    bench.file.close()


if __name__ == "__main__":
    main()
