"""Claims that are not one expectation at a point: rates, invariances, features.

A *study* is a claim with a checker of its own. It plans *pieces*, independent and reproducible bits of work; each
piece yields *findings*, which become rows. Verdicts are not the study's business: a finding says what was measured
and what the bound is, and the run decides (see ``estimation.verdicts``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from theory_lab.claims.base import Statement
from theory_lab.estimation.base import Sample
from theory_lab.streams import Streams, cell_digest
from theory_lab.studies.rates import Trend


@dataclass(frozen=True)
class Request:
    """What the user asked for, as far as studies are concerned. None means: the study's default.

    Attributes
    ----------
    noise : tuple of str, optional
        Noise families.
    length : tuple of int, optional
        Row lengths.
    kappa, beta, sigma, rho, lam, head_dim : tuple, optional
        Constants.
    trials : int, optional
        Rows or generated cases a piece.
    """

    noise: tuple[str, ...] | None = None
    length: tuple[int, ...] | None = None
    kappa: tuple[float, ...] | None = None
    beta: tuple[float, ...] | None = None
    sigma: tuple[float, ...] | None = None
    rho: tuple[float, ...] | None = None
    lam: tuple[float, ...] | None = None
    head_dim: tuple[int, ...] | None = None
    trials: int | None = None


@dataclass(frozen=True)
class Piece:
    """A bit of work of a study.

    Attributes
    ----------
    study : str
        The study's id.
    arguments : tuple of (str, value)
        What is drawn, JSON-serializable, sorted by name; the piece's random streams are keyed by it and the seed.
    cost : float
        Rough seconds.
    local : bool
        Whether it rests on what only this process knows, so that no worker can run it.
    """

    study: str
    arguments: tuple[tuple[str, Any], ...]
    cost: float = 1.0
    local: bool = False

    @staticmethod
    def of(study: str, cost: float = 1.0, **arguments: Any) -> Piece:
        """Make a piece; lists become tuples, so that pieces can be hashed."""
        return Piece(study, tuple((name, _frozen(value)) for name, value in sorted(arguments.items())), cost)

    def __getitem__(self, name: str) -> Any:
        return dict(self.arguments)[name]

    def digest(self, seed: int) -> str:
        """Name of the piece's streams and of its file."""
        return cell_digest({"study": self.study, **dict(self.arguments)}, seed)

    def streams(self, seed: int, block: int = 0) -> Streams:
        """Random streams of the piece."""
        return Streams(self.digest(seed), block)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class Finding:
    """One thing measured, and the bound it is held against: it holds if the truth is at most ``bound``.

    Attributes
    ----------
    subject : str
        The law or mechanism it is about (column ``noise``).
    bound : float
        Right-hand side.
    length : int or None
        Row length n.
    sample : Sample or None
        Random observations; their interval decides. Without one the measurement is certain:
    estimate, low, high : float
        the value, and the ends between which it is known to lie.
    trend : Trend or None
        A fitted slope, whose interval decides instead.
    trials : int
        Rows drawn or cases searched.
    method : str
        How it was measured, where the interval's method does not say it.
    exact : float or None
        The same quantity by closed form.
    assumptions : str
        ``met``, or which assumption fails: then the row is a control.
    note : str
        A counterexample, or what else a reader should know.
    parameters : mapping
        Values for the columns kappa, beta, sigma, rho, lambda, head_dim where they apply.
    """

    subject: str
    bound: float
    length: int | None = None
    sample: Sample | None = None
    trend: Trend | None = None
    estimate: float = math.nan
    low: float = math.nan
    high: float = math.nan
    trials: int = 0
    method: str = ""
    exact: float | None = None
    assumptions: str = "met"
    note: str = ""
    parameters: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def certain(subject: str, value: float, bound: float, **more: Any) -> Finding:
        """A finding without randomness."""
        return Finding(subject, bound, estimate=value, low=value, high=value, **more)

    def to_json(self) -> dict[str, Any]:
        """JSON-serializable form; floats survive exactly."""
        about = asdict(self)
        about["parameters"] = dict(self.parameters)
        return json.loads(json.dumps(about))

    @staticmethod
    def from_json(about: Mapping[str, Any]) -> Finding:
        """Inverse of :meth:`to_json`."""
        sample, trend = about["sample"], about["trend"]
        return Finding(
            **{
                **about,
                "sample": None if sample is None else Sample(**sample),
                "trend": None if trend is None else Trend(**trend),
            }
        )


@dataclass(frozen=True)
class Study(Statement):
    """A claim with a checker of its own.

    Attributes
    ----------
    plan : callable
        Request -> pieces.
    work : callable
        (piece, seed) -> findings; a pure function, run in any process.
    needs_torch : bool
        Whether the work imports torch.
    """

    plan: Callable[[Request], list[Piece]]
    work: Callable[[Piece, int], list[Finding]]
    needs_torch: bool = False
