"""Runs the checks, one after another, and makes their findings a certificate."""

from __future__ import annotations

import time
from collections.abc import Sequence

from theory_lab.errors import InputError, hint
from theory_lab.selftest import agreement, intervals, known, noise, streams, verdicts
from theory_lab.selftest.base import SIZES, Check, Finding, Setup
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
_WEIGHT = {"known answers": 1, "random streams": 3, "noise": 5, "intervals": 8, "agreement": 12, "verdicts": 30}


def run_selftest(
    size: str = "quick", seed: int = 0, *, groups: Sequence[str] | None = None, progress: Progress | None = None
) -> Certificate:
    """Run the self-test.

    Parameters
    ----------
    size : str
        "quick" (seconds), "standard" (minutes) or "nightly" (an hour or more, on one core).
    seed : int
        Of everything that is drawn; the same seed gives the same certificate but for the times.
    groups : sequence of str, optional
        Names of :data:`GROUPS`; default all. A certificate of some says so.
    progress : Progress, optional
        Told what happens.

    Returns
    -------
    Certificate

    Raises
    ------
    InputError
        For a size or group that does not exist, or a seed out of range.
    """
    if size not in SIZES:
        raise InputError("size", size, f"{hint(str(size), SIZES)}one of {', '.join(SIZES)} is allowed")
    setup = Setup(size, validate_seed(seed))
    for name in groups or ():
        if name not in GROUPS:
            raise InputError("group", name, f"{hint(str(name), GROUPS)}one of {', '.join(GROUPS)} is allowed")
    chosen = [name for name in GROUPS if groups is None or name in groups]
    show = progress or Silent()
    steps = [(name, check) for name in chosen for check in GROUPS[name]]
    cost = {name: _WEIGHT[name] / len(GROUPS[name]) for name in chosen}
    show.start(len(steps), 0, sum(cost[name] for name, _ in steps))
    found: dict[str, list[Finding]] = {name: [] for name in chosen}
    seconds = dict.fromkeys(chosen, 0.0)
    try:
        for name, check in steps:
            show.note(name)
            started = time.process_time()
            found[name] += _findings(check, setup)
            seconds[name] += time.process_time() - started
            show.advance(1, cost[name])
    finally:
        show.stop()
    parts = tuple(Group(name, tuple(found[name]), seconds[name]) for name in chosen)
    return Certificate.of(setup, parts, complete=len(chosen) == len(GROUPS))


def _findings(check: Check, setup: Setup) -> list[Finding]:
    """What a check found; a check that breaks down has failed, and the others still run."""
    found: list[Finding] = []
    try:
        found.extend(check(setup))
    except Exception as error:  # whatever it is, the certificate has to say so
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        found.append(Finding(f"{check.__name__} broke down", len(found), "findings before", what, passed=False))
    return found
