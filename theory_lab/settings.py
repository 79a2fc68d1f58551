"""What a run is asked to do, and what it tells its user."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from theory_lab.catalog import find
from theory_lab.claims import CLAIMS
from theory_lab.claims.base import whole
from theory_lab.errors import InputError
from theory_lab.estimation import validate_estimator
from theory_lab.estimation.device import DEVICES
from theory_lab.estimation.verdicts import validate_levels
from theory_lab.noise import ANY_LAW, get_family
from theory_lab.noise.copula import Dependence
from theory_lab.streams import validate_seed

#: 2, 8, 32, ... 2^29, 2^30.
DEFAULT_LENGTHS = (*(2 * 4**k for k in range(15)), 1 << 30)

#: More cells than this do not fit one run's memory and patience.
MOST_CASES = 200_000

#: The grid of a run that names nothing; noise: every built-in family and the worst law of all.
GRID_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "length": DEFAULT_LENGTHS,
    "kappa": (1.0,),
    "beta": (1.0,),
    "sigma": (1.0,),
    "rho": (0.0,),
    "key_rho": (0.0,),
    "lam": (0.5,),
    "head_dim": (64,),
}


class Progress(Protocol):
    """What a run tells its user."""

    def start(self, cells: int, done: int, work: float) -> None:
        """Work begins on ``cells`` cells, of which ``done`` were found; ``work`` is the rough cost of the rest."""

    def advance(self, finished: int, work: float) -> None:
        """``finished`` more cells are complete, and ``work`` of the cost is done."""

    def note(self, text: str) -> None:
        """What is shown beside the rate from now on, such as a loss."""

    def say(self, message: str) -> None:
        """Something worth a line happened."""

    def stop(self) -> None:
        """Work has ended, in whatever way."""


class Silent:
    """Progress that shows nothing."""

    def start(self, cells: int, done: int, work: float) -> None:
        """Do nothing."""

    def advance(self, finished: int, work: float) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def say(self, message: str) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Budget:
    """Limit of a sequential run: trials over all cells, or seconds of wall time."""

    trials: float = math.inf
    seconds: float = math.inf

    def __post_init__(self) -> None:
        for name, value in (("trials", self.trials), ("seconds", self.seconds)):
            if not value > 0:
                raise InputError("budget", value, f"a number of {name} above 0 is allowed")


@dataclass(frozen=True)
class Settings:
    """What to check, and how well.

    Every grid field, from ``noise`` to ``head_dim``, is a tuple, or None for its default; the cases are all their
    combinations. See :func:`theory_lab.check` for their meaning.
    """

    claims: tuple[str, ...] = ()
    noise: tuple[str, ...] | None = None
    length: tuple[int, ...] | None = None
    kappa: tuple[float, ...] | None = None
    beta: tuple[float, ...] | None = None
    sigma: tuple[float, ...] | None = None
    rho: tuple[float, ...] | None = None
    key_rho: tuple[float, ...] | None = None
    lam: tuple[float, ...] | None = None
    head_dim: tuple[int, ...] | None = None
    trials: int | None = None
    estimator: str = "auto"
    device: str = "cpu"
    seed: int = 0
    alpha: float = 1e-3
    tolerance: float = 0.01
    bound_scale: float = 1.0
    budget: Budget | None = None

    def __post_init__(self) -> None:
        validate_estimator(self.estimator)
        validate_seed(self.seed)
        if self.device not in DEVICES:
            raise InputError("device", self.device, f"{' or '.join(DEVICES)} is allowed")
        if self.device == "cuda" and self.estimator not in ("auto", "direct"):
            raise InputError("estimator", self.estimator, "with the device cuda, auto or direct is allowed")
        validate_levels(self.alpha, self.tolerance)
        if self.trials is not None:
            whole(self.trials, "trials", 1, 10**15)
        if not (math.isfinite(self.bound_scale) and self.bound_scale > 0):
            raise InputError("bound_scale", self.bound_scale, "a finite number above 0 is allowed")
        for name in ("noise", *GRID_DEFAULTS):
            if getattr(self, name) == ():
                raise InputError(name, "no value", "at least one is needed")
        for rho in self.rho or ():
            Dependence(rho=rho)
        for key_rho in self.key_rho or ():
            Dependence(key_rho=key_rho)
        if self.estimator == "worst-case" and any(spec != ANY_LAW for spec in self.noise or ()):
            raise InputError("noise", ", ".join(self.noise or ()), "worst-case speaks of all laws: leave noise out")
        combinations = len(self.claims or CLAIMS) * len(self.noise or range(10))
        combinations *= math.prod(len(self.grid(name)) for name in GRID_DEFAULTS if name != "lam")
        if combinations > MOST_CASES:
            raise InputError("grid", f"{combinations:,} combinations", f"at most {MOST_CASES:,} are allowed in one run")
        for lam in self.lam or ():
            if not 0 <= lam < 1:
                raise InputError("lambda", lam, "a number from 0 to below 1 is allowed")
        for claim in self.claims:
            find(claim)
        for spec in self.noise or ():
            if spec != ANY_LAW:
                get_family(spec)

    def grid(self, name: str) -> tuple[Any, ...]:
        """Values of a numeric grid field, defaults included."""
        given = getattr(self, name)
        return GRID_DEFAULTS[name] if given is None else given

    def given(self) -> set[str]:
        """Names of the grid fields that were asked for, as statements call their parameters."""
        names = {name for name in ("noise", *GRID_DEFAULTS) if getattr(self, name) is not None}
        return {"lambda" if name == "lam" else name for name in names}

    def describe(self) -> dict[str, Any]:
        """JSON-serializable form."""
        about = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "budget"}
        limits = {} if self.budget is None else {k: v for k, v in vars(self.budget).items() if math.isfinite(v)}
        return {**about, "budget": limits or None}
