"""Time the statistics of attention maps against FlashAttention-2's forward, behind a gate against float64.

    python kernels/benchmarks/attention_statistics.py --out statistics-h200.csv [--lengths 8192 65536 131072]
    python kernels/benchmarks/attention_statistics.py --picture statistics-h200.csv

The first form needs a CUDA device. bf16, batch 1, 12 heads, head dim 64, causal, beta = kappa = 1, p = 2.
"""

from __future__ import annotations

import argparse
import csv
import datetime
from functools import partial
from pathlib import Path

import patterns
import torch
from mechanisms import sdpa
from theory_kernels import attention_statistics
from theory_kernels.statistics import api, reference
from timing import Timing, measure

HEADS, DIM, GATE_ROWS = 12, 64, 64
FIELDS = (
    "length", "what", "need", "ms", "ms_p10", "ms_p90", "method", "of_fa2", "peak_mb", "worst", "gpu", "date", "torch",
    "triton", "note",
)  # fmt: skip
FAST = ("rows", "columns", "near_zero")
CASES = (
    ("softmax", {"weights": "softmax"}, ("rows",)),
    ("softmax", {"weights": "softmax"}, ("rows", "columns")),
    ("softmax", {"weights": "softmax"}, FAST),
    ("softmax", {"weights": "softmax"}, ("scores",)),
    ("TRA", {"weights": "tra"}, FAST),
    ("TRA", {"weights": "tra"}, (*FAST, "scores")),
    ("TDA", {"weights": "tda"}, FAST),
    ("TDA", {"weights": "tda"}, (*FAST, "scores")),
    ("entmax 1.5", {"weights": "entmax"}, FAST),
    ("entmax 2", {"weights": "entmax", "alpha": 2.0}, FAST),
    ("ETA", {"weights": "eta", "eta_threshold": 0.3}, FAST),
)


def rounded(tensors: list[torch.Tensor], options: dict) -> list[torch.Tensor]:
    """Unit rows as the kernels multiply them, where they do."""
    if options["weights"] not in ("tra", "tda"):
        return tensors
    return [torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype) for x in tensors]


def gate(tensors: list[torch.Tensor], options: dict, got: object) -> float:
    """Worst ratio of error to allowed error (<= 1 passes) of the row statistics of the last rows.

    Allowed: 2 (error of a float32 run on the operands the kernels multiply + 2^-21 of the size), against float64. The
    size of an entropy is at least 1 a row.
    """
    length = tensors[0].shape[2]
    first = length - GATE_ROWS
    rows = [x[:, :, first:] if i % 2 == 0 else x for i, x in enumerate(tensors)]
    ready = [x[:, :, first:] if i % 2 == 0 else x for i, x in enumerate(rounded(tensors, options))]
    common = {**options, "query_offset": first, "need": ("rows",), "implementation": "reference"}
    api_reference = api.reference_statistics
    exact = attention_statistics(*rows, **common)
    try:
        api.reference_statistics = partial(reference.statistics, dtype=torch.float32)
        if options["weights"] in ("tra", "tda"):
            common["normalize"] = False
        eager = attention_statistics(*ready, **common)
    finally:
        api.reference_statistics = api_reference
    worst = 0.0
    for name in ("mass", "entropy", "maximum"):
        want = getattr(exact, name)
        error = float((getattr(got, name)[:, :, first:] - want).norm())
        # The entropy of one survivor is 0, a difference of numbers near 1.
        size = max(want.norm(), torch.ones_like(want).norm()) if name == "entropy" else want.norm()
        allowed = 2 * float((getattr(eager, name) - want).norm() + 2.0**-21 * size)
        # Rows without any survivor have no mass, and no error is allowed there.
        ratio = 0.0 if error == 0 else error / allowed if allowed > 0 else float("inf")
        worst = max(worst, ratio if error == error else float("inf"))
    return worst


def columns_agree(tensors: list[torch.Tensor], options: dict, got: object) -> float:
    """Column masses against the chunked form in float32: largest difference, relative to the largest mass."""
    ready = rounded(tensors, options)
    more = {"normalize": False} if options["weights"] in ("tra", "tda") else {}
    want = attention_statistics(*ready, **options, **more, need=("columns",), implementation="chunked").column_mass
    return float((got.column_mass - want).abs().max() / want.abs().max())


def benchmark(out: Path, lengths: list[int], chosen: list[str] | None = None) -> None:
    import triton

    device = torch.device("cuda")
    common = {
        "gpu": torch.cuda.get_device_name(device), "date": datetime.date.today().isoformat(),
        "torch": torch.__version__, "triton": triton.__version__,
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()

        def write(row: dict) -> None:
            row = {k: f"{v:.5g}" if isinstance(v, float) else v for k, v in {**common, **row}.items()}
            writer.writerow(row)
            file.flush()
            print(*(f"{row.get(k, '')!s:>10}" for k in ("length", "what", "need", "ms", "of_fa2", "peak_mb", "worst",
                                                         "note")), flush=True)  # fmt: skip

        def timed(call) -> tuple[Timing, float]:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            torch.cuda.synchronize()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
            return measure(call, 120.0), peak

        for length in lengths:
            q, k, v = patterns.random_scores(HEADS, length, DIM, torch.bfloat16, 0, device)
            q2, k2, _ = patterns.random_scores(HEADS, length, DIM, torch.bfloat16, 1, device)
            # patterns gives unit rows; a trained model's logits have a spread of about 1.
            views = {1: [q, k], 2: [q, k, q2, k2]}
            base, peak = timed(partial(sdpa()[0].call, q, k, v))
            write({"length": length, "what": "FA2", "need": "forward", "ms": base.median, "ms_p10": base.low,
                   "ms_p90": base.high, "method": base.method, "of_fa2": 1.0, "peak_mb": peak})  # fmt: skip
            for what, options, need in CASES:
                if chosen and what not in chosen:
                    continue
                tensors = views[2 if options["weights"] == "tda" else 1]
                if options["weights"] in ("softmax", "entmax", "eta"):
                    options = {**options, "scale": 1.0 * DIM**0.5}
                call = partial(attention_statistics, *tensors, **options, need=need)
                row = {"length": length, "what": what, "need": "+".join(need)}
                got, notes = call(), []
                if "rows" in need:
                    row["worst"] = gate(tensors, options, got)
                    if not row["worst"] <= 1.0:
                        notes.append(f"gate failed: {row['worst']:.2f} times the allowed error")
                if "columns" in need and need == FAST and length <= 65536:
                    off = columns_agree(tensors, options, got)
                    # Two float32 runs of weights with relative errors of 2^-21 (1 + 8 in logits) each.
                    if not off <= 2 * 9 * 2.0**-21:
                        notes.append(f"gate failed: columns off by {off:.2e}")
                torch.cuda.empty_cache()
                if notes:
                    write({**row, "note": "; ".join(notes)})
                    continue
                timing, peak = timed(call)
                write({**row, "ms": timing.median, "ms_p10": timing.low, "ms_p90": timing.high,
                       "method": timing.method, "of_fa2": timing.median / base.median, "peak_mb": peak})  # fmt: skip


def picture(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with path.open() as file:
        rows = [r for r in csv.DictReader(file) if r["ms"]]
    fast = "+".join(FAST)
    lengths = sorted({int(r["length"]) for r in rows})
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    # From the slowest down, as the lines end.
    colors = {"entmax 2": "#56b4e9", "entmax 1.5": "#009e73", "ETA": "#cc79a7", "softmax": "#000000", "FA2": "#7f7f7f",
              "TDA": "#d55e00", "TRA": "#0072b2"}  # fmt: skip
    for what, color in colors.items():
        need = "forward" if what == "FA2" else fast
        points = [(int(r["length"]), float(r["ms"])) for r in rows if r["what"] == what and r["need"] == need]
        label = "FlashAttention-2 forward" if what == "FA2" else what
        if points:
            style = "--o" if what == "FA2" else "-o"
            axes.plot(*zip(*sorted(points), strict=True), style, color=color, label=label, ms=4)
    where = f"{rows[0]['gpu']}, {HEADS} heads of {DIM}, bf16, causal"
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="milliseconds",
             title=f"Rows, columns and near zeros of an attention map\n{where}")  # fmt: skip
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path.with_suffix(".png"), dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="CSV to write")
    parser.add_argument("--picture", type=Path, help="CSV to draw")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768, 65536, 131072])
    parser.add_argument("--what", nargs="+", choices=sorted({case[0] for case in CASES}), help="these alone")
    options = parser.parse_args()
    if options.out is not None:
        benchmark(options.out, options.lengths, options.what)
    if options.picture is not None:
        picture(options.picture)


if __name__ == "__main__":
    main()
