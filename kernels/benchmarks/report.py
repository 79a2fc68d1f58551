"""Turn the benchmark's CSV into the goals table (Markdown) and the picture.

python kernels/benchmarks/report.py kernels/benchmarks/results/h200.csv
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Rows = list[dict[str, str]]
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
COLORS = {"FA2": "#7f7f7f", "cuDNN": "#000000", "TRA": "#0072b2", "TDA": "#d55e00"}


def find(
    rows: Rows, mechanism: str, direction: str, length: int, pattern: str = "random", case: str = "length"
) -> float:
    """Median milliseconds of one row; NaN where it has none."""
    for row in rows:
        wanted = (case, pattern, mechanism, direction, str(length))
        if tuple(row[k] for k in ("case", "pattern", "mechanism", "direction", "length")) == wanted and row["ms"]:
            return float(row["ms"])
    return float("nan")


def goals(rows: Rows) -> list[tuple[str, str, float, float]]:
    """(case, peer, ours / peer as measured, the most that the goal allows)."""
    both = "forward+backward"
    out = []

    def add(name: str, ours: float, peer_name: str, peer: float, most: float) -> None:
        out.append((name, peer_name, ours / peer, most))

    for peer, most in (("FA2", 1 / 6), ("cuDNN", 1 / 4)):
        add("TRA forward, 65536", find(rows, "TRA", "forward", 65536), peer, find(rows, peer, "forward", 65536), most)
    add("TRA forward+backward, 65536", find(rows, "TRA", both, 65536), "FA2", find(rows, "FA2", both, 65536), 1 / 12)
    for direction, most in (("forward", 1 / 3), (both, 1 / 6)):
        ours, peer_ms = find(rows, "TDA", direction, 65536), find(rows, "FA2", direction, 65536)
        add(f"TDA {direction}, 65536", ours, "FA2", peer_ms, most)
    for peer, most in (("FA2", 1 / 4), ("TDA authors (TRA)", 1 / 20)):
        add("TRA forward, 16384", find(rows, "TRA", "forward", 16384), peer, find(rows, peer, "forward", 16384), most)
    for n in (512, 1024, 2048, 4096):
        add(f"TRA forward, {n}", find(rows, "TRA", "forward", n), "FA2", find(rows, "FA2", "forward", n), 1.0)
    for direction, most in (("forward", 1 / 2), (both, 1 / 3)):
        ours = find(rows, "TRA", direction, 16384, "trained", "active")
        peer_ms = find(rows, "FA2", direction, 16384, "trained", "active")
        add(f"trained regime {direction}, 16384", ours, "FA2", peer_ms, most)
    for n in (16384, 65536):
        ours = find(rows, "TRA", "forward", n, "stripes 100%", "active")
        add(f"all tiles active, forward, {n}", ours, "FA2", find(rows, "FA2", "forward", n), 1 / 1.8)
    for n in (8192, 16384):
        for direction in ("forward", both):
            same = find(rows, "TRA", direction, n) / find(rows, "FA2", direction, n)
            ours = find(rows, "TRA", direction, n, "random", "GQA 32:8")
            peer_ms = find(rows, "FA2", direction, n, "random", "GQA 32:8")
            add(f"GQA 32:8, dim 128, batch 4, {direction}, {n}", ours, "FA2", peer_ms, 1.3 * same)
    return out


def table(rows: Rows) -> str:
    lines = ["| case | peer | ours / peer | goal | met |", "|---|---|---|---|---|"]
    for name, peer, ratio, most in goals(rows):
        met = "no time" if ratio != ratio else "yes" if ratio <= most else "no"
        lines.append(f"| {name} | {peer} | 1/{1 / ratio:.2f} | at most 1/{1 / most:.2f} | {met} |")
    return "\n".join(lines)


def times(rows: Rows) -> str:
    """Milliseconds of every mechanism on random scores: forward / forward+backward."""
    names = ["FA2", "cuDNN", "TRA", "TDA", "TDA authors (TRA)", "TDA authors (TDA)", "AdaSplash-2", "FlexAttention"]
    names = [m for m in names if any(find(rows, m, d, n) > 0 for d in ("forward", "forward+backward") for n in LENGTHS)]
    lines = ["| T | " + " | ".join(names) + " |", "|" + "---|" * (len(names) + 1)]
    for n in LENGTHS:
        cells = []
        for name in names:
            pair = [find(rows, name, d, n) for d in ("forward", "forward+backward")]
            cells.append(" / ".join("-" if x != x else f"{x:.3g}" for x in pair) if any(x == x for x in pair) else "-")
        lines.append(f"| {n} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def picture(rows: Rows, path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(13.5, 4.3), constrained_layout=True)
    lengths = LENGTHS
    for axis, direction in zip(axes[:2], ("forward", "forward+backward"), strict=True):
        for name, color in COLORS.items():
            axis.plot(lengths, [find(rows, name, direction, n) for n in lengths], "o-", color=color, label=name, ms=4)
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms a call", title=f"{direction}, random scores")
        axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    axis = axes[2]
    for direction, marker in (("forward", "o"), ("forward+backward", "s")):
        for length, color in ((16384, "#0072b2"), (65536, "#009e73")):
            points = []
            for row in rows:
                if row["mechanism"] != "TRA" or row["direction"] != direction or row["length"] != str(length):
                    continue
                if row["case"] in ("active", "length") and row["ms"] and row["pattern"] != "trained":
                    ratio = float(row["ms"]) / find(rows, "FA2", direction, length)
                    points.append((100 * float(row["tiles64"]), ratio))
            points.sort()
            style = "-" if direction == "forward" else "--"
            axis.plot(*zip(*points, strict=True), marker + style, color=color, ms=4, label=f"{direction}, {length}")
    for direction, marker in (("forward", "*"), ("forward+backward", "P")):
        ms = find(rows, "TRA", direction, 16384, "trained", "active")
        axis.plot(66, ms / find(rows, "FA2", direction, 16384), marker, color="#d55e00", ms=9, ls="none",
                  label=f"{direction}, 16384, trained regime")  # fmt: skip
    axis.axhline(1.0, color="#7f7f7f", lw=1)
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="active 64x64 tiles, %",
        ylabel="time / FA2's",
        title="TRA against active tiles",
    )
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=7, loc="lower right")
    first = rows[0]
    figure.suptitle(
        f"{first['gpu']}, {first['date']}, torch {first['torch']}, triton {first['triton']}; bf16, batch 1, 12 heads, "
        "head dim 64, causal",
        fontsize=9,
    )
    figure.savefig(path, dpi=130)


def main() -> None:
    path = Path(sys.argv[1])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    print(times(rows), table(rows), sep="\n\n")
    picture(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
