"""Lengths beyond a model's positions: what is possible, and RoPE scaling: transformers' own, or that of our model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from theory_lab.errors import InputError
from theory_lab.grids import parse_number

SCALINGS = ("linear", "dynamic", "yarn", "ntk")
#: RoPE variants whose frequencies depend on the length of the sequence, so that a prefix is no shorter sequence.
_LENGTH_DEPENDENT = ("dynamic", "longrope")


def parse_scaling(text: str) -> tuple[str, float]:
    """Parse ``yarn:4``, ``linear:2``, ``dynamic:8`` or ``ntk:2``; InputError otherwise."""
    kind, colon, factor = text.strip().lower().partition(":")
    if kind not in SCALINGS or not colon:
        raise InputError("rope-scaling", text, f"{', '.join(SCALINGS)} with a factor is allowed, as in yarn:4")
    value = parse_number(factor, "rope-scaling")
    if value < 1:
        raise InputError("rope-scaling", text, "a factor of at least 1 is allowed")
    return kind, value


def rotary_modules(model: Any) -> list[tuple[Any, str, Any]]:
    """(parent, name, module) of every rotary embedding."""
    found = []
    for path, module in model.named_modules():
        if hasattr(module, "inv_freq") and hasattr(module, "config"):
            parent, _, name = path.rpartition(".")
            found.append((model.get_submodule(parent), name, module))
    return found


def depends_on_length(model: Any) -> bool:
    """Whether a token's position code depends on the length of the sequence, so that every length needs its own run."""
    kinds = {str(getattr(module, "rope_type", "default")) for _, _, module in rotary_modules(model)}
    return bool(kinds & set(_LENGTH_DEPENDENT))


def scale_positions(model: Any, scaling: str) -> int:
    """Replace the model's rotary embeddings by scaled ones.

    Parameters
    ----------
    model : transformers model
    scaling : str
        As for :func:`parse_scaling`.

    Returns
    -------
    int
        Positions it has now.

    Raises
    ------
    InputError
        If the model has no rotary embedding, or its own kind does not combine with the scaling.
    """
    kind, factor = parse_scaling(scaling)
    if _ours(model) != (kind == "ntk"):
        allowed = "ntk:2, say, is that of Theory Lab's own models, and the others are transformers'"
        raise InputError("rope-scaling", scaling, allowed)
    if kind == "ntk":
        if not model.config.rotary:
            raise InputError("rope-scaling", scaling, "the model has no rotary embedding to scale")
        model.config.rope_ntk_factor *= factor
        return int(model.config.max_position_embeddings * factor)
    rotary = rotary_modules(model)
    if not rotary:
        raise InputError("rope-scaling", scaling, "the model has no rotary embedding to scale")
    config = rotary[0][2].config
    given = dict(getattr(config, "rope_parameters", None) or {})
    if any(isinstance(value, dict) for value in given.values()):
        raise InputError("rope-scaling", scaling, "each sort of layer has a rotary embedding of its own in this model")
    before = int(config.max_position_embeddings)
    config.rope_parameters = {
        **given,
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": before,
    }
    for parent, name, module in rotary:
        device = module.inv_freq.device
        try:
            setattr(parent, name, type(module)(config=config).to(device))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError("rope-scaling", scaling, f"transformers refuses it for this model ({error})") from None
    return int(before * factor)


@contextmanager
def scaled_positions(model: Any, scaling: str | None) -> Iterator[int | None]:
    """Scale a model's positions for a while, as :func:`scale_positions` does; yields their number, or None.

    The model is as before at the end: it may be the caller's own, who goes on to measure it unscaled.
    """
    if scaling is None:
        yield None
        return
    if _ours(model):
        unscaled = model.config.rope_ntk_factor
        try:
            yield scale_positions(model, scaling)
        finally:
            model.config.rope_ntk_factor = unscaled
        return
    before = rotary_modules(model)
    configs = {id(module.config): (module.config, module.config.rope_parameters) for _, _, module in before}
    try:
        yield scale_positions(model, scaling)
    finally:
        for config, parameters in configs.values():
            config.rope_parameters = parameters
        for parent, name, module in before:
            setattr(parent, name, module)


def check_length(model: Any, length: int, most: int | None) -> str | None:
    """A warning if the length is beyond the model's positions.

    Raises
    ------
    InputError
        If positions are learned, so that there are no more.
    """
    if most is None or length <= most:
        return None
    if not rotary_modules(model) and not _ours(model):
        raise InputError("length", length, f"at most {most:,} is allowed: the model has no position beyond")
    factor = 1
    while most * factor < length:
        factor *= 2
    if _ours(model):
        stretch = f"; --rope-scaling ntk:{factor} stretches them" if model.config.rotary else ""
        return f"length {length:,} is beyond the model's {most:,} positions, where it was not trained{stretch}"
    return (
        f"length {length:,} is beyond the model's {most:,} positions, where it was not trained; "
        f"--rope-scaling yarn:{factor} (or dynamic:{factor}) stretches them"
    )


def _ours(model: Any) -> bool:
    """Whether it is a model of ``theory_lab.models.lab``, whose positions are set by its configuration alone."""
    return getattr(model.config, "model_type", None) == "theory_lab"
