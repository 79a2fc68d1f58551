"""Runs the checks, here or in processes side by side, and makes their findings a certificate."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, as_completed
from dataclasses import replace

from theory_lab.engine import worker_pool
from theory_lab.errors import InputError, WorkerError, hint
from theory_lab.selftest import agreement, intervals, known, noise, streams, verdicts
from theory_lab.selftest.base import SIZES, Check, Finding, Setup, shares
from theory_lab.selftest.certificate import Certificate, Group
from theory_lab.settings import Progress, Silent
from theory_lab.streams import validate_seed

#: What is tested, from the ground up.
GROUPS: dict[str, tuple[Check, ...]] = {
    "known answers": known.CHECKS,
    "random streams": streams.CHECKS,
    "noise": noise.CHECKS,
    "intervals": intervals.CHECKS,
    "agreement": agreement.CHECKS,
    "verdicts": verdicts.CHECKS,
}

#: Rough share of the time that each group takes, for the bar.
_WEIGHT = {"known answers": 1, "random streams": 10, "noise": 10, "intervals": 20, "agreement": 65, "verdicts": 42}

_MOST_PROCESSES = 1024
#: Group, check, and size, seed and share.
_Job = tuple[str, Check, Setup]


def run_selftest(
    size: str = "quick", seed: int = 0, *, groups: Sequence[str] | None = None, processes: int = 1,
    progress: Progress | None = None,
) -> Certificate:  # fmt: skip
    """Run the self-test.

    Parameters
    ----------
    size : str
        "quick" (seconds), "standard" (minutes) or "nightly" (an hour or more, on one core).
    seed : int
        Of everything that is drawn; the same seed gives the same certificate but for the times.
    groups : sequence of str, optional
        Names of :data:`GROUPS`; default all. A certificate of some says so.
    processes : int
        Worker processes, 1 to 1,024; 1 draws in this one. The certificate is the same but for the times.
    progress : Progress, optional
        Told what happens.

    Returns
    -------
    Certificate

    Raises
    ------
    InputError
        For a size or group that does not exist, or a seed or number of processes out of range.
    WorkerError
        If a worker process is lost.
    """
    if size not in SIZES:
        raise InputError("size", size, f"{hint(str(size), SIZES)}one of {', '.join(SIZES)} is allowed")
    setup = Setup(size, validate_seed(seed))
    for name in groups or ():
        if name not in GROUPS:
            raise InputError("group", name, f"{hint(str(name), GROUPS)}one of {', '.join(GROUPS)} is allowed")
    if not 1 <= processes <= _MOST_PROCESSES:
        raise InputError("processes", processes, f"1 to {_MOST_PROCESSES:,} is allowed")
    chosen = [name for name in GROUPS if groups is None or name in groups]
    show = progress or Silent()
    jobs = [
        (name, check, replace(setup, part=part))
        for name in chosen for check in GROUPS[name] for part in (shares(check) if processes > 1 else [setup.part])
    ]  # fmt: skip
    many = {name: sum(job[0] == name for job in jobs) for name in chosen}
    cost = {name: _WEIGHT[name] / many[name] for name in chosen}
    show.start(len(jobs), 0, sum(cost[name] for name, *_ in jobs))
    found: dict[int, list[Finding]] = {}
    seconds = dict.fromkeys(chosen, 0.0)
    try:
        for index, findings, took in _here(jobs) if processes == 1 else _apart(jobs, processes):
            name = jobs[index][0]
            show.note(name)
            found[index] = findings
            seconds[name] += took
            show.advance(1, cost[name])
    finally:
        show.stop()
    parts = tuple(
        Group(name, tuple(f for i, job in enumerate(jobs) if job[0] == name for f in found[i]), seconds[name])
        for name in chosen
    )
    return Certificate.of(setup, parts, complete=len(chosen) == len(GROUPS))


def _here(jobs: Sequence[_Job]) -> Iterator[tuple[int, list[Finding], float]]:
    """Number, findings and processor seconds of each job, one after another."""
    for index, (_, check, setup) in enumerate(jobs):
        yield index, *_timed(check, setup)


def _apart(jobs: Sequence[_Job], processes: int) -> Iterator[tuple[int, list[Finding], float]]:
    """The same from worker processes, in the order of their ends."""
    # The longest first, or one of them ends long after the others: they are the last of the last groups.
    order = sorted(range(len(jobs)), key=lambda index: (-_WEIGHT[jobs[index][0]], -index))
    try:
        with worker_pool(processes) as pool:
            futures = {pool.submit(_timed, *jobs[index][1:]): index for index in order}
            for future in as_completed(futures):
                yield futures[future], *future.result()
    except BrokenExecutor:
        raise WorkerError("a worker process died (killed, or out of memory); try fewer with --processes") from None


def _timed(check: Check, setup: Setup) -> tuple[list[Finding], float]:
    started = time.process_time()
    return _findings(check, setup), time.process_time() - started


def _findings(check: Check, setup: Setup) -> list[Finding]:
    """What a check found; a check that breaks down has failed, and the others still run."""
    found: list[Finding] = []
    try:
        found.extend(check(setup))
    except Exception as error:  # whatever it is, the certificate has to say so
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        found.append(Finding(f"{check.__name__} broke down", len(found), "findings before", what, passed=False))
    return found
