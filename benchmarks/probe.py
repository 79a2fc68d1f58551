"""What a probe costs beside the forward pass that it rides on: time as a ratio within one run, and peak memory.

For each length the model's plain forward pass (its own attention, no head, no cache) and the same pass probed, rows
of every head included, take turns; medians over the rounds. On the CPU, CPU time decides, because a shared machine's
wall time says little. Peak memory is that of the whole process on the CPU, of PyTorch's allocations on a GPU.

    python benchmarks/probe.py --lengths 1024,8192
    python benchmarks/probe.py --device cuda --dtype bfloat16 --lengths 8192,32768,131072 --csv out.csv

`theory-lab reproduce ours.probe-h200` draws such a file, experiments/ours/measured/probe-h200.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

from theory_lab import __version__
from theory_lab.models import load_model
from theory_lab.probes import texts
from theory_lab.probes.accumulate import GROUPS
from theory_lab.probes.plan import Plan
from theory_lab.probes.positions import scale_positions
from theory_lab.probes.replay import Replays
from theory_lab.probes.running import Watched, run_backbone
from theory_lab.probes.texts import Window
from theory_lab.probes.watching import watch
from theory_lab.probes.whatif import parse_mechanism
from theory_lab.settings import Silent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lengths", default="1024,8192")
    parser.add_argument("--as", dest="mechanisms", default="model", help="comma-separated, such as model,tra,tda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", type=Path)
    chosen = parser.parse_args()
    loaded = load_model(chosen.model, device=chosen.device, dtype=chosen.dtype)
    tokens: list[int] = []
    for text in texts.shipped():
        tokens += texts.tokenize(loaded.tokenizer, text)
    rows = []
    scaled = loaded.max_positions or 0
    for length in (int(part) for part in chosen.lengths.split(",")):
        factor = 1
        while scaled and scaled * factor < length:
            factor *= 2
        if factor > 1:
            scaled = scale_positions(loaded.model, f"yarn:{factor}")
        ids = (tokens * (1 + length // len(tokens)))[:length]
        for name in chosen.mechanisms.split(","):
            row = measure(loaded, ids, name, chosen.rounds)
            rows.append({**about(chosen), **row})
            print(json.dumps(row), flush=True)
            if chosen.csv:
                write(chosen.csv, rows)
    return 0


def measure(loaded: object, ids: list[int], name: str, rounds: int) -> dict[str, object]:
    """Plain and probed passes in turn."""
    length = len(ids)
    plan = Plan(
        lengths=(length,),
        layers=tuple(range(loaded.layers)),
        heads=tuple(range(loaded.heads)),
        groups=tuple(group for group in GROUPS if group != "scores"),
        mechanism=parse_mechanism(name),
        windows=1,
        seed=0,
    )
    window = Window("benchmark", "", 0, 0, tuple(ids))

    def plain() -> None:
        with torch.inference_mode():
            run_backbone(loaded, ids)

    def probed() -> None:
        current: list[Watched] = []

        def run() -> None:
            current[:] = [Watched(plan, (length,), Silent(), 0.0, replays)]
            with torch.inference_mode():
                run_backbone(loaded, ids)
            frame = current[0].frame(window, "benchmark")
            if frame is None or len(frame) != loaded.layers * loaded.heads:
                raise RuntimeError("a probe must give a row for every head")

        replays: Replays[list[str]] = Replays()
        with watch(loaded.model, lambda call: current[0](call)):
            # A watch checks each layer's first call, and a GPU's work is recorded in the first pass; a probe of several
            # windows pays for that once, and on a GPU, where it shows, it is timed apart.
            timed.append(clock(run, cuda))
            if cuda:
                timed.append(clock(run, cuda))

    cuda = loaded.model.device.type == "cuda"
    timed: list[tuple[float, float]] = []
    if cuda:
        for _ in range(2):
            plain()
            probed()
    times: dict[str, list[tuple[float, float]]] = {"plain": [], "probed": [], "first": []}
    peaks = {}
    for _ in range(rounds):
        for kind in ("plain", "probed"):
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            timed.clear()
            if kind == "plain":
                timed.append(clock(plain, cuda))
            else:
                probed()
                times["first"].append(timed[0])
            times[kind].append(timed[-1])
            peaks[kind] = torch.cuda.max_memory_allocated() if cuda else peak_rss()
    wall = {kind: [w for w, _ in values] for kind, values in times.items()}
    cpu = {kind: [c for _, c in values] for kind, values in times.items()}
    deciding = wall if cuda else cpu
    ratios = [b / a for a, b in zip(deciding["plain"], deciding["probed"], strict=True)]
    return {
        "length": length,
        "weights": name,
        "rounds": rounds,
        "plain_s": round(statistics.median(wall["plain"]), 5),
        "probed_s": round(statistics.median(wall["probed"]), 5),
        "plain_cpu_s": round(statistics.median(cpu["plain"]), 3),
        "probed_cpu_s": round(statistics.median(cpu["probed"]), 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_low": round(min(ratios), 3),
        "ratio_high": round(max(ratios), 3),
        "first_s": round(statistics.median(wall["first"]), 5),
        "plain_peak_gb": round(peaks["plain"] / 1e9, 3),
        "probed_peak_gb": round(peaks["probed"] / 1e9, 3),
    }


def clock(run: Callable[[], None], cuda: bool) -> tuple[float, float]:
    """Wall and CPU seconds."""
    if cuda:
        torch.cuda.synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu


def peak_rss() -> int:
    """Of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def about(chosen: argparse.Namespace) -> dict[str, object]:
    """What the numbers depend on."""
    device = (
        torch.cuda.get_device_name() if chosen.device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"
    )
    return {
        "date": date.today().isoformat(),
        "theory_lab": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device,
        "model": chosen.model,
        "dtype": chosen.dtype,
    }


def write(path: Path, rows: list[dict[str, object]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
