"""From settings to work: cases of expectation claims, and pieces of studies.

A *case* is a claim at a point. Its *cell* is what has to be drawn for it; two claims about the same statistic at the
same point share one.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, overload

import numpy as np

from theory_lab.catalog import find
from theory_lab.claims import CLAIMS, Claim, Point, get_claim
from theory_lab.claims.points import AXES, Points
from theory_lab.errors import InputError
from theory_lab.estimation import CERTAIN, Cell, choose, suits_gpu
from theory_lab.estimation.device import LAWS, obstacle
from theory_lab.estimation.intervals import Interval
from theory_lab.estimation.worst_case import sandwich
from theory_lab.noise import ANY_LAW, default_families, get_family
from theory_lab.settings import Settings
from theory_lab.streams import F64
from theory_lab.studies import STUDIES, Piece, Request, Study

DEFAULT_CLAIMS = ("tda-4.3", "tda-4.6")


@dataclass(frozen=True)
class Case:
    """A claim at a point, by an estimator (never ``auto``)."""

    claim: Claim
    point: Point
    estimator: str
    bound: float
    device: str = "cpu"

    def cell(self, seed: int) -> Cell | None:
        """What must be drawn; None if nothing must."""
        if self.estimator in CERTAIN:
            return None
        return Cell(self.claim.statistic, self.point, self.estimator, seed, self.device)


@dataclass(frozen=True, eq=False)
class Group:
    """Cases of one claim and one noise as columns.

    Attributes
    ----------
    claim : Claim
    points : Points
    estimators, devices : list of str
        Of each point.
    bounds : ndarray, shape (points,)
        The claim's bounds, scaled.
    """

    claim: Claim
    points: Points
    estimators: list[str]
    devices: list[str]
    bounds: F64

    def case(self, row: int) -> Case:
        """One of them."""
        return Case(self.claim, self.points[row], self.estimators[row], float(self.bounds[row]), self.devices[row])


class Cases(Sequence[Case]):
    """The cases of a run, made when they are asked for: a sweep has many, and works on its groups."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = tuple(group for group in groups if len(group.points))
        self._ends = list(itertools.accumulate(len(group.points) for group in self.groups))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Case: ...

    @overload
    def __getitem__(self, index: slice) -> list[Case]: ...

    def __getitem__(self, index: int | slice) -> Case | list[Case]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]
        group = bisect_right(self._ends, index)
        return self.groups[group].case(index - (self._ends[group - 1] if group else 0))


@lru_cache(maxsize=4)
def build_cases(settings: Settings) -> Cases:
    """All combinations of the settings, each once, in the order claim, noise, constants, length.

    Raises
    ------
    InputError
        If a combination is impossible.
    """
    named = dict.fromkeys(name for name in settings.claims or CLAIMS if name in CLAIMS)
    families = settings.noise or (*default_families(), ANY_LAW)
    if settings.estimator == "worst-case":
        families = (ANY_LAW,)
    elif not settings.noise and settings.estimator != "auto":
        families = tuple(default_families())
    names = dict.fromkeys(noise if noise == ANY_LAW else get_family(noise).name for noise in families)
    known: dict[tuple[str, bool], Points] = {}
    chosen: dict[tuple[str, str, bool], list[tuple[str, str]]] = {}
    groups = []
    for claim_id, noise in itertools.product(named, names):
        claim = get_claim(claim_id)
        of_rho = "rho" in claim.parameters
        if (noise, of_rho) not in known:
            known[noise, of_rho] = Points.product(noise, _axes(settings, noise, of_rho))
        points = known[noise, of_rho]
        key = (claim.statistic, noise, of_rho)
        if key not in chosen:
            # Which scores exceed tau in both views is asked of correlated ones alone.
            joint = claim.statistic == "consensus" and (settings.estimator == "auto" or settings.device == "cuda")
            if settings.estimator != "auto" and settings.device == "cpu" and len(points):
                chosen[key] = [_estimator(settings, claim, points[0])] * len(points)
            else:
                chosen[key] = points.map(partial(_estimator, settings, claim), joint)
        how = chosen[key]
        if not settings.claims and claim_id not in DEFAULT_CLAIMS:
            rows = np.flatnonzero(~np.array(points.map(partial(_adds_nothing, claim)), dtype=bool))
            points, how = points.take(rows), [how[row] for row in rows.tolist()]
        estimators, devices = [list(column) for column in zip(*how, strict=True)] or ([], [])
        with np.errstate(over="ignore"):  # what no float holds is infinite
            bounds = np.fromiter(points.map(claim.bound), float, len(points)) * settings.bound_scale
        groups.append(Group(claim, points, estimators, devices, bounds))
    made = Cases(groups)
    if settings.device == "cuda":
        _refuse_what_no_gpu_can(settings, made)
    return made


def _axes(settings: Settings, noise: str, of_rho: bool) -> dict[str, Sequence[Any]]:
    """What the numbers of a claim's points may be."""
    axes: dict[str, Sequence[Any]] = {name: settings.grid(name) for name in AXES}
    axes["length"] = sorted(set(axes["length"]))
    if not of_rho:
        axes["rho"] = (0.0,)
    if noise == ANY_LAW:
        axes["key_rho"] = (0.0,)  # by linearity the bound is the same
        if not settings.noise and settings.estimator == "auto":
            # The class of all correlated pairs has no certificate.
            axes["rho"] = [rho for rho in axes["rho"] if rho == 0]
    return axes


def _adds_nothing(claim: Claim, point: Point) -> bool:
    """Whether a general form coincides with the theorem it generalizes."""
    theorem = get_claim(claim.id.rsplit("-", 1)[0])
    return math.isclose(claim.bound(point), theorem.bound(point), rel_tol=1e-9)


def _estimator(settings: Settings, claim: Claim, point: Point) -> tuple[str, str]:
    """Estimator and device."""
    can = settings.device == "cuda" and obstacle(point) is None
    if can and (settings.estimator == "direct" or suits_gpu(claim.statistic, point)):
        return "direct", "cuda"
    if settings.estimator == "auto":
        return choose(claim.statistic, point), "cpu"
    if point.noise == ANY_LAW and settings.estimator != "worst-case":
        raise InputError("noise", ANY_LAW, "only the estimators auto and worst-case speak of all laws")
    return settings.estimator, "cpu"


def _refuse_what_no_gpu_can(settings: Settings, cases: Iterable[Case]) -> None:
    """InputError for a claim that was named though no GPU draws it, and where there is nothing for the GPU at all."""
    studies = [name for name in settings.claims if name in STUDIES]
    if studies:
        raise InputError("device", "cuda", f"{studies[0]} runs on the cpu alone: leave --device out, or the claim")
    why = [obstacle(case.point) for case in cases]
    if None not in why:
        reasons = ", ".join(sorted({str(reason) for reason in why})) or "no case"
        raise InputError("device", "cuda", f"it draws {LAWS}, and nothing that was asked for ({reasons})")


def device_notes(settings: Settings, cases: Sequence[Case], pieces: Sequence[Piece]) -> list[str]:
    """What a run that asks for the GPU does elsewhere, in one line; nothing for other runs."""
    if settings.device == "cpu":
        return []
    here: dict[str, int] = {}
    for case in cases:
        if case.device == "cpu":
            reason = obstacle(case.point) or "events too rare, or impossible, for drawing every score"
            here[reason] = here.get(reason, 0) + 1
    studies = len({piece.study for piece in pieces})
    on_cpu = [f"{reason}: {count}" for reason, count in here.items()] + ([f"studies: {studies}"] if studies else [])
    line = f"on the GPU: {len(cases) - sum(here.values())} of {len(cases)} cases"
    return [f"{line}; on the CPU as usual: {', '.join(on_cpu)}" if on_cpu else line]


def build_pieces(settings: Settings) -> tuple[list[Piece], list[str]]:
    """The pieces of every study that the settings ask for.

    A study that is not named joins if it depends on every grid option that was given, so that a question about
    lengths is not answered with searches that know none.

    Returns
    -------
    pieces : list of Piece
    skipped : list of str
        One line for each study left out because a package is missing.

    Raises
    ------
    InputError
        If a study that was named needs a package that is missing.
    """
    if settings.estimator != "auto" and not settings.claims:
        return [], []
    request = Request(
        noise=settings.noise,
        length=settings.length,
        kappa=settings.kappa,
        beta=settings.beta,
        sigma=settings.sigma,
        rho=settings.rho,
        lam=settings.lam,
        head_dim=settings.head_dim,
        trials=settings.trials,
    )
    pieces: list[Piece] = []
    skipped = []
    for study in _wanted_studies(settings):
        if study.needs_torch and importlib.util.find_spec("torch") is None:
            if settings.claims:
                raise InputError("claim", study.id, "it needs torch: pip install 'theory-lab[torch]'")
            skipped.append(f"{study.id} is not checked: it needs torch (pip install 'theory-lab[torch]')")
            continue
        planned = study.plan(request)
        if not planned and settings.claims:
            given = ", ".join(sorted(settings.given())) or "these options"
            raise InputError("claim", study.id, f"it has nothing to check with the {given} asked for")
        pieces += planned
    return pieces, skipped + _ignored(settings)


def _ignored(settings: Settings) -> list[str]:
    """One line for each named claim that does not depend on an option that was given."""
    lines = []
    for name in settings.claims:
        idle = sorted(settings.given() - set(find(name).parameters))
        if name in STUDIES and settings.estimator != "auto":
            idle.append("estimator")
        if idle:
            lines.append(f"{name} does not depend on {', '.join(idle)}, which it ignores")
    return lines


def _wanted_studies(settings: Settings) -> list[Study]:
    if settings.claims:
        return [STUDIES[name] for name in dict.fromkeys(settings.claims) if find(name).id in STUDIES]
    return [study for study in STUDIES.values() if settings.given() <= set(study.parameters)]


class Evaluation(NamedTuple):
    """What is known of a case without randomness."""

    estimate: float
    interval: Interval
    method: str
    note: str
    seconds: float


def evaluate(case: Case) -> Evaluation:
    """Evaluate a case that needs no draws: ``exact`` or ``worst-case``."""
    started = time.perf_counter()
    if case.estimator == "exact":
        value = case.claim.exact(case.point)
        if value is None:
            raise InputError("estimator", "exact", f"{case.claim.id} has no exact value for noise '{case.point.noise}'")
        return Evaluation(value, Interval(value, value, "exact"), "exact", "", time.perf_counter() - started)
    found = sandwich(case.point, case.claim.statistic)
    ends = Interval(found.lower, found.upper, "sandwich")
    method = f"sandwich: two-point witness, {found.certificate.kind} certificate"
    note = f"the worst law has P(X > tau) = {found.probability:.7g}; gap to the certificate {found.gap:.1e}"
    return Evaluation(found.lower, ends, method, note, time.perf_counter() - started)
