"""How long the explorer takes to answer: the first picture, zooms, thumbnails, at any length.

Queries and keys are random, of smollm2-135m's shape (9 query heads on 3 key heads of 64): the cost of a picture hardly
depends on their values. Run it on an otherwise idle machine; on a busy one only the processor's time says something.

    python benchmarks/explorer.py --tokens 8192 --threads 2
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from theory_lab.explore.session import Session
from theory_lab.probes import Captured


def made(tokens: int, layers: int) -> Captured:
    """Random queries and keys, stretched so that softmax has large and small weights."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 9, tokens, 64), (1, 3, tokens, 64))
    pairs = [tuple(1.5 * torch.randn(shape, generator=generator) for shape in shapes) for _ in range(layers)]
    return Captured.from_tensors("random", [f"t{i}" for i in range(tokens)], pairs)  # type: ignore[arg-type]


def measure(name: str, ask: Callable[[int], object], repeats: int) -> None:
    """Print medians of the times of ``ask(0), ask(1), ...``: on the clock, the longest, and of the processor."""
    walls, works = [], []
    for index in range(repeats):
        wall, work = time.perf_counter(), time.process_time()
        ask(index)
        walls.append(time.perf_counter() - wall)
        works.append(time.process_time() - work)
    middle, busy = statistics.median(walls), statistics.median(works)
    print(f"{name:<42} {middle:7.3f} s, most {max(walls):7.3f} s; processor {busy:7.3f} s; of {repeats}", flush=True)


def main() -> None:
    """Measure every mechanism's pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokens = options.tokens
    session = Session([made(tokens, options.layers)], ["tra", "entmax", "eta", "tda"])
    print(f"{tokens} tokens, {options.threads} threads, torch {torch.__version__}")

    def picture(
        pane: str, head: int, rows: tuple[int, int], columns: tuple[int, int], quality: str = "quick"
    ) -> object:
        words = {
            "pane": pane, "layer": "0", "head": str(head), "rows": f"{rows[0]},{rows[1]}",
            "columns": f"{columns[0]},{columns[1]}", "resolution": "512", "reduce": "max", "quality": quality,
        }  # fmt: skip
        return session.answer("map", words)

    whole = (0, tokens)
    for pane in session.panes.values():
        name = pane.label
        measure(f"{name}: whole map, first time", lambda i, p=pane.id: picture(p, i, whole, whole), 5)
        measure(f"{name}: whole map, again", lambda i, p=pane.id: picture(p, i % 5, whole, whole), 5)

        def zoom(index: int, p: str = pane.id) -> object:
            # Towards a spot two thirds down and a third across, each time by a fifth.
            size = max(16, int(tokens * 0.8 ** (index + 1)))
            row, column = (tokens - size) * 2 // 3, (tokens - size) // 3
            return picture(p, 0, (row, row + size), (column, column + size))

        measure(f"{name}: zooms", zoom, 25)
    measure("thumbnails of a layer, 9 heads", lambda i: session.answer(
        "thumbnails", {"pane": "p0", "layer": str(i), "size": "40"}), options.layers)  # fmt: skip


if __name__ == "__main__":
    main()
