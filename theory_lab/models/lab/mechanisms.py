"""From a configuration to the mechanism of a layer, in forms that a static graph can hold.

A mechanism of ``theory_lab.attention`` defines the arithmetic. One part of it does not fit training with static shapes:
the exact entmax solvers ask the device how far they are. :func:`row_weights` replaces that part and nothing else.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from theory_lab.attention import list_mechanisms, resolve
from theory_lab.attention.alpha_entmax import Entmax, Sparsemax
from theory_lab.attention.asentmax import ASEntmax, ASEntmaxTheta
from theory_lab.attention.base import Mechanism, Scope
from theory_lab.attention.differential import DEX, DiffReLA, DiffSoftmax, lambda_init
from theory_lab.attention.eta import ETALogit, ETAWeight
from theory_lab.attention.rela import ReLA
from theory_lab.attention.softmax import AdaptiveTemperature, GatedSoftmax, Softmax, SSMax
from theory_lab.attention.tda import TDA, TRA
from theory_lab.errors import InputError, hint
from theory_lab.models.lab.configuration import LabConfig
from theory_lab.models.lab.entmax import static_entmax

#: Where training starts, if the configuration does not say. One value a head is learned where the class learns it.
_START: dict[str, dict[str, Any]] = {
    "tra": {"beta": 0.8, "kappa": 1.0, "p": 2.0, "eps": 1e-2},
    "tda": {"beta": 0.5, "kappa": 1.0, "p": 2.0, "eps": 1e-1, "lam": 0.5},
    "ssmax": {"s": 0.43},
    "asentmax-theta": {"theta": 1.0},
    # An output norm with 1e-8 turns rows of nothing but rounding into rows of unit size, in bfloat16 above all.
    "rela": {"eps": 1e-5},
    "diff-rela": {"lam": 0.5, "eps": 1e-5},
    "dex": {"lam": 0.5},
}
#: Parameters that are learned one a head; a number given for them is repeated.
_BY_HEAD = {
    "tra": ("beta",),
    "tda": ("beta", "lam"),
    "ssmax": ("s",),
    "asentmax-theta": ("theta",),
    "diff-softmax": ("lam",),
    "diff-rela": ("lam",),
    "dex": ("lam",),
}
#: Classes whose parameters are known: those with heads on their first axis, beside the declared ones.
_HEADS_FIRST: dict[type[Mechanism], tuple[str, ...]] = {
    **dict.fromkeys((Softmax, SSMax, AdaptiveTemperature, DiffSoftmax, DEX, ReLA, DiffReLA), ()),
    **dict.fromkeys((Entmax, Sparsemax, ASEntmaxTheta), ()),
    ASEntmax: ("w_beta", "w_gamma"),
    GatedSoftmax: ("gate",),
    **dict.fromkeys((ETALogit, ETAWeight), ("w", "b")),
}
#: What a class asks for that the configuration knows.
_KNOWN = {
    "heads": "num_attention_heads",
    "hidden_dim": "hidden_size",
    "head_dim": "head_dim",
    "value_dim": "head_dim",
}


def language_mechanisms() -> list[str]:
    """Names that :class:`LabConfig` takes for ``attention``."""
    return sorted([*list_mechanisms(), *_SHARP])


def row_weights(mechanism: Mechanism, scores: tuple[Tensor, ...], scope: Scope) -> Tensor:
    """Weights of scores that were prepared, by the mechanism's definition in a fixed number of operations."""
    if not isinstance(mechanism, (Entmax, Sparsemax)):
        return mechanism.row_weights(scores, scope)
    z = scores[0]
    if isinstance(mechanism, ASEntmaxTheta):
        z = z / mechanism.value("theta", z)
    elif isinstance(mechanism, ASEntmax):
        z = z * mechanism.logit_scale(scope, z)
    return static_entmax(z, alpha_of(mechanism, z), scope.visible)


def alpha_of(mechanism: Mechanism, like: Tensor) -> float | Tensor:
    """alpha of a mechanism of the entmax family as :func:`row_weights` takes it, in (1, 2]."""
    if isinstance(mechanism, Sparsemax):
        return 2.0
    fixed: float | None = mechanism.__dict__.get("static_alpha")
    return mechanism.value("alpha", like).clamp(min=1.0 + 1e-3, max=2.0) if fixed is None else fixed


def weigh(
    mechanism: Mechanism, pairs: tuple[tuple[Tensor, Tensor], ...], scope: Scope, bias: Tensor | None = None
) -> Tensor:
    """Weights of queries and keys, by the mechanism's definition in a fixed number of operations.

    Parameters
    ----------
    mechanism : Mechanism
    pairs : tuple of (Tensor, Tensor)
        (B, H, T, D) and (B, G, S, D) of each view, float32 or float64.
    scope : Scope
        With the visibility (B, H, T, S).
    bias : Tensor, optional
        (H, T, S), added to the scores.

    Returns
    -------
    Tensor
        (B, H, T, S).
    """
    scores = []
    for q, k in pairs:
        found = mechanism.scores(q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))
        found = found if bias is None else found + bias.to(found.dtype)
        scores.append(found.masked_fill(~scope.visible, 0.0))
    return row_weights(mechanism, tuple(scores), scope)


def some_heads(mechanism: Mechanism, heads: slice) -> Mechanism | None:
    """A mechanism with the parameters of some of its heads, without gradients; None for one that is not known here.

    What is learned is shared, not copied: it is only good until a parameter changes.
    """
    if type(mechanism) not in _HEADS_FIRST:
        return None
    made = copy.copy(mechanism)
    buffers, parameters = dict(mechanism._buffers), dict(mechanism._parameters)
    by_head = [name + "_" for name in mechanism.__dict__.get("_transforms", {})]
    for name in (*by_head, *_HEADS_FIRST[type(mechanism)]):
        stored = getattr(mechanism, name, None)
        if isinstance(stored, Tensor) and stored.ndim > 0:
            parameters.pop(name, None)
            buffers[name] = stored.detach()[heads]
    made.__dict__.update(_buffers=buffers, _parameters=parameters)
    if isinstance(made, DEX) and made.adapted is not None:
        made.adapted = made.adapted[heads]
    return made


def plain(mechanism: Softmax) -> bool:
    """Whether a softmax has a fixed temperature of 1; read once, on the host, where a graph may not look."""
    known = mechanism.__dict__.get("static_plain")
    if known is None:
        fixed = not isinstance(mechanism.temperature_, torch.nn.Parameter)
        known = mechanism.__dict__["static_plain"] = fixed and bool((mechanism.temperature_ == 1).all())
    return known


def _settle(mechanism: Entmax) -> None:
    """Read the one alpha of all heads on the host, where it is one and not learned; refuse what is out of range."""
    values = mechanism.value("alpha").detach().reshape(-1).tolist()
    for value in values:
        if not 1.0 < value <= 2.0:
            raise InputError("alpha", value, "a number above 1 and at most 2 is allowed")
    if len(set(values)) == 1 and not isinstance(mechanism.alpha_, torch.nn.Parameter):
        mechanism.__dict__["static_alpha"] = values[0]


class SharpTRA(TRA):
    """TRA with the threshold that kappa unrelated keys pass on average, not at most.

    For unit vectors in random directions, a row of n keys has exactly kappa survivors above tau* with
    n P(cos > tau*) = kappa; cos has the law of a coordinate of the unit sphere. TRA's formula bounds that from above,
    by a factor of 10 to 1000 in survivors. Here tau = beta tau*(n), and 0 where n < 2 kappa.
    """

    def thresholds(self, scope: Scope, like: Tensor) -> Tensor:
        table = _on(like.shape[-1], scope.need_head_dim(), self.kappa, like.dtype, like.device)
        return self.value("beta", like) * table[scope.n.long()]


class SharpTDA(TDA):
    """TDA with the threshold of :class:`SharpTRA`."""

    thresholds = SharpTRA.thresholds


_SHARP: dict[str, type[Mechanism]] = {"tra-sharp": SharpTRA, "tda-sharp": SharpTDA}


class _Tables:
    """Tables of tau* by head dimension and kappa, grown by doubling, and their copies on devices."""

    values: ClassVar[dict[tuple[int, float], np.ndarray]] = {}
    copies: ClassVar[dict[tuple[int, float, int, torch.dtype, torch.device], Tensor]] = {}


def sharp_thresholds(keys: int, head_dim: int, kappa: float) -> np.ndarray:
    """tau* by the number n of keys that a row sees, 0 to at least `keys`: n P(X > tau*) = kappa, never below 0.

    Parameters
    ----------
    keys : int
        The longest row.
    head_dim : int
        D, at least 2.
    kappa : float
        Survivors a row, above 0.

    Returns
    -------
    array of float64
        Entry n is the threshold of a row of n keys; entry 0 is 0.
    """
    known = _Tables.values.get((head_dim, kappa))
    if known is None or len(known) <= keys:
        from theory_lab.noise import get_family
        from theory_lab.noise.base import Scale

        law = get_family("spherical").scaled(Scale(1.0 / head_dim, head_dim))
        n = np.arange(1, max(1024, 1 << keys.bit_length()) + 1, dtype=np.float64)
        tau = np.maximum(law.isf(np.minimum(kappa / n, 1.0)), 0.0)
        known = _Tables.values[head_dim, kappa] = np.concatenate([[0.0], tau])
    return known


@torch.compiler.assume_constant_result  # a compiled graph holds the table, and does not look at how it is made
def _on(keys: int, head_dim: int, kappa: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    table = sharp_thresholds(keys, head_dim, kappa)
    key = (head_dim, kappa, len(table), dtype, device)
    if key not in _Tables.copies:
        _Tables.copies[key] = torch.as_tensor(table, dtype=dtype, device=device)
    return _Tables.copies[key]


def start_parameters(attention: str) -> dict[str, Any]:
    """Where the parameters of a mechanism start if nothing else is said, as far as the class does not say it."""
    return dict(_START.get(attention.removesuffix("-sharp"), {}))


def build_mechanism(config: LabConfig, layer: int) -> Mechanism:
    """The mechanism of one layer, with float32 parameters on the CPU.

    Parameters
    ----------
    config : LabConfig
    layer : int
        0-based; the start of diff-softmax's lambda depends on it.

    Raises
    ------
    InputError
        For an unknown mechanism, or parameters that it does not take.
    """
    name = config.attention
    if name not in _SHARP and name not in list_mechanisms():
        known = language_mechanisms()
        raise InputError("attention", name, f"{hint(str(name), known)}mechanisms are {', '.join(known)}")
    base = name.removesuffix("-sharp") if name in _SHARP else name
    cls: type[Mechanism] = _SHARP.get(name) or resolve(name)
    given = {**start_parameters(name), **config.attention_parameters}
    if name == "diff-softmax":
        start = lambda_init(layer + 1)
        given = {"start": start, "lam": start, **given}
    takes = inspect.signature(cls.__init__).parameters
    for field in config.attention_parameters:
        if field not in takes or field in ("self", "dtype"):
            options = [option for option in takes if option not in ("self", "dtype")]
            allowed = ", ".join(options) or "none"
            raise InputError("attention_parameters", field, f"{hint(field, options)}those of {name} are {allowed}")
    needed = [field for field, parameter in takes.items() if parameter.default is inspect.Parameter.empty]
    if base in ("eta-logit", "eta-weight") and "tau" not in given:
        needed += ["heads", "head_dim"]
    for field in needed:
        if field in _KNOWN and field not in given:
            given[field] = getattr(config, _KNOWN[field])
    for field in _BY_HEAD.get(base, ()):
        if isinstance(given.get(field), (int, float)):
            given[field] = [float(given[field])] * config.num_attention_heads
    # Values, not shapes alone, are needed here, whatever device a loader builds the rest of the model on.
    with torch.device("cpu"):
        made = cls(**given).float()
        if isinstance(made, Entmax):
            _settle(made)
        if type(made) is Softmax:
            plain(made)
    if config.positions == "nape" and made.cosine:
        raise InputError("positions", "nape", f"rope or nope: {name} compares cosines, which have no unit for a bias")
    return made
