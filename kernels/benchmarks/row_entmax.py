"""Row entmax against the ``entmax`` package and AdaSplash on a GPU: correct first, then times.

    python kernels/benchmarks/row_entmax.py --out row-entmax.csv [--quick] [--all] [--sweep]

Every implementation is held against float64 weights of a few rows before it is timed; one that misses its budget gets
no time. The budget of ours is 16 units in the last place of the row's largest weight; that of the peers is wider, since
their solvers stop early, and the error stands in the table. ``--sweep`` times launch shapes of ours.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from theory_kernels.entmax_rows import entmax

sys.path.insert(0, str(Path(__file__).resolve().parent))
from timing import measure

SHAPES = [(4096, 4096), (4096, 16384), (4096, 32768), (512, 131072), (64, 1 << 20)]
# A peer's weights may be off by this much; ours by the rounding of the dtype alone.
PEER_BUDGET = 2e-2
WITH_BACKWARD = ("ours", "entmax package, exact", "AdaSplash triton_entmax v1")


def peers(alpha: float, every: bool) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Other people's implementations that can be imported here; slow ones too if `every`."""
    found: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    try:
        import entmax as package

        exact = {1.5: package.entmax15, 2.0: package.sparsemax}.get(alpha)
        if exact is not None:
            found["entmax package, exact"] = lambda x: exact(x, dim=-1, k=None)
            found["entmax package, exact, k=100"] = lambda x: exact(x, dim=-1, k=100)
        if every or exact is None:
            found["entmax package, bisection"] = lambda x: package.entmax_bisect(x, alpha=alpha, dim=-1)
    except ImportError as error:
        print("entmax package:", error)
    try:
        import adasplash

        if every:
            found["AdaSplash triton_entmax v1"] = lambda x: adasplash.triton_entmax_v1(x, alpha=alpha, fast_math=False)
        found["AdaSplash triton_entmax v2"] = lambda x: adasplash.triton_entmax_v2(x, alpha=alpha)
    except ImportError as error:
        print("AdaSplash:", error)
    return found


def scores(kind: str, rows: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Random scores: standard normal, ten times that, or uniform on [0, 0.1] (flat: nearly all keys have weight)."""
    g = torch.Generator("cuda").manual_seed(0)
    if kind == "flat":
        return (0.1 * torch.rand(rows, n, generator=g, device="cuda")).to(dtype)
    scale = {"normal": 1.0, "peaked": 10.0}[kind]
    return (scale * torch.randn(rows, n, generator=g, device="cuda")).to(dtype)


def error_of(p: torch.Tensor, x: torch.Tensor, alpha: float) -> tuple[float, float]:
    """Largest error of a weight, in units of the row's largest, and of a row's sum; on eight rows."""
    some = torch.linspace(0, x.shape[0] - 1, 8, device=x.device).long()
    want = entmax(x[some].double(), alpha, implementation="reference", method="newton")
    got = p[some].double()
    worst = ((got - want).abs().amax(-1) / want.amax(-1)).max()
    return float(worst), float((got.sum(-1) - 1.0).abs().max())


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    device = torch.cuda.get_device_name()
    shapes = SHAPES[:1] + SHAPES[-1:] if args.quick else SHAPES
    cases = [(1.5, "normal"), (1.3, "normal"), (2.0, "normal"), (1.5, "peaked"), (1.5, "flat")]
    for alpha, kind in cases:
        for rows, n in shapes:
            for dtype in (torch.bfloat16, torch.float32):
                if kind != "normal" and dtype != torch.float32:
                    continue
                x = scores(kind, rows, n, dtype)
                every = {"ours": lambda x, a=alpha: entmax(x, a), **peers(alpha, args.all)}
                every["copy"] = lambda x: x.clone()
                for name, function in every.items():
                    row: dict[str, object] = {
                        "rows": rows, "n": n, "dtype": str(dtype).removeprefix("torch."), "alpha": alpha,
                        "scores": kind, "implementation": name, "device": device,
                    }  # fmt: skip
                    yield row | timed(name, function, x, alpha, args.budget)
                del x


def timed(
    name: str, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, alpha: float, budget: float
) -> dict[str, object]:
    """Error, and milliseconds forward and forward + backward; no times on a red gate."""
    try:
        p = function(x)
        worst, total = (0.0, 0.0) if name == "copy" else error_of(p, x, alpha)
        del p
        allowed = 16.0 * torch.finfo(x.dtype).eps if name == "ours" else PEER_BUDGET
        found: dict[str, object] = {"error": f"{worst:.2e}", "sum_error": f"{total:.2e}"}
        if not worst <= allowed:
            return found | {"ms": "", "low": "", "high": "", "both_ms": "", "note": "wrong"}
        took = measure(lambda: function(x), budget)
        both, note = backward_of(function, x, budget) if name in WITH_BACKWARD else ("", "")
        return found | {
            "ms": f"{took.median:.4f}", "low": f"{took.low:.4f}", "high": f"{took.high:.4f}", "both_ms": both,
            "note": took.method + note,
        }  # fmt: skip
    except Exception as error:
        torch.cuda.empty_cache()
        return {"error": "", "sum_error": "", "ms": "", "low": "", "high": "", "both_ms": "",
                "note": " ".join(f"{type(error).__name__}: {error}".split())[:100]}  # fmt: skip


def backward_of(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, budget: float) -> tuple[str, str]:
    """Milliseconds forward and backward, or why there are none."""
    leaf = x.clone().requires_grad_()
    grad = x.flip(-1).clone()  # no random numbers: a failed graph capture breaks the generator

    def step() -> None:
        leaf.grad = None
        function(leaf).backward(grad)

    try:
        return f"{measure(step, budget).median:.4f}", ""
    except Exception as error:
        torch.cuda.synchronize()
        return "", f"; backward: {type(error).__name__}"


def _always(shape: object, *_: int) -> object:
    return shape


def sweep(budget: float) -> None:
    """Launch shapes of ours, printed."""
    from theory_kernels.entmax_rows import launch

    whole, parts = launch.whole, launch.parts
    for n in (1024, 4096, 8192, 16384, 32768):
        x = scores("normal", (1 << 26) // n, n, torch.bfloat16)
        for rows in (1, 2) if n <= 4096 else (1,):
            for warps in (1, 2, 4, 8, 16):
                if n * rows // (32 * warps) not in range(16, 129):
                    continue
                launch.whole = partial(_always, launch.Shape(rows, n, warps))
                try:
                    took = measure(lambda x=x: entmax(x, 1.5), budget).median
                    general = measure(lambda x=x: entmax(x, 1.3), budget).median
                    print(
                        f"sweep n={n} rows={rows} warps={warps}: {took:.4f} ms, alpha 1.3 {general:.4f} ms", flush=True
                    )
                except Exception as error:
                    print(f"sweep n={n} rows={rows} warps={warps}: {type(error).__name__}", flush=True)
    launch.whole = whole
    x = scores("normal", 64, 1 << 20, torch.bfloat16)
    for block in (4096, 8192, 16384, 32768):
        for warps in (4, 8, 16, 32):
            if block // (32 * warps) not in range(8, 65):
                continue
            for steps in (6, 12):
                launch.parts = partial(_always, launch.Shape(1, block, warps))
                launch._PART_STEPS = steps
                try:
                    took = measure(lambda: entmax(x, 1.5), budget).median
                    print(f"sweep parts block={block} warps={warps} steps={steps}: {took:.4f} ms", flush=True)
                except Exception as error:
                    print(f"sweep parts block={block} warps={warps}: {type(error).__name__}", flush=True)
    launch.parts, launch._PART_STEPS = parts, 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="CSV to write")
    parser.add_argument("--quick", action="store_true", help="the two ends of the shapes only")
    parser.add_argument("--all", action="store_true", help="the peers' slow implementations too")
    parser.add_argument("--sweep", action="store_true", help="time launch shapes instead")
    parser.add_argument("--budget", type=float, default=30.0, help="milliseconds of timing a number")
    args = parser.parse_args()
    if args.sweep:
        sweep(args.budget)
        return
    file = args.out.open("w", newline="") if args.out else None
    writer = None
    for row in rows_of(args):
        print(*row.values(), sep=", ", flush=True)
        if file is not None:
            writer = writer or csv.DictWriter(file, list(row))
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)
            file.flush()


if __name__ == "__main__":
    main()
