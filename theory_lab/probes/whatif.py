"""What if the model attended otherwise: other mechanisms' weights on its own queries and keys.

``tra``, ``tda``, ``entmax`` and ``eta`` take the queries and keys that a trained softmax model computes, normalized to
unit length where the mechanism compares cosines, and weigh them by their own rule. The forward pass itself stays the
model's: every layer sees what it was trained to see. This says what the mechanism makes of real scores; it does not
say what a model trained with it would do.

Two views. TDA subtracts the weights of two independently trained projections, and a softmax model has no second one.
Rather than invent it, ``views=siblings`` pairs each query head with the next one that reads the same keys, where heads
are grouped, ``views=neighbors`` with the head at the same place in the next group, which has its own keys. Both are
pairs of real, separately trained queries; neither was trained to be subtracted, and siblings share their keys, so their
scores correlate by construction. A model that has two views of its own is measured with those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from theory_lab.errors import InputError, hint
from theory_lab.grids import parse_number

VIEWS = ("siblings", "neighbors")

#: Option -> (argument of attention_statistics, allowed range in words, test).
_POSITIVE = ("a number above 0 is allowed", lambda x: x > 0)
_OPTIONS: dict[str, dict[str, tuple[str, str, Any]]] = {
    "softmax": {},
    "entmax": {"alpha": ("alpha", "a number above 1 and at most 2 is allowed", lambda x: 1 < x <= 2)},
    "tra": {
        "beta": ("beta", "a number of at least 0 is allowed", lambda x: x >= 0),
        "kappa": ("kappa", *_POSITIVE),
        "p": ("power", "a number of at least 1 is allowed", lambda x: x >= 1),
    },
    "eta": {
        "tau": ("eta_threshold", "a number above 0 and below 1 is allowed", lambda x: 0 < x < 1),
        "alpha": ("eta_sharpness", *_POSITIVE),
    },
}
_OPTIONS["tda"] = {
    **_OPTIONS["tra"],
    "lambda": ("lam", "a number from 0 to below 1 is allowed", lambda x: 0 <= x < 1),
}

#: What of a call says which keys a row sees, and what belongs to the model's own logits.
PLACES = ("causal", "query_offset", "window", "key_starts", "lengths", "query_starts", "query_lengths", "mask")
_LOGITS = ("scale", "softcap")


@dataclass(frozen=True)
class Mechanism:
    """Weights to measure: the model's own (name ``softmax``, nothing set) or another mechanism's on its scores.

    Attributes
    ----------
    name : str
        ``softmax``, ``entmax``, ``tra``, ``tda`` or ``eta``.
    arguments : mapping
        Arguments of ``attention_statistics``.
    views : str or None
        Where TDA's second view comes from, of :data:`VIEWS`; None leaves it to the model.
    own : bool
        Whether these are the model's own weights, with everything that belongs to them.
    """

    name: str = "softmax"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    views: str | None = None
    own: bool = True

    @property
    def unit_rows(self) -> bool:
        """Whether rows of weights sum to one."""
        return self.name in ("softmax", "entmax", "eta")

    @property
    def label(self) -> str:
        """Canonical text, which parses back."""
        if self.own:
            return "model"
        short = {argument: option for option, (argument, _, _) in _OPTIONS[self.name].items()}
        parts = [
            f"{short.get(name, name.removeprefix('eta_'))}={_text(value)}" for name, value in self.arguments.items()
        ]
        parts += [f"views={self.views}"] if self.views else []
        return self.name + (":" + ",".join(parts) if parts else "")

    def inputs(self, call: Any) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Tensors (q, k) or (q, k, q2, k2), and arguments of ``attention_statistics``, for a watched call."""
        given = call.statistics_arguments()
        if self.own:
            if call.own is None:
                return (call.q, call.k), given
            from theory_lab.probes.own import streamed

            found = streamed(call)
            if found is None:
                raise InputError("model", call.name, "weights that stream are allowed here; these are computed by pair")
            return found
        kept = PLACES if self.name in ("tra", "tda") else (*PLACES, *_LOGITS)
        arguments = {name: given[name] for name in kept if name in given}
        arguments |= {"weights": self.name, **self.arguments}
        tensors: tuple[Tensor, ...] = (call.q, call.k)
        if self.name == "tda":
            tensors += second_view(call, self.views)
        return tensors, arguments


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def parse_mechanism(text: str | None) -> Mechanism:
    """Parse ``tra``, ``tra:beta=0.8,kappa=1``, ``tda:lambda=0.5,views=neighbors``, ``entmax:alpha=1.5`` or
    ``eta:tau=0.5,reading=weight``; None is the model itself.

    Raises
    ------
    InputError
        Unknown names or numbers out of range.
    """
    if text is None or text.strip().lower() in ("", "model"):
        return Mechanism()
    name, _, rest = text.strip().lower().partition(":")
    if name not in _OPTIONS:
        raise InputError("as", text, f"{hint(name, _OPTIONS)}one of {', '.join(_OPTIONS)} is allowed")
    options = _OPTIONS[name]
    words = {"eta": ("reading",), "tda": ("views",)}.get(name, ())
    arguments: dict[str, Any] = {"eta_threshold": 0.5} if name == "eta" else {}
    views = None
    given: set[str] = set()
    for part in rest.split(",") if rest else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in (*options, *words):
            known = ", ".join((*options, *words)) or "no options"
            raise InputError("as", text, f"'{part.strip()}' is no option of {name}; {known} can be set, as in beta=0.8")
        if key in given:
            raise InputError("as", text, f"{key} is given twice")
        given.add(key)
        if key == "reading":
            if value not in ("logit", "weight"):
                raise InputError("as", text, "reading is logit or weight")
            arguments["eta_reading"] = value
        elif key == "views":
            if value not in VIEWS:
                raise InputError("as", text, f"views is {' or '.join(VIEWS)}")
            views = value
        else:
            argument, allowed, fits = options[key]
            number = parse_number(value, f"as {name}: {key}")
            if not fits(number):
                raise InputError(f"as {name}: {key}", value, allowed)
            arguments[argument] = number
    return Mechanism(name, arguments, views, own=False)


def second_view(call: Any, views: str | None) -> tuple[Tensor, Tensor]:
    """The second (q, k) of a watched call, for TDA.

    Raises
    ------
    InputError
        If the model has nothing honest to offer.
    """
    if call.views and views is None:
        q2, k2 = call.views[0]
        return q2, k2
    q, k = call.q, call.k
    heads, groups = q.shape[1], k.shape[1]
    size = heads // groups
    if views in (None, "siblings"):
        if size == 1:
            raise InputError(
                "as",
                "tda",
                "the model has one view and no query heads that share keys: tda:views=neighbors takes the next head's",
            )
        return q.unflatten(1, (groups, size)).roll(-1, 2).flatten(1, 2), k
    if groups == 1:
        raise InputError("as", "tda:views=neighbors", "the model has one key head: views=siblings is allowed")
    return q.roll(-size, 1), k.roll(-1, 1)
