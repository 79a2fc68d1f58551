"""Turn the entmax benchmark's CSV into a table (Markdown) and a picture.

python kernels/benchmarks/entmax_report.py kernels/benchmarks/results/entmax-h200.csv
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Rows = list[dict[str, str]]
DIRECTIONS = ("forward", "forward+backward")
# Mechanisms as the CSV names them, as the picture does, and their colors.
SHOWN = {
    "FA2": ("FlashAttention-2 (softmax)", "#7f7f7f"),
    "entmax 1.5": ("entmax 1.5, this package", "#0072b2"),
    "AdaSplash-2": ("AdaSplash-2 (entmax 1.5)", "#d55e00"),
}


def times(rows: Rows, case: str, pattern: str, mechanism: str, direction: str) -> dict[int, float]:
    """Median milliseconds by length, of rows that passed their gate."""
    return {
        int(row["length"]): float(row["ms"])
        for row in rows
        if (row["case"], row["pattern"], row["mechanism"], row["direction"]) == (case, pattern, mechanism, direction)
        and row["ms"]
        and row["dim"] == "64"
    }


def table(rows: Rows) -> str:
    """One line a case, pattern, length, head dim and mechanism."""
    out = [
        "| case | scores | tokens | head dim | mechanism | forward | forward + backward |",
        "|---|---|---|---|---|---|---|",
    ]
    seen: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        if row["case"] == "ceiling":
            continue
        key = tuple(row[name] for name in ("case", "pattern", "length", "dim", "mechanism"))
        seen.setdefault(key, {})[row["direction"]] = f"{float(row['ms']):.3g}" if row["ms"] else "-"
    for key, found in seen.items():
        out.append("| " + " | ".join([*key, *(found.get(name, "-") for name in DIRECTIONS)]) + " |")
    return "\n".join(out)


def _lengths(ax: Axes, rows: Rows, direction: str) -> None:
    for mechanism, (label, color) in SHOWN.items():
        found = sorted(times(rows, "length", "normal", mechanism, direction).items())
        if found:
            ax.loglog(*zip(*found, strict=True), "o-", base=2, color=color, label=label, markersize=4)
    ticks = [512 * 4**i for i in range(4)]
    ax.set_xticks(ticks, [f"{n:,}" for n in ticks])
    ax.set_yticks([0.01, 0.1, 1, 10], ["0.01", "0.1", "1", "10"])
    ax.set_xlabel("tokens")
    ax.set_title(direction.replace("+", " + "), fontsize=10)
    ax.grid(alpha=0.3)


def _bars(ax: Axes, rows: Rows) -> None:
    places = [
        (x, pattern, direction)
        for x, (pattern, direction) in enumerate((p, d) for p in ("normal", "topics 10%") for d in DIRECTIONS)
    ]
    for shift, (mechanism, (_, color)) in enumerate(SHOWN.items()):
        for x, pattern, direction in places:
            case = "length" if pattern == "normal" else "active"
            ms = times(rows, case, pattern, mechanism, direction).get(16384)
            if ms is not None:
                bar = ax.bar(x + 0.28 * (shift - 1), ms, 0.26, color=color)
                ax.bar_label(bar, [f"{ms:.2f}"], fontsize=7, padding=1)
    names = [f"{'normal' if p == 'normal' else '10% of tiles'}\n{d.replace('+', ' +' + chr(10))}" for _, p, d in places]
    ax.set_xticks([x for x, *_ in places], names, fontsize=8)
    ax.set_title("16,384 tokens", fontsize=10)
    ax.margins(y=0.12)


def picture(rows: Rows, path: Path) -> None:
    """Times against the length, forward and both ways, and bars at 16,384 tokens."""
    figure, axes = plt.subplots(1, 3, figsize=(11.5, 3.6), layout="constrained")
    for ax, direction in zip(axes, DIRECTIONS, strict=False):
        _lengths(ax, rows, direction)
    _bars(axes[2], rows)
    axes[0].set_ylabel("ms")
    axes[0].sharey(axes[1])
    present = {row["mechanism"] for row in rows if row["ms"]}
    shown = [look for mechanism, look in SHOWN.items() if mechanism in present]
    handles = [plt.Line2D([], [], color=color, marker="o", markersize=4, label=label) for label, color in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def main() -> None:
    source = Path(sys.argv[1])
    with source.open(newline="") as file:
        rows = list(csv.DictReader(file))
    print(table(rows))
    picture(rows, source.with_suffix(".png"))


if __name__ == "__main__":
    main()
