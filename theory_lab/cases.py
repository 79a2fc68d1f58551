"""From settings to work: cases of expectation claims, and pieces of studies.

A *case* is a claim at a point. Its *cell* is what has to be drawn for it; two claims about the same statistic at the
same point share one.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from theory_lab.catalog import find
from theory_lab.claims import CLAIMS, Claim, Point, get_claim
from theory_lab.errors import InputError
from theory_lab.estimation import CERTAIN, Cell, choose, suits_gpu
from theory_lab.estimation.device import LAWS, obstacle
from theory_lab.estimation.intervals import Interval
from theory_lab.estimation.worst_case import sandwich
from theory_lab.noise import ANY_LAW, default_families, get_family
from theory_lab.settings import Settings
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


@lru_cache(maxsize=4)
def build_cases(settings: Settings) -> list[Case]:
    """All combinations of the settings, each once, in the order claim, noise, constants, length.

    Raises
    ------
    InputError
        If a combination is impossible.
    """
    named = [name for name in settings.claims or CLAIMS if name in CLAIMS]
    families = settings.noise or (*default_families(), ANY_LAW)
    if settings.estimator == "worst-case":
        families = (ANY_LAW,)
    elif not settings.noise and settings.estimator != "auto":
        families = tuple(default_families())
    cases: dict[tuple[str, Point], Case] = {}
    for claim_id, noise in itertools.product(named, families):
        claim = get_claim(claim_id)
        name = noise if noise == ANY_LAW else get_family(noise).name
        constants = ("head_dim", "kappa", "beta", "sigma", "rho", "key_rho")
        grid = itertools.product(*map(settings.grid, constants), sorted(set(settings.grid("length"))))
        for head_dim, kappa, beta, sigma, rho, key_rho, length in grid:
            rho_used = rho if "rho" in claim.parameters else 0.0
            point = Point(name, length, head_dim, kappa, beta, sigma, rho_used, key_rho)
            if noise == ANY_LAW:
                point = point.with_(key_rho=0.0)  # by linearity the bound is the same
                if not settings.noise and settings.estimator == "auto" and rho_used != 0:
                    continue  # the class of all correlated pairs has no certificate
            if not settings.claims and claim_id not in DEFAULT_CLAIMS and _adds_nothing(claim, point):
                continue
            bound = claim.bound(point) * settings.bound_scale
            estimator, device = _estimator(settings, claim, point)
            cases.setdefault((claim_id, point), Case(claim, point, estimator, bound, device))
    made = list(cases.values())
    if settings.device == "cuda":
        _refuse_what_no_gpu_can(settings, made)
    return made


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


def _refuse_what_no_gpu_can(settings: Settings, cases: list[Case]) -> None:
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
