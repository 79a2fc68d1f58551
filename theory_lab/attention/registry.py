"""Names of mechanisms to classes, without importing torch until one is asked for.

A user's own mechanism registers in one of two ways: the entry-point group ``theory_lab.mechanisms`` of an
installed distribution (``name = "package.module:Class"``), or :func:`register` at run time.
"""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, TypeVar

from theory_lab.errors import InputError

if TYPE_CHECKING:
    from theory_lab.attention.base import Mechanism

ENTRY_POINT_GROUP = "theory_lab.mechanisms"

_BUILTIN = {
    "softmax": "theory_lab.attention.softmax:Softmax",
    "gated-softmax": "theory_lab.attention.softmax:GatedSoftmax",
    "ssmax": "theory_lab.attention.softmax:SSMax",
    "adaptive-temperature": "theory_lab.attention.softmax:AdaptiveTemperature",
    "lssa": "theory_lab.attention.lssa:LSSA",
    "entmax": "theory_lab.attention.alpha_entmax:Entmax",
    "sparsemax": "theory_lab.attention.alpha_entmax:Sparsemax",
    "asentmax-theta": "theory_lab.attention.asentmax:ASEntmaxTheta",
    "asentmax": "theory_lab.attention.asentmax:ASEntmax",
    "rela": "theory_lab.attention.rela:ReLA",
    "diff-softmax": "theory_lab.attention.differential:DiffSoftmax",
    "diff-rela": "theory_lab.attention.differential:DiffReLA",
    "dex": "theory_lab.attention.differential:DEX",
    "tra": "theory_lab.attention.tda:TRA",
    "tda": "theory_lab.attention.tda:TDA",
    "eta-logit": "theory_lab.attention.eta:ETALogit",
    "eta-weight": "theory_lab.attention.eta:ETAWeight",
    "streaming-llm": "theory_lab.attention.decoding:StreamingLLM",
    "h2o": "theory_lab.attention.decoding:H2O",
    "sparse-transformer": "theory_lab.attention.patterns:SparseTransformer",
    "landmark": "theory_lab.attention.landmark:Landmark",
}
_REGISTERED: dict[str, Any] = {}

C = TypeVar("C")


def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def list_mechanisms() -> list[str]:
    """Names of every mechanism that :func:`get` knows, sorted: built in, registered and installed."""
    return sorted({*_BUILTIN, *_REGISTERED, *_plugins()})


def is_local(name: str) -> bool:
    """Whether a mechanism was registered in this process, and is unknown to any other."""
    return name in _REGISTERED


def register(name: str, mechanism: C) -> C:
    """Make `mechanism` known under `name` for this process.

    Parameters
    ----------
    name : str
        A name that is not taken.
    mechanism : type
        A class that satisfies the protocol of :class:`theory_lab.attention.base.Mechanism`.

    Returns
    -------
    type
        `mechanism` itself, so the function also serves as the last line of a decorator.

    Raises
    ------
    InputError
        If the name is taken or `mechanism` lacks a part of the protocol.
    """
    if not isinstance(name, str) or not name:
        raise InputError("name", name, "a non-empty string")
    if name in _BUILTIN or name in _REGISTERED:
        raise InputError("name", name, "a name that is not taken; see list_mechanisms()")
    _check_protocol(name, mechanism)
    _REGISTERED[name] = mechanism
    return mechanism


def unregister(name: str) -> None:
    """Forget a mechanism made known by :func:`register`."""
    if _REGISTERED.pop(name, None) is None:
        raise InputError("name", name, "a name passed to register() before")


def resolve(name: str) -> type[Mechanism]:
    """The class registered under `name`; imports its module.

    Raises
    ------
    InputError
        If nothing has that name, or what an entry point loads lacks a part of the protocol.
    """
    if name in _BUILTIN:
        module, _, attribute = _BUILTIN[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    if name in _REGISTERED:
        return _REGISTERED[name]
    plugins = _plugins()
    if name in plugins:
        loaded = plugins[name].load()
        _check_protocol(name, loaded)
        return loaded
    raise InputError("name", name, "one of " + ", ".join(list_mechanisms()))


def get(name: str, **parameters: Any) -> Mechanism:
    """Build the mechanism `name`.

    Parameters
    ----------
    name : str
        One of :func:`list_mechanisms`.
    **parameters
        Keyword arguments of its class, for example ``get("tda", beta=0.8, lam=0.5, kappa=1.0, p=2.0)``.

    Raises
    ------
    InputError
        For an unknown name, an unknown parameter, or a value out of range.
    """
    cls = resolve(name)
    try:
        return cls(**parameters)
    except TypeError as error:
        if "unexpected keyword argument" in str(error) or "required" in str(error):
            raise InputError(name, ", ".join(parameters) or "no parameters", str(error)) from error
        raise


def _check_protocol(name: str, mechanism: Any) -> None:
    missing = [
        part
        for part in ("scores", "weights", "aggregate", "forward", "sample", "views")
        if not hasattr(mechanism, part)
    ]
    if not callable(mechanism) or missing:
        raise InputError(name, repr(mechanism), "a class with " + (", ".join(missing) or "a constructor"))
