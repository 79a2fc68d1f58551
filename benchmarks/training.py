"""Training speed by mechanism: tokens/s, milliseconds a step, and the share of the device's bfloat16 limit.

    python benchmarks/training.py --size pico --batch 32 --length 512 --attention softmax,tda
    python benchmarks/training.py --size pico --batch 32 --length 512 --attention tda --processes 8
    python benchmarks/training.py --size small --batch 8 --length 4096 --attention softmax,tda --compile

Tokens are random: arithmetic and memory traffic depend little on the text. (Sparse mechanisms do less where fewer keys
survive: theirs is the speed at the start of training, with the scores of an untrained model.) With several processes
all begin their first step together, and the rates add up. One row a line, as CSV.

The first replay of a graph and the first batches cost some 0.2 s once, 10 ms a step of twenty: hence 160 steps.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from theory_lab.errors import TheoryLabError
from theory_lab.settings import Silent

COLUMNS = (
    "device", "torch", "size", "attention", "sdpa", "parameters", "batch", "length", "dtype", "graph", "compile",
    "processes", "tokens_per_second", "ms_per_step", "mfu", "mfu_causal", "setup_seconds", "memory_gib", "loss",
    "error",
)  # fmt: skip


class _Together(Silent):
    """Holds every process at its first step until all are there."""

    def __init__(self, barrier: Any) -> None:
        self._barrier = barrier
        self._made = time.perf_counter()
        self.setup = 0.0
        self.said: list[str] = []

    def start(self, cells: int, done: int, work: float) -> None:
        self.setup = time.perf_counter() - self._made
        if self._barrier is not None:
            self._barrier.wait(300)

    def say(self, message: str) -> None:
        self.said.append(message)


def make_corpus(folder: Path, vocabulary: int, tokens: int) -> None:
    """A corpus of random tokens, in the form that ``theory-lab corpus build`` writes."""
    folder.mkdir(parents=True, exist_ok=True)
    draws = np.random.default_rng(0).integers(3, vocabulary, tokens, dtype=np.uint16)
    for split, part in (("train", draws), ("validation", draws[: tokens // 4])):
        part.astype("<u2").tofile(folder / f"{split}.bin")
        np.save(folder / f"{split}.documents.npy", np.zeros(1, dtype=np.int64))
    sizes = {"train": tokens, "validation": tokens // 4}
    manifest = {
        "format": 1,
        "name": "random",
        "sources": [],
        "splits": {split: {"documents": 1, "tokens": size, "characters": size} for split, size in sizes.items()},
        "tokenizer": {"vocab_size": vocabulary},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "tokenizer.json").write_text("{}")


def sdpa(name: str) -> contextlib.AbstractContextManager[Any]:
    """PyTorch's own choice of a softmax kernel, or one of them.

    The compiler's cache does not know of the choice: each has a cache of its own.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(tempfile.gettempdir()) / f"theory-lab-inductor-{name}")
    if name == "default":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel({"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[name])


def measure(arguments: dict[str, Any], attention: str, corpus: str, barrier: Any = None) -> dict[str, Any]:
    """One run; its row."""
    import torch

    from theory_lab.commands.parsing import named
    from theory_lab.training import TrainSettings, train

    name, parameters = named(attention, "attention")
    row = {"torch": torch.__version__, "attention": attention, **arguments}
    show = _Together(barrier)
    try:
        settings = TrainSettings(
            attention=name,
            attention_parameters=parameters,
            size=arguments["size"],
            corpus=corpus,
            steps=arguments["steps"],
            batch=arguments["batch"],
            length=arguments["length"],
            accumulation=arguments["accumulation"],
            dtype=arguments["dtype"],
            device=arguments["device"],
            graph=arguments["graph"],
            compile=arguments["compile"],
            eval_batches=1,
        )
        with sdpa(arguments["sdpa"]):
            record = train(settings, progress=show).record
    except TheoryLabError as error:
        return {**row, "error": " ".join(str(error).split())}
    except Exception as error:  # one mechanism that fails must not hide the others
        return {**row, "error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    return {
        **row,
        **{
            key: record[key]
            for key in ("device", "parameters", "graph", "tokens_per_second", "mfu", "mfu_causal", "loss")
        },
        "dtype": record["settings"]["dtype"],
        "ms_per_step": 1e3 * record["seconds"] / record["steps"],
        "setup_seconds": round(show.setup, 1),
        "memory_gib": memory,
        "error": "; ".join(show.said),
    }


def _worker(arguments: dict[str, Any], attention: str, corpus: str, barrier: Any, queue: Any) -> None:
    queue.put(measure(arguments, attention, corpus, barrier))


def several(arguments: dict[str, Any], attention: str, corpus: str, processes: int) -> dict[str, Any]:
    """The same run in several processes at once; rates summed, the slowest step."""
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(processes), context.Queue()
    workers = [
        context.Process(target=_worker, args=(arguments, attention, corpus, barrier, queue)) for _ in range(processes)
    ]
    for worker in workers:
        worker.start()
    rows = [queue.get(timeout=400) for _ in workers]
    for worker in workers:
        worker.join()
    failed = [row for row in rows if "tokens_per_second" not in row]
    if failed:
        return {**failed[0], "processes": processes}
    total = {
        key: sum(row[key] or 0.0 for row in rows) for key in ("tokens_per_second", "mfu", "mfu_causal", "memory_gib")
    }
    slow = {key: max(row[key] for row in rows) for key in ("ms_per_step", "setup_seconds")}
    return {**rows[0], **total, **slow, "processes": processes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--attention", default="softmax,tda", help="names, separated by commas; options after ':' and ';'"
    )
    parser.add_argument("--size", default="pico")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--vocabulary", type=int, default=0, help="tokens; 0 is 2048, and 8192 beyond pico")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--graph", default="auto", choices=["auto", "yes", "no"])
    parser.add_argument("--sdpa", default="default", choices=["default", "flash", "cudnn"], help="softmax kernel")
    parser.add_argument("--out", help="append the rows to this file")
    typed = vars(parser.parse_args())
    names = [name.replace(";", ",") for name in typed.pop("attention").split(",")]
    processes, out = typed.pop("processes"), typed.pop("out")
    typed["graph"] = {"auto": None, "yes": True, "no": False}[typed["graph"]]
    vocabulary = typed.pop("vocabulary") or (2048 if typed["size"] in ("pico", "recall") else 8192)
    writer = csv.DictWriter(sys.stdout, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    with tempfile.TemporaryDirectory() as folder:
        make_corpus(Path(folder), vocabulary, max(4 * typed["batch"] * typed["length"], 1_000_000))
        for name in names:
            if processes > 1:
                row = several(typed, name, folder, processes)
            else:
                row = {**measure(typed, name, folder), "processes": 1}
            writer.writerow(row)
            sys.stdout.flush()
            if out:
                path = Path(out)
                fresh = not path.exists()
                with path.open("a") as file:
                    kept = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
                    if fresh:
                        kept.writeheader()
                    kept.writerow(row)


if __name__ == "__main__":
    main()
