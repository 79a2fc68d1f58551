"""Row entmax against the ``entmax`` package and AdaSplash on a GPU: correct first, then times.

    python kernels/benchmarks/row_entmax.py --out row-entmax.csv [--quick] [--all] [--against v2,copy] [--alpha 1.5,1.3]
    python kernels/benchmarks/row_entmax.py --sweep [--length 4096] [--alpha 1.5] [--kind warp] [--warm 3/12]

Every implementation is held against float64 weights of a few rows before it is timed; one that misses its budget gets
no time. The budget of ours is 16 units in the last place of the row's largest weight; that of the peers is wider, since
their solvers stop early, and the error stands in the table. ``--sweep`` times launch shapes of ours and names the best;
``--sweep --warm I/N`` compiles the Ith of N shares of them only, so that N processes can do so side by side first.
"""

from __future__ import annotations

import argparse
import csv
import itertools
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
        if alpha not in args.alpha or kind not in args.scores:
            continue
        for rows, n in shapes:
            for dtype in (torch.bfloat16, torch.float32):
                if kind != "normal" and dtype != torch.float32:
                    continue
                x = scores(kind, rows, n, dtype)
                every = {"ours": lambda x, a=alpha: entmax(x, a), **peers(alpha, args.all)}
                every["copy"] = lambda x: x.clone()
                for name, function in every.items():
                    if name != "ours" and not any(word in name for word in args.against):
                        continue
                    row: dict[str, object] = {
                        "rows": rows, "n": n, "dtype": str(dtype).removeprefix("torch."), "alpha": alpha,
                        "scores": kind, "implementation": name, "device": device,
                    }  # fmt: skip
                    yield row | timed(name, function, x, alpha, args.budget, not args.forward)
                del x


def timed(
    name: str,
    function: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    alpha: float,
    budget: float,
    backward: bool,
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
        both, note = backward_of(function, x, budget) if backward and name in WITH_BACKWARD else ("", "")
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


def in_warps(n: int, dtype: torch.dtype) -> list[object]:
    """Launch shapes for rows of 16 bits in one warp each."""
    from theory_kernels.entmax_rows.launch import Warp

    if n != 4096 or dtype == torch.float32:
        return []
    return [Warp(512, *more) for more in itertools.product((32, 64), (0, 64, 72, 80, 96))]


def candidates(n: int, dtype: torch.dtype) -> list[object]:
    """Launch shapes for rows of ``n``: in one warp, in registers, streamed by one program, or in parts."""
    from theory_kernels.entmax_rows.launch import Shape, Stream

    each = 16 // dtype.itemsize
    found = in_warps(n, dtype)
    found += [Shape(1, n, warps) for warps in (1, 2, 4) if n <= 8192 and n // (32 * warps) <= 128]
    for warps, loads in itertools.product((1, 2, 4, 8), (4, 8)):
        block = 32 * warps * loads * each
        if n <= 1 << 15 and 32 <= n // (32 * warps) <= 256 and block <= n <= 8 * block:
            found += [Stream(block, n // block, 1, warps, warps, k, max(256, k)) for k in (128 * warps, 256 * warps)]
        for parts, join in itertools.product((2, 4, 8, 16, 32), (4, 8, 16)):
            width, pieces = parts * block // each, n // (parts * block)
            even = 4 <= pieces <= 16 and 8 <= width // (32 * join) <= 32
            if n > 1 << 15 and warps == 4 and loads == 8 and even:
                found.append(Stream(block, pieces, parts, warps, join, 256 * join, 256 * join))
    return found


def odd_rows(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that a launch shape must get right too: flat, peaked, masked, equal, and between flat and normal."""
    g = torch.Generator("cuda").manual_seed(1)
    x = torch.randn((16, n), generator=g, device="cuda")
    x *= torch.tensor([1.0, 100.0, 0.3, 1e-3, 0.0, 0.6, 10.0, 0.1], device="cuda").repeat(2)[:, None]
    x[8:, : n // 2] = -torch.inf
    x[15, 1:] = -torch.inf
    return x.to(dtype)


def worst_of(p: torch.Tensor, x: torch.Tensor, want: torch.Tensor) -> float:
    """Largest error of a weight, in units of the row's largest, over rows spread over those of ``x``."""
    some = torch.linspace(0, x.shape[0] - 1, want.shape[0], device=x.device).long()
    return float(((p[some].double() - want).abs().amax(-1) / want.amax(-1)).max())


def sweep(
    budget: float,
    dtypes: list[torch.dtype],
    shapes: list[tuple[int, int]],
    alphas: list[float],
    kinds: list[str],
    warm: tuple[int, int] | None,
) -> None:
    """Time launch shapes of ours, check their weights, and print the best of each length."""
    from theory_kernels.entmax_rows import launch

    given = launch.whole, launch.stream, launch.warp
    at = 0
    for rows, n in shapes:
        for dtype, alpha in itertools.product(dtypes, alphas):
            x, odd = scores("normal", rows, n, dtype), odd_rows(n, dtype)
            some = torch.linspace(0, rows - 1, 64, device=x.device).long()
            want, odd_want = (
                entmax(y.double(), alpha, implementation="reference", method="newton") for y in (x[some], odd)
            )
            best: tuple[float, object] = (float("inf"), None)
            for shape in candidates(n, dtype):
                closed = isinstance(shape, launch.Warp)
                if type(shape).__name__.lower() not in kinds or (closed and alpha not in (1.5, 2.0)):
                    continue
                at += 1
                if warm is not None and at % warm[1] != warm[0]:
                    continue
                launch.warp = partial(_always, shape if closed else None)
                launch.whole = partial(_always, shape if isinstance(shape, launch.Shape) else None)
                launch.stream = partial(_always, shape) if isinstance(shape, launch.Stream) else given[1]
                where = f"{rows}x{n} {dtype} {alpha} {shape}"
                try:
                    p, other = entmax(x[:16] if warm else x, alpha), entmax(odd, alpha)
                    if warm is not None:
                        continue
                    error = max(worst_of(p, x, want), worst_of(other, odd, odd_want))
                    took = measure(lambda x=x, a=alpha: entmax(x, a), budget).median
                    print(f"sweep {where}: {took:.4f} ms, error {error:.1e}", flush=True)
                    if error <= 16.0 * torch.finfo(dtype).eps:
                        best = min(best, (took, shape), key=lambda pair: pair[0])
                except Exception as error:
                    print(f"sweep {where}: {type(error).__name__}: {str(error)[:80]}", flush=True)
            launch.whole, launch.stream, launch.warp = given
            if warm is None:
                now = measure(lambda x=x, a=alpha: entmax(x, a), budget).median
                print(f"best {rows}x{n} {dtype} {alpha}: {best[0]:.4f} ms, {best[1]}; now {now:.4f} ms", flush=True)
            del x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="CSV to write")
    parser.add_argument("--quick", action="store_true", help="the two ends of the shapes only")
    parser.add_argument("--all", action="store_true", help="the peers' slow implementations too")
    parser.add_argument("--against", default="entmax package,AdaSplash,copy", help="peers whose name has one of these")
    parser.add_argument("--alpha", default="1.5,1.3,2.0", help="alphas")
    parser.add_argument("--scores", default="normal,peaked,flat", help="kinds of scores")
    parser.add_argument("--forward", action="store_true", help="no backward")
    parser.add_argument("--sweep", action="store_true", help="time launch shapes instead")
    parser.add_argument("--dtype", default="bfloat16,float32", help="dtypes of the sweep")
    parser.add_argument("--length", type=int, help="length of the rows of the sweep; all of them without")
    parser.add_argument("--warm", help="I/N: of the sweep, compile share I of N only")
    parser.add_argument("--kind", default="warp,shape,stream", help="kinds of launch shapes of the sweep")
    parser.add_argument("--budget", type=float, default=30.0, help="milliseconds of timing a number")
    args = parser.parse_args()
    args.against, args.scores = args.against.split(","), args.scores.split(",")
    args.alpha = [float(word) for word in args.alpha.split(",")]
    if args.sweep:
        share, of = (int(word) for word in args.warm.split("/")) if args.warm else (0, 0)
        shapes = [shape for shape in (*SHAPES, (8192, 2048)) if not args.length or shape[1] == args.length]
        dtypes = [getattr(torch, word) for word in args.dtype.split(",")]
        sweep(args.budget, dtypes, shapes, args.alpha, args.kind.split(","), (share, of) if of else None)
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
