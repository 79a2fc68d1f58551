"""Score noise: families of laws, and how scores depend on each other.

``get_family("student-t(3)")`` parses a name; ``list_families()`` says what there is. A third-party package adds a
family through the entry-point group ``theory_lab.noise``: the entry's name is the family's name, the object a
callable that takes the numbers in the parentheses and returns a :class:`Family`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache
from importlib import metadata

from theory_lab.errors import InputError, hint
from theory_lab.noise.base import Family, Law, Scale
from theory_lab.noise.continuous import Gaussian, Laplace, Spherical, StudentT, SymmetricBeta, TruncatedNormal, Uniform
from theory_lab.noise.discrete import Rademacher, TwoPoint
from theory_lab.noise.empirical import Empirical

__all__ = ["ANY_LAW", "Family", "Law", "Scale", "default_families", "family_names", "get_family", "list_families"]

#: Stands for the whole class of laws with the proxy; only the ``worst-case`` estimator answers for it.
ANY_LAW = "any"

_BUILT_IN: dict[str, Callable[..., Family]] = {
    "gaussian": Gaussian,
    "spherical": Spherical,
    "uniform": Uniform,
    "beta": SymmetricBeta,
    "truncated-normal": TruncatedNormal,
    "rademacher": Rademacher,
    "two-point": TwoPoint,
    "student-t": StudentT,
    "laplace": Laplace,
}

_SPEC = re.compile(r"^([a-z][a-z0-9_-]*)(?:\((.*)\)|:(.*))?$")


@cache
def _registry() -> dict[str, Callable[..., Family]]:
    found: dict[str, Callable[..., Family]] = dict(_BUILT_IN)
    for entry in metadata.entry_points(group="theory_lab.noise"):
        if entry.name in _BUILT_IN:
            raise InputError("noise", entry.name, "an entry point may not replace a built-in family")
        found[entry.name] = entry.load()
    return found


def family_names() -> list[str]:
    """Names that :func:`get_family` knows, without parameters."""
    return list(_registry())


def default_families() -> list[str]:
    """The families of a run that names none: every built-in one with its default parameters."""
    return [maker().name for maker in _BUILT_IN.values()]


def list_families() -> list[Family]:
    """One instance of every family with its default parameters."""
    return [maker() for maker in _registry().values()]


@cache
def get_family(spec: str) -> Family:
    """Parse a family's name.

    Parameters
    ----------
    spec : str
        ``gaussian``, ``beta(2)`` or ``beta:2``, ``student-t(nu=3)``, ``file:scores.npy`` or ``file:scores.npy,raw``,
        ``model:smollm2-135m,layer=10,raw`` (:mod:`theory_lab.noise.model_scores`).

    Raises
    ------
    InputError
        If the name is unknown (the nearest one is suggested), a parameter is no number, or the file is unusable.
    """
    text = spec.strip()
    if text.startswith("file:"):
        path = text[5:]
        return Empirical(path.removesuffix(",raw"), raw=path.endswith(",raw"))
    if text.startswith("model:"):
        from theory_lab.noise.model_scores import ModelScores, parse_model

        return ModelScores(parse_model(text))
    match = _SPEC.match(text.lower())
    name = match.group(1) if match else text
    maker = _registry().get(name)
    if match is None or maker is None:
        nearest = hint(name, [*_registry(), ANY_LAW])
        raise InputError("noise", spec, f"{nearest}known: {', '.join(_registry())}, file:PATH, model:NAME, {ANY_LAW}")
    arguments = match.group(2) if match.group(2) is not None else match.group(3)
    values = []
    names = list(inspect.signature(maker).parameters)
    for index, part in enumerate(arguments.split(",") if arguments else []):
        key, equals, number = part.rpartition("=")
        number = number.strip()
        if equals and key.strip() != (names[index] if index < len(names) else None):
            raise InputError("noise", spec, f"{name} has no parameter '{key.strip()}' there")
        try:
            values.append(float(number))
        except ValueError:
            raise InputError("noise", spec, f"'{number}' is not a number") from None
    try:
        return maker(*values)
    except TypeError:
        raise InputError("noise", spec, f"{name} does not take {len(values)} parameter(s)") from None
