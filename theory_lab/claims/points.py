"""Points as columns: a sweep of 100,000 cells is seven axes and where on them each point lies.

What is computed of every point, above all P(X > tau), is computed here once, many points at a time, and with the bits
that :class:`Point` would compute one by one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import astuple, replace
from functools import cached_property
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from theory_lab.claims.base import CHECKS, Point, check_proxy, threshold
from theory_lab.errors import InputError
from theory_lab.noise import ANY_LAW, Scale, get_family
from theory_lab.noise.copula import joint_survival, latent_threshold
from theory_lab.streams import F64

I64 = npt.NDArray[np.int64]

#: The numbers of a point, in the order in which a sweep varies them: the last ones first.
AXES = ("head_dim", "kappa", "beta", "sigma", "rho", "key_rho", "length")


class _Passing(Point):
    """A point whose numbers change, and by which nothing can be remembered; its copies are points that stay."""

    def __hash__(self) -> int:
        raise TypeError("this point stands for others in turn, and cannot be a key: a copy of it can")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and astuple(self) == astuple(other)

    def __reduce__(self) -> tuple[type[Point], tuple[Any, ...]]:
        return Point, astuple(self)

    @property
    def tail(self) -> float:
        """P(X > tau) of one score: all points' are worked out when the first is asked for, as some laws take long."""
        points, at = vars(self)["place"]
        return self.law().tail(self.tau) if self.noise == ANY_LAW else points.listed_tails[at]

    def with_(self, **changes: Any) -> Point:
        """See :meth:`Point.with_`."""
        return replace(copy(self), **changes)


class Points(Sequence[Point]):
    """Points of one noise.

    Parameters
    ----------
    noise : str
        Name of a family, or ``any``.
    axes : mapping
        Name of each number of a point -> its distinct values.
    codes : mapping
        Name -> for each point, which of the values it has; shape (m,).
    """

    def __init__(self, noise: str, axes: Mapping[str, Sequence[Any]], codes: Mapping[str, I64]) -> None:
        self.noise = noise
        self._axes = dict(axes)
        self._codes = dict(codes)

    @staticmethod
    def product(noise: str, axes: Mapping[str, Sequence[Any]]) -> Points:
        """All combinations of the values, the last of :data:`AXES` varying fastest.

        Raises
        ------
        InputError
            As :class:`Point` does for the first one that cannot be.
        """
        distinct = {name: tuple(dict.fromkeys(axes[name])) for name in AXES}
        sizes = [len(distinct[name]) for name in AXES]
        places = np.unravel_index(np.arange(int(np.prod(sizes))), sizes)
        points = Points(noise, distinct, dict(zip(AXES, places, strict=True)))
        try:
            points._check()
        except InputError:
            for _ in points:  # which one is the first?
                pass
            raise
        return points

    def _check(self) -> None:
        if not len(self):
            return
        for name, check in CHECKS.items():
            for value in self._axes[name]:
                check(value)
        sigmas, dims = self._axes["sigma"], self._axes["head_dim"]
        for sigma, dim in ((min(sigmas), max(dims)), (max(sigmas), min(dims))):
            check_proxy(sigma, dim)
        if self.noise != ANY_LAW:
            for dim in dims:
                get_family(self.noise).check_head_dim(dim)

    def __len__(self) -> int:
        return len(self._codes["length"])

    @overload
    def __getitem__(self, index: int) -> Point: ...

    @overload
    def __getitem__(self, index: slice) -> Points: ...

    def __getitem__(self, index: int | slice) -> Point | Points:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        return Point(self.noise, **{name: self._axes[name][self._codes[name][index]] for name in AXES})

    def take(self, rows: I64) -> Points:
        """Some of the points; what is known of them is kept."""
        some = Points(self.noise, self._axes, {name: codes[rows] for name, codes in self._codes.items()})
        for name in ("taus", "tails", "joint_tails"):
            if name in vars(self):
                vars(some)[name] = vars(self)[name][rows]
        return some

    def varies(self, name: str) -> bool:
        """Whether a number takes several values; the points of a ``take`` may yet agree."""
        return len(self._axes[name]) > 1

    def values(self, name: str) -> list[Any]:
        """A number of every point, as it was given."""
        return self._spread(name, self._axes[name])

    def texts(self, name: str) -> list[str]:
        """The ``repr`` of a number of every point."""
        return self._spread(name, list(map(repr, self._axes[name])))

    def plain(self) -> bool:
        """Whether every number is a plain ``int`` or ``float``."""
        return all(type(value) in (int, float) for name in AXES for value in self._axes[name])

    def _spread(self, name: str, values: Sequence[Any]) -> list[Any]:
        if len(values) == 1:
            return [values[0]] * len(self)
        column = np.empty(len(values), dtype=object)
        column[:] = values
        return list(column[self._codes[name]])

    @cached_property
    def taus(self) -> F64:
        """:attr:`Point.tau` of each, shape (m,)."""
        columns = map(self.values, ("length", "kappa", "beta", "head_dim"))
        return np.fromiter(map(threshold, *columns), float, len(self))

    @cached_property
    def tails(self) -> F64:
        """:attr:`Point.tail` of each, shape (m,); not for ``any``. One law serves all points that share it."""
        family, found = get_family(self.noise), np.empty(len(self))
        if family.follows_tau:
            scales = map(Scale, self._proxies(), self.values("head_dim"), self.taus.tolist())
            found[:] = [family.scaled(scale).tail(scale.tau) for scale in scales]
            return found
        law_of = self._codes["sigma"] * len(self._axes["head_dim"]) + self._codes["head_dim"]
        order = np.argsort(law_of, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(law_of[order])) + 1) if len(order) else []:
            sigma, dim = (self._axes[name][self._codes[name][rows[0]]] for name in ("sigma", "head_dim"))
            found[rows] = family.scaled(Scale(sigma * sigma / dim, dim)).sf(self.taus[rows])
        return found

    @cached_property
    def listed_tails(self) -> list[float]:
        """:attr:`tails` as numbers."""
        return self.tails.tolist()

    def _proxies(self) -> Iterator[float]:
        squares = (sigma * sigma for sigma in self.values("sigma"))
        return map(operator.truediv, squares, self.values("head_dim"))

    @cached_property
    def joint_tails(self) -> F64:
        """:attr:`Point.joint_tail` of each where the views are correlated, NaN elsewhere; shape (m,)."""
        known: dict[tuple[float, float], float] = {}
        for pair in zip(self.tails.tolist(), self.values("rho"), strict=True):
            if pair not in known:
                known[pair] = joint_survival(latent_threshold(pair[0]), pair[1]) if pair[1] else float("nan")
        return np.array([known[pair] for pair in zip(self.tails.tolist(), self.values("rho"), strict=True)])

    def each(self, joint: bool = False) -> Iterator[Point]:
        """The points one after the other as ONE object that changes, for functions that keep nothing of it.

        Parameters
        ----------
        joint : bool
            Whether ``joint_tail`` will be asked for.
        """
        if not len(self):
            return
        point = _Passing(**{name: getattr(self[0], name) for name in ("noise", *AXES)})
        state = vars(point)
        columns = {name: self.values(name) for name in AXES if self.varies(name)}
        if self.noise != ANY_LAW and joint:
            columns["joint_tail"] = self.joint_tails.tolist()
        names = tuple(columns)
        for at, values in enumerate(zip(*columns.values(), strict=True) if columns else [()] * len(self)):
            state.update(zip(names, values, strict=True))
            state["place"] = self, at
            yield point
            if not joint and "joint_tail" in state:  # which is this point's alone
                del state["joint_tail"]

    def map(self, function: Any, joint: bool = False) -> list[Any]:
        """A function of a point, for every point; see :meth:`each`."""
        return list(map(function, self.each(joint)))
