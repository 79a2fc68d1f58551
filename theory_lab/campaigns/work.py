"""Carrying out a campaign: worker processes take one run after the other, in slices of time."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory_lab.ending import INTERRUPTS, begin_worker, ignored
from theory_lab.errors import InputError, TheoryLabError
from theory_lab.outside import read_json, reason
from theory_lab.settings import Progress, Silent
from theory_lab.store import write_whole

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

    from theory_lab.campaigns.plan import Campaign, Run

RESULT = "result.json"
#: A slice ends this long before its time, so that what runs can be written.
_MARGIN = 5.0
#: Seconds for the last step and its checkpoint, once the campaign is told to end.
_PATIENCE = 20.0


@dataclass(frozen=True)
class Slice:
    """What a slice did.

    Attributes
    ----------
    finished : int
        Runs with a result, those of earlier slices included.
    remaining : int
        Runs without one.
    failed : dict of str to str
        Run folder -> why.
    """

    finished: int
    remaining: int
    failed: dict[str, str]


def run_campaign(
    campaign: Campaign,
    out: str | Path,
    *,
    corpus: str | None = None,
    devices: Sequence[str] = ("cpu",),
    processes: int = 1,
    minutes: float | None = None,
    only: Sequence[str] = (),
    progress: Progress | None = None,
) -> Slice:
    """Train and measure what is not finished yet.

    Parameters
    ----------
    campaign : Campaign
    out : path
        Its folder of results; what is finished there stays.
    corpus : str, optional
        Folder of the corpus, for campaigns that train on one.
    devices : sequence of str
        Such as ("cuda:0", "cuda:1"); runs are dealt out to whichever is free.
    processes : int
        Worker processes a device. Small models leave most of a GPU idle, so several share it.
    minutes : float, optional
        No run begins that would not end within this time, judging by the slowest so far. A run that is cut off goes on
        from its last checkpoint in the next slice.
    only : sequence of str
        Names of runs; all by default.
    progress : Progress, optional

    Returns
    -------
    Slice

    Raises
    ------
    InputError
        For a missing corpus, an unknown run, a device that is not there or a folder that cannot be written.
    """
    if campaign.data == "corpus":
        from theory_lab.corpus import Corpus

        if corpus is None:
            raise InputError("corpus", None, "the folder of a corpus is needed: theory-lab corpus build makes one")
        Corpus.open(corpus)  # damaged ones are refused here, once
    from theory_lab.models.loading import check_device

    for name in only:
        if name not in campaign.names():
            raise InputError("only", name, f"runs are {', '.join(campaign.names())}")
    if processes < 1:
        raise InputError("processes", processes, "at least 1 is needed")
    for device in devices:
        check_device(device)
    root = Path(out)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("out", str(out), f"a folder that can be written ({error.strerror or error})") from None
    runs = [run for run in campaign.runs if not only or run.name in only]
    todo = [run for run in runs if not (root / run.folder / RESULT).is_file()]
    end = None if minutes is None else time.monotonic() + 60.0 * minutes - _MARGIN
    show = progress or Silent()
    show.start(len(runs), len(runs) - len(todo), float(len(todo)))
    failed: dict[str, str] = {}
    try:
        with _pool(devices, processes) as pool:
            _work_through(pool, len(devices) * processes, todo, root, corpus, end, show, failed)
    finally:
        show.stop()
    finished = sum((root / run.folder / RESULT).is_file() for run in runs)
    return Slice(finished, len(runs) - finished, failed)


def _work_through(
    pool: ProcessPoolExecutor,
    width: int,
    todo: Sequence[Run],
    root: Path,
    corpus: str | None,
    end: float | None,
    show: Progress,
    failed: dict[str, str],
) -> None:
    waiting = list(todo)
    running: dict[Future[float], tuple[Run, float]] = {}
    slowest = 0.0
    while waiting or running:
        while waiting and len(running) < width and (end is None or time.monotonic() + slowest < end):
            run = waiting.pop(0)
            running[pool.submit(_one, run, str(root / run.folder), corpus)] = (run, time.monotonic())
        if not running:
            return
        left = None if end is None else max(end - time.monotonic(), 0.0)
        done, _ = wait(running, timeout=left, return_when=FIRST_COMPLETED)
        if not done:
            show.say("the slice's time is over: what runs now goes on from its checkpoints in the next")
            _stop(pool, _MARGIN - 1.0)
            return
        for future in done:
            run, _began = running.pop(future)
            error = future.exception()
            if error is None:
                slowest = max(slowest, future.result())
            else:
                failed[run.folder] = f"{type(error).__name__}: {error}"
                show.say(f"{run.folder}: {failed[run.folder]}")
            show.advance(1, 1.0)


def _stop(pool: ProcessPoolExecutor, seconds: float) -> None:
    """Ask the workers to write their checkpoints and end; those that have not after these seconds are killed."""
    workers = list((getattr(pool, "_processes", None) or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    end = time.monotonic() + seconds
    try:
        for process in workers:
            process.terminate()
        for process in workers:
            process.join(max(end - time.monotonic(), 0.0))
    finally:
        for process in workers:
            process.kill()


@contextmanager
def _pool(devices: Sequence[str], processes: int) -> Iterator[ProcessPoolExecutor]:
    # A CUDA context does not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ignored(*INTERRUPTS):  # the first queue starts Python's tracker of them, which must outlive the workers
        queue: Queue[str] = context.Queue()
    for _ in range(processes):
        for device in devices:
            queue.put(device)
    workers = len(devices) * processes
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(queue, workers))
    try:
        yield pool
    except BaseException:
        _stop(pool, _PATIENCE)
        raise
    pool.shutdown(wait=True, cancel_futures=True)


_device = "cpu"
_workers = 0  # of the campaign, in one of its workers


def _begin(queue: Queue[str], workers: int) -> None:
    global _device, _workers
    begin_worker()
    if hasattr(os, "setsid"):
        os.setsid()  # a training ends at once at its second signal: the first, and only one, comes from the parent
    _device, _workers = queue.get(), workers


def _one(run: Run, folder: str, corpus: str | None) -> float:
    """Train and measure one run; returns the seconds it took."""
    import torch

    from theory_lab.campaigns.measure import measure_model
    from theory_lab.store import provenance
    from theory_lab.tasks.registry import takes_text
    from theory_lab.training import TrainSettings, train
    from theory_lab.training.starting import inherited

    if _workers:
        torch.set_num_threads(max((os.cpu_count() or 1) // _workers, 1))
        torch.backends.cuda.matmul.allow_tf32 = True
    began = time.monotonic()
    place = Path(folder)
    try:
        task = run.train.get("task")
        settings = TrainSettings(
            **{"save_every": max(run.train.get("steps", 200) // 2, 1), **inherited(run.train)},
            corpus=corpus if task is None or takes_text(task) else None,
            seed=run.seed,
            device=_device,
            out=str(place / "model"),
            tensorboard=False,
        )
        if settings.compile:
            # A model compiled earlier in this process counts towards the limit after which nothing is compiled.
            torch.compiler.reset()
        record = train(settings).record
        trained = time.monotonic()
        found = measure_model(place / "model", run.measure, corpus, _device)
    except TheoryLabError as error:
        raise RuntimeError(str(error)) from None  # crosses to the parent whatever its arguments
    except Exception:
        raise RuntimeError(traceback.format_exc()) from None
    result: dict[str, Any] = {
        "name": run.name,
        "seed": run.seed,
        "train": record,
        "layers": _table(place / "model" / "layers.csv"),
        "measured": found,
        "seconds": {"train": round(trained - began, 2), "measure": round(time.monotonic() - trained, 2)},
        **provenance(),
    }
    write_whole(str(place / RESULT), (json.dumps(result) + "\n").encode())
    return time.monotonic() - began


def _table(path: Path) -> list[dict[str, Any]]:
    import pandas as pd

    if not path.is_file():
        return []
    rows = pd.read_csv(path).to_dict("records")
    return [{str(k): v for k, v in row.items() if v == v} for row in rows]


def results(campaign: Campaign, out: str | Path) -> list[dict[str, Any]]:
    """The finished runs of a campaign's folder, in the plan's order; InputError for a file that is none."""
    found = []
    for run in campaign.runs:
        path = Path(out) / run.folder / RESULT
        if path.is_file():
            try:
                result = read_json(path)
            except (OSError, ValueError) as error:
                raise InputError("out", str(path), f"it cannot be read ({reason(error)}): measure it again") from None
            if not isinstance(result, dict) or result.get("name") != run.name or result.get("seed") != run.seed:
                raise InputError("out", str(path), f"the result of '{run.name}', seed {run.seed}, belongs there")
            found.append(result)
    return found
