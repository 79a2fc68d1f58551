"""Points as columns, and the one that stands for all of them in turn."""

from __future__ import annotations

import copy
import pickle

import pytest

from theory_lab import noise
from theory_lab.claims.points import Points
from theory_lab.noise import Law, Scale
from theory_lab.noise.continuous import Gaussian, GaussianLaw


def points() -> Points:
    axes = {"length": (5, 50), "head_dim": (64,), "kappa": (1.0, 1.5), "beta": (1.0,), "sigma": (1.0,)}
    return Points.product("gaussian", {**axes, "rho": (0.0, 0.5), "key_rho": (0.0,)})


def test_a_point_that_stands_for_others_is_no_key_but_its_copies_are() -> None:
    kept = list(points())
    with pytest.raises(TypeError, match="a copy"):
        points().map(hash)
    assert {copy.copy(point): point.tail for point in points().each()} == {point: point.tail for point in kept}
    assert points().map(lambda point: pickle.loads(pickle.dumps(point))) == kept
    changed = points().map(lambda point: point.with_(length=7))
    assert changed == [point.with_(length=7) for point in kept]
    assert len(set(changed)) == 4


def test_a_point_that_stands_for_others_equals_the_one_it_stands_for() -> None:
    kept = list(points())
    for index, point in enumerate(points().each()):
        assert [point == other for other in kept] == [i == index for i in range(8)]
        assert [other == point for other in kept] == [i == index for i in range(8)]


class Followed(Gaussian):
    """A law of its own for each threshold, by a family that inherits from one of a single law."""

    name = "followed"

    def scaled(self, scale: Scale) -> Law:
        return GaussianLaw(scale.proxy * (1.0 + scale.tau))


def test_a_law_that_replaces_its_parents_may_follow_tau(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Followed.follows_tau
    assert not Gaussian.follows_tau
    assert not type("Named", (Gaussian,), {"name": "named"}).follows_tau
    monkeypatch.setitem(noise._registry(), "followed", Followed)
    axes = {"length": (5, 50), "head_dim": (64,), "kappa": (1.0,), "beta": (1.0,), "sigma": (1.0,)}
    points = Points.product("followed", {**axes, "rho": (0.0,), "key_rho": (0.0,)})
    assert points.tails.tolist() == [point.tail for point in points]
