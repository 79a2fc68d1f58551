"""How well a model did, as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from theory_lab.outside import visible
from theory_lab.render import _console, _table, plain

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.tasks.evaluation import TaskResult


def print_result(result: TaskResult) -> None:
    """Print accuracies, one line a length, and what the reader should know."""
    console = _console()
    first = result.rows.iloc[0]
    interval = f"{first.level:.0%} interval"
    table = _table(
        ("tokens", "r"), ("questions", "r"), ("right", "r"), (interval, "r"), ("all right", "r"), (interval, "r"),
        ("nats", "r"), title=f"{first.model} on {first.task}",
    )  # fmt: skip
    for row in result.rows.to_dict("records"):
        low, whole_low = f"{100 * row['low']:.1f}", f"{100 * row['sequence_low']:.1f}"
        table.add_row(
            f"{row['length']:,}",
            f"{row['questions']:,}",
            f"{row['accuracy']:.1%}",
            f"{low}-{row['high']:.1%}",
            f"{row['sequence_accuracy']:.1%}",
            f"{whole_low}-{row['sequence_high']:.1%}",
            f"{row['loss']:.3f}",
        )
    console.print(table)
    counts = result.rows.samples.tolist()
    number = f"{counts[0]:,}" if len(set(counts)) == 1 else f"{min(counts):,} to {max(counts):,}"
    console.print(visible(f"{first.parameters}, {number} sequences a length, seed {first.seed}"), markup=False)
    several = bool((result.rows.questions > result.rows.samples).any())
    console.print(
        "right: of questions" + (", clustered by sequence" if several else "") + "; all right: of sequences",
        markup=False,
    )
    for note in result.notes:
        console.print(visible(f"note: {note}"), markup=False)


def print_harness(rows: pd.DataFrame, level: float) -> None:
    """Print what lm-evaluation-harness found, one line a task and metric."""
    console = _console()
    table = _table(
        ("task", "l"), ("metric", "l"), ("samples", "r"), ("value", "r"), (f"{level:.0%} interval", "r"),
        title=str(rows.model.iloc[0]),
    )  # fmt: skip
    for row in rows.itertuples():
        between = "" if row.method == "none" else f"{row.low:.4f} to {row.high:.4f}"
        table.add_row(plain(row.task), plain(row.metric), f"{row.samples:,}", f"{row.value:.4f}", between)
    console.print(table)
