"""Checks of arguments: one InputError that names the argument and what was received."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from theory_lab.errors import InputError


def shape_of(tensor: Tensor) -> str:
    """The shape, as the messages print it."""
    return f"shape {tuple(tensor.shape)}"


def check_number(
    field: str, value: float, low: float, high: float = math.inf, *, open_low: bool = False, open_high: bool = True
) -> float:
    """`value` as a float, or an InputError that names the interval."""
    interval = f"a number in {'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InputError(field, repr(value), interval) from None
    above = number > low if open_low else number >= low
    below = number < high if open_high else number <= high
    if not (above and below):
        raise InputError(field, repr(value), interval)
    return number


def check_tensor(field: str, tensor: Tensor, ndim: int, *, exact: bool = False) -> None:
    """A floating tensor with at least (or exactly) `ndim` dimensions, or an InputError."""
    if not isinstance(tensor, Tensor):
        raise InputError(field, type(tensor).__name__, "a torch tensor")
    if not tensor.is_floating_point():
        raise InputError(field, str(tensor.dtype), "a floating dtype")
    if tensor.ndim < ndim or (exact and tensor.ndim != ndim):
        raise InputError(field, shape_of(tensor), f"{'' if exact else 'at least '}{ndim} dimensions")


def same_kind(field: str, tensor: Tensor, reference: Tensor) -> None:
    """Same dtype and device, or an InputError."""
    if tensor.dtype != reference.dtype:
        raise InputError(field, str(tensor.dtype), f"the dtype of the rest, {reference.dtype}")
    if tensor.device != reference.device:
        raise InputError(field, str(tensor.device), f"the device of the rest, {reference.device}")


def check_key_mask(key_mask: Tensor, batch: int, keys: int, device: torch.device) -> Tensor:
    """A key mask as (1, S) or (B, S), or an InputError."""
    allowed = f"boolean of shape ({keys},) or ({batch}, {keys}) on {device}, False at padding"
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        raise InputError("key_mask", str(getattr(key_mask, "dtype", type(key_mask).__name__)), allowed)
    if key_mask.ndim == 1:
        key_mask = key_mask[None, :]
    if key_mask.ndim != 2 or key_mask.shape[1] != keys or key_mask.shape[0] not in (1, batch):
        raise InputError("key_mask", shape_of(key_mask), allowed)
    if key_mask.device != device:
        raise InputError("key_mask", str(key_mask.device), allowed)
    return key_mask


def check_mask(mask: Tensor, scores: Tensor) -> Tensor:
    """`mask`, known to broadcast to the scores, or an InputError."""
    allowed = f"boolean, broadcastable to {shape_of(scores)} on {scores.device}, False where masked"
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise InputError("mask", str(getattr(mask, "dtype", type(mask).__name__)), allowed)
    try:
        fits = torch.broadcast_shapes(mask.shape, scores.shape) == scores.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise InputError("mask", shape_of(mask), allowed)
    if mask.device != scores.device:
        raise InputError("mask", str(mask.device), allowed)
    return mask
