"""Turn the decode benchmark's CSV into the goals table (Markdown) and the picture.

python kernels/benchmarks/decode_report.py decode-h200.csv [--picture decode-h200.png]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

# Density of the blocks read, and how many times faster than FlashAttention-2 it has to be.
GOALS = ((1.0, 0.95), (0.38, 2.4), (0.1, 7.0))
PATTERNS = {"scattered": "scattered blocks", "clustered": "runs of 64 blocks", "uneven": "heads from 0 to twice that"}
KINDS = {"none": "no bounds", "minmax": "min and max", "int8": "keys in int8"}


def timed(table: pd.DataFrame, **wanted: object) -> pd.DataFrame:
    """Rows with a time that hold the given values."""
    keep = table.ms.notna()
    for key, value in wanted.items():
        keep &= table[key] == value
    return table[keep]


def goals(table: pd.DataFrame) -> str:
    """Markdown: what was asked and what was measured."""
    flash = timed(table, case="dense", mechanism="FA2").ms.iloc[0]
    lines = ["| blocks read | pattern | ms | FA2 / ours | goal | met |", "|---|---|---|---|---|---|"]
    for density, least in GOALS:
        for pattern, label in PATTERNS.items():
            for row in timed(table, case="density", pattern=pattern, density=density).itertuples():
                ratio = flash / row.ms
                met = "yes" if ratio >= least else "no"
                lines.append(f"| {density:.0%} | {label} | {row.ms:.3g} | {ratio:.2f} | at least {least:g} | {met} |")
    return "\n".join(lines)


def trained(table: pd.DataFrame) -> str:
    """Markdown: a trained model's keys."""
    flash = timed(table, case="trained", mechanism="FA2").ms.iloc[0]
    lines = [
        "| kept | keys | bounds | extra memory | blocks read | ms | FA2 / ours |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in timed(table, case="trained", mechanism="elastic").itertuples():
        extra = f"{row.metadata:.1%}" if pd.notna(row.metadata) else "-"
        kind = KINDS[row.kind] + (f", blocks of {row.block:g}" if row.kind != "none" else "")
        head = f"| {row.pattern} | {row.density:.1%} | {kind} | {extra} | {row.read:.0%} "
        lines.append(head + f"| {row.ms:.3g} | {flash / row.ms:.2f} |")
    return "\n".join(lines)


SERIES = {0.38: "ETA", 0.1: "ETA, 10% of the blocks"}


def write_speeds(table: pd.DataFrame, path: Path) -> None:
    """Times as fast as FlashAttention-2 by length, as `theory-lab reproduce eta.figure-decode-speed` reads them."""
    part = timed(table, case="length")
    flash = part[part.mechanism == "FA2"].set_index("length").ms
    lines = [
        f"# device: {part.gpu.iloc[0]}", "# seed: 0",
        "# made by: kernels/benchmarks/decode.py, decode_report.py --speeds; median times of CUDA graph replays",
        "# 16 heads of 128, bf16, one sequence; 38% of the blocks of 64 keys hold survivors (planted); FA2 reads all",
        "series,x,value,low,high",
    ]  # fmt: skip
    for density, name in SERIES.items():
        for row in part[(part.density == density) & (part.mechanism == "elastic")].itertuples():
            lines.append(f'"{name}",{int(row.length)},{flash[row.length] / row.ms:.4g},,')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw(table: pd.DataFrame, path: Path) -> None:
    """Time against the share of blocks read, and on a trained model's keys against the mass kept."""
    from theory_lab.figures import style

    with style.applied():
        figure = style.new_figure("double", 2.6)
        left, right = figure.subplots(1, 2)
        looks = style.series_styles([*PATTERNS.values(), *KINDS.values()])
        for pattern, label in PATTERNS.items():
            part = timed(table, case="density", pattern=pattern).sort_values("read")
            left.plot(100 * part.read, part.ms, label=label, **looks[label])
        for name, dash in (("FA2", (0, (4, 2))), ("cuDNN", (0, (1, 1.5)))):
            level = timed(table, case="dense", mechanism=name).ms.iloc[0]
            left.axhline(level, color="0.45", linestyle=dash, lw=1.0, label=f"{name}, every key", zorder=1)
        left.set(xscale="log", yscale="log", xlabel="blocks read (%)", ylabel="one token (ms)")
        left.set_title("524,288 tokens, 16 heads of 128")
        left.set_yticks([0.05, 0.1, 0.2, 0.5, 1.0], ["0.05", "0.1", "0.2", "0.5", "1"])
        left.set_xticks([1, 10, 100], ["1", "10", "100"])
        left.legend(loc="upper left", bbox_to_anchor=(0.0, 0.93))
        flash = timed(table, case="trained", mechanism="FA2").ms
        if len(flash):
            for kind, label in KINDS.items():
                part = timed(table, case="trained", mechanism="elastic", kind=kind)
                part = part[part.block == part.block.min()]
                part = part.assign(kept=part.pattern.str.split("%").str[0].astype(float))
                right.plot(part.kept, part.ms, label=label, **looks[label])
            right.axhline(flash.iloc[0], color="0.45", linestyle=(0, (4, 2)), lw=1.0, label="FA2, every key", zorder=1)
            right.set(xlabel="softmax mass kept (%)", ylabel="256 sequences (ms)", ylim=(0, None))
            right.set_title("SmolLM2-135M's keys, 8,192 tokens, 9:3 heads of 64")
            right.legend(loc="lower right")
        else:
            right.set_axis_off()
        gpu = timed(table).gpu.iloc[0]
        style.save(figure, path, {"title": "elastic decoding", "device": str(gpu)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--speeds", type=Path, help="CSV of speedups by length to write")
    options = parser.parse_args()
    table = pd.read_csv(options.csv)
    print(goals(table))
    if len(timed(table, case="trained")):
        print()
        print(trained(table))
    if options.speeds is not None:
        write_speeds(table, options.speeds)
    if options.picture is not None:
        draw(table, options.picture)


if __name__ == "__main__":
    main()
