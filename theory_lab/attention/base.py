"""The protocol every mechanism follows, and the parts they share.

A mechanism turns q, k, v into weights and outputs in three steps, each usable alone:

``scores(q, k)``
    what the mechanism compares: scaled dot products or cosines, (B, H, T, S);
``weights(scores, ...)``
    the map from a row of scores to a row of weights, which is where the mechanisms differ;
``aggregate(weights, v, scope)``
    the output: weights @ v, and the normalization or gate that belongs to the mechanism.

A score of -inf means masked, anywhere. A masked key has weight exactly 0 and does not count towards the
number n of visible keys; a row without visible keys has weights and output exactly 0 and gradient 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from theory_lab.attention.checks import (
    check_key_mask,
    check_mask,
    check_number,
    check_tensor,
    same_kind,
    shape_of,
)
from theory_lab.errors import InputError

# Too coarse to count keys in: computed in float32 and rounded once.
_NARROW = (torch.float16, torch.bfloat16)


def trusted(tensor: Tensor) -> bool:
    """Whether values cannot be looked at now: while a graph is traced by torch.compile or captured on a GPU."""
    if torch.compiler.is_compiling():
        return True
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class AttentionResult(NamedTuple):
    """Outputs (B, H, T, V) and weights (B, H, T, S) of one call."""

    output: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Scope:
    """What a row may see, and the side inputs some mechanisms need.

    Attributes
    ----------
    visible : Tensor
        Boolean, the shape of the scores: True where a key is seen (mask, causality, padding and -inf).
    n : Tensor
        Number of visible keys a row, at least 1, shape (..., T, 1), in the dtype of the scores.
    causal : bool
        Whether row t sees key s only if s <= t + S - T (queries are the last T positions).
    head_dim : int or None
        D, for the mechanisms whose threshold or scale depends on it.
    x, q : Tensor or None
        Hidden states (B, T, C) and queries (B, H, T, D).
    """

    visible: Tensor
    n: Tensor
    causal: bool
    head_dim: int | None = None
    x: Tensor | None = None
    q: Tensor | None = None

    def positions(self) -> tuple[Tensor, Tensor]:
        """Query positions (T, 1) and key positions (1, S), queries aligned with the last keys."""
        t, s = self.visible.shape[-2:]
        device = self.visible.device
        return torch.arange(s - t, s, device=device)[:, None], torch.arange(s, device=device)[None, :]

    def need_head_dim(self) -> int:
        if self.head_dim is None:
            raise InputError("head_dim", "None", "the head dimension: this mechanism depends on it")
        return self.head_dim

    def need_x(self, width: int) -> Tensor:
        if self.x is None:
            raise InputError("x", "None", f"hidden states of shape (B, T, {width})")
        if self.x.ndim != 3 or self.x.shape[-1] != width:
            raise InputError("x", shape_of(self.x), f"hidden states of shape (B, T, {width})")
        return self.x


def safe_softmax(scores: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the visible keys; 0 (value and gradient) where nothing is visible."""
    filled = scores.masked_fill(~visible, -math.inf)
    top = filled.amax(-1, keepdim=True).detach()
    top = top.masked_fill(torch.isinf(top), 0.0)
    e = torch.exp(torch.where(visible, scores - top, torch.zeros_like(scores))).masked_fill(~visible, 0.0)
    total = e.sum(-1, keepdim=True)
    return e / torch.where(total > 0, total, torch.ones_like(total))


def rms_norm(o: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension; exactly 0 for a zero vector, even at eps = 0."""
    square = o.square().mean(-1, keepdim=True)
    dead = square == 0
    # A double where: the untaken branch must not send NaN back through the gradient.
    scale = torch.rsqrt(torch.where(dead, torch.ones_like(square), square) + eps)
    return torch.where(dead, o / math.sqrt(eps) if eps > 0 else torch.zeros_like(o), o * scale)


class Mechanism(nn.Module):
    """Base class of the mechanisms; a user's own may subclass it or follow the same protocol.

    Class attributes
    ----------------
    views : int
        Number of independent (q, k) projections compared: 1 or 2.
    cosine : bool
        Whether q and k are normalized to unit length before they are compared.
    causal_only : bool
        Whether the mechanism is defined by a decoding order and refuses ``causal=False``.
    uses_positions : bool
        Whether a row depends on where its keys stand and not only on their scores.
    """

    views: ClassVar[int] = 1
    cosine: ClassVar[bool] = False
    causal_only: ClassVar[bool] = False
    uses_positions: ClassVar[bool] = False

    # ---- what a subclass defines -----------------------------------------------------------------

    def row_weights(self, scores: tuple[Tensor, ...], scope: Scope) -> Tensor:
        """Weights of checked scores; a subclass defines this. Masked entries must come out as 0."""
        raise NotImplementedError

    def aggregate(self, weights: Tensor, v: Tensor, scope: Scope | None = None) -> Tensor:
        """Outputs (B, H, T, V) from weights (B, H, T, S) and values (B, H, S, V)."""
        return weights @ v

    @classmethod
    def sample(cls, generator: torch.Generator, *, heads: int, head_dim: int, value_dim: int, hidden_dim: int) -> Self:
        """An instance with generic parameters, none of them at a point where its effect vanishes.

        Tests and the feature measurement use it; `generator` draws whatever has to be random.
        """
        return cls()

    # ---- the protocol ----------------------------------------------------------------------------

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """What the mechanism compares: q.k/sqrt(D), or the cosine if `cosine`; (B, H, T, S)."""
        if self.cosine:
            q, k = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1)
            return q @ k.transpose(-1, -2)
        return (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])

    def weights(
        self,
        scores: Tensor,
        scores2: Tensor | None = None,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        mask: Tensor | None = None,
        n: Tensor | int | None = None,
        head_dim: int | None = None,
        x: Tensor | None = None,
        q: Tensor | None = None,
    ) -> Tensor:
        """Weights of given scores.

        Parameters
        ----------
        scores, scores2 : Tensor
            (S,), (T, S) or (..., T, S) of floating type; -inf is masked. `scores2` for two views.
        causal : bool
            Mask keys after the query; queries are the last T of the S positions.
        key_mask : Tensor, optional
            Boolean (S,) or (B, S): False at padding.
        mask : Tensor, optional
            Boolean, broadcastable to the scores: False is masked.
        n : Tensor or int, optional
            Number of keys a row counts as visible, broadcastable to (..., T, 1); counted if not given.
        head_dim : int, optional
            D, needed where a threshold or scale depends on it.
        x, q : Tensor, optional
            Hidden states (B, T, C) and queries (B, H, T, D), for the mechanisms that read them.

        Returns
        -------
        Tensor
            Weights, the shape of `scores`.

        Raises
        ------
        InputError
            NaN or +inf scores, no keys, shapes, devices or dtypes that do not fit, a missing side input.
        """
        views = self._views(scores, scores2)
        if scores.dtype in _NARROW:
            for field, tensor in (("x", x), ("q", q)):
                if tensor is not None:
                    same_kind(field, tensor, scores)
            wide = {f: None if t is None else t.float() for f, t in (("scores2", scores2), ("x", x), ("q", q))}
            made = self.weights(
                scores.float(), causal=causal, key_mask=key_mask, mask=mask, n=n, head_dim=head_dim, **wide
            )
            return made.to(scores.dtype)
        flat = scores.ndim == 1
        if flat:
            views = tuple(s[None, :] for s in views)
        scope, views = self.prepare(
            *views, causal=causal, key_mask=key_mask, mask=mask, n=n, head_dim=head_dim, x=x, q=q
        )
        weights = self.row_weights(views, scope)
        return weights[0] if flat else weights

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        q2: Tensor | None = None,
        k2: Tensor | None = None,
        causal: bool = True,
        key_mask: Tensor | None = None,
        mask: Tensor | None = None,
        n: Tensor | int | None = None,
        x: Tensor | None = None,
    ) -> AttentionResult:
        """Weights and outputs of queries, keys and values.

        Parameters
        ----------
        q : Tensor
            (B, H, T, D).
        k, v : Tensor
            (B, K, S, D) and (B, K, S, V), H a multiple of K (grouped-query heads).
        q2, k2 : Tensor, optional
            The second view, same shapes, for the mechanisms with two.
        causal, key_mask, mask, n, x
            As in :meth:`weights`.

        Returns
        -------
        AttentionResult
            `output` (B, H, T, V) and `weights` (B, H, T, S).

        Raises
        ------
        InputError
            As in :meth:`weights`.
        """
        self._check_qkv(q, k, v, q2, k2)
        if x is not None:
            same_kind("x", x, q)
        if q.dtype in _NARROW:
            second = {f: None if t is None else t.float() for f, t in (("q2", q2), ("k2", k2), ("x", x))}
            made = self.forward(
                q.float(), k.float(), v.float(), causal=causal, key_mask=key_mask, mask=mask, n=n, **second
            )
            return AttentionResult(made.output.to(q.dtype), made.weights.to(q.dtype))
        if key_mask is not None:
            key_mask = check_key_mask(key_mask, k.shape[0], k.shape[2], k.device)
            # Padding may hold anything, NaN too; 0 * NaN would reach the output and the gradients.
            pad = ~key_mask.expand(k.shape[0], -1)[:, None, :, None]
            k, v = k.masked_fill(pad, 0.0), v.masked_fill(pad, 0.0)
            k2 = None if k2 is None else k2.masked_fill(pad, 0.0)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        views: tuple[Tensor, ...] = (self.scores(q, k),)
        if q2 is not None and k2 is not None:
            views = (*views, self.scores(q2, k2.repeat_interleave(group, 1)))
        scope, views = self.prepare(
            *views, causal=causal, key_mask=key_mask, mask=mask, n=n, head_dim=q.shape[-1], x=x, q=q
        )
        weights = self.row_weights(views, scope)
        return AttentionResult(self.aggregate(weights, v, scope), weights)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """The output alone, through the fastest form there is; see :func:`theory_lab.attention.fast.attend`."""
        from theory_lab.attention.fast import attend

        return attend(self, q, k, v, **options)

    # ---- parameters ------------------------------------------------------------------------------

    def declare(
        self,
        field: str,
        value: Any,
        low: float,
        high: float = math.inf,
        *,
        open_low: bool = False,
        learnable: bool = True,
        transform: str = "direct",
        heads_dim: bool = True,
    ) -> None:
        """Store a scalar or per-head parameter that :meth:`value` reads back.

        A tensor is kept as it is, graph included, and every call differentiates through it. A number or a
        list becomes a float64 parameter (a value is then the one that was typed, whatever the dtype of the
        scores; ``.to(torch.float32)`` lowers it), or a float64 buffer if not `learnable`. `transform`
        keeps a learnable parameter inside its range: "log" for (low, inf), "logit" for (low, high).
        """
        self._transforms: dict[str, tuple[str, float, float]]
        self.__dict__.setdefault("_transforms", {})
        tensor = value if isinstance(value, Tensor) else None
        if tensor is None:
            try:
                tensor = torch.tensor(value, dtype=torch.float64)
            except (TypeError, ValueError, RuntimeError):
                raise InputError(field, repr(value), "a number, a list of one number a head, or a tensor") from None
        if tensor.ndim > 1:
            raise InputError(field, shape_of(tensor), "a scalar, or one value a head")
        for number in tensor.detach().reshape(-1).tolist():
            check_number(field, number, low, high, open_low=open_low)
        kind = "direct"
        if isinstance(value, Tensor) or not learnable:
            self.register_buffer(field + "_", tensor)
        else:
            if transform != "direct" and bool((tensor == low).any()):
                raise InputError(field, repr(value), f"above {low:g} when learnable; learnable=False allows it")
            kind = transform
            if transform == "log":
                tensor = torch.log(tensor - low)
            elif transform == "logit":
                tensor = torch.logit((tensor - low) / (high - low))
            self.register_parameter(field + "_", nn.Parameter(tensor))
        self._transforms[field] = (kind, low, high)

    def value(self, field: str, like: Tensor | None = None) -> Tensor:
        """A declared parameter, in the dtype and on the device of `like`, shaped to broadcast over rows."""
        kind, low, high = self._transforms[field]
        tensor: Tensor = getattr(self, field + "_")
        if kind == "log":
            tensor = low + torch.exp(tensor)
        elif kind == "logit":
            tensor = low + (high - low) * torch.sigmoid(tensor)
        if like is None:
            return tensor
        tensor = tensor.to(like)
        if tensor.ndim == 1:
            if like.ndim < 3 or like.shape[-3] != tensor.shape[0]:
                raise InputError(field, shape_of(tensor), f"one value for each head of scores {shape_of(like)}")
            tensor = tensor[:, None, None]
        return tensor

    def __getattr__(self, name: str) -> Any:
        # Declared parameters read as attributes: mechanism.beta is the value, mechanism.beta_ what is stored.
        transforms = self.__dict__.get("_transforms")
        if transforms and name in transforms:
            return self.value(name)
        return super().__getattr__(name)

    # ---- checks ----------------------------------------------------------------------------------

    def _views(self, scores: Tensor, scores2: Tensor | None = None) -> tuple[Tensor, ...]:
        check_tensor("scores", scores, 1)
        if self.views == 1:
            if scores2 is not None:
                raise InputError("scores2", shape_of(scores2), "None: this mechanism has one view")
            return (scores,)
        if scores2 is None:
            raise InputError("scores2", "None", "the scores of the second view")
        check_tensor("scores2", scores2, 1)
        same_kind("scores2", scores2, scores)
        if scores2.shape != scores.shape:
            raise InputError("scores2", shape_of(scores2), f"the {shape_of(scores)} of scores")
        return (scores, scores2)

    def _check_qkv(self, q: Tensor, k: Tensor, v: Tensor, q2: Tensor | None, k2: Tensor | None) -> None:
        for field, tensor in (("q", q), ("k", k), ("v", v)):
            check_tensor(field, tensor, 4, exact=True)
            same_kind(field, tensor, q)
        if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
            raise InputError("k", shape_of(k), f"(B, K, S, D) with the B and D of q, {shape_of(q)}")
        if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
            raise InputError("k", shape_of(k), f"a number of heads that divides the {q.shape[1]} of q")
        if v.shape[:3] != k.shape[:3]:
            raise InputError("v", shape_of(v), f"(B, K, S, V) with the B, K and S of k, {shape_of(k)}")
        for field, second, first in (("q2", q2, q), ("k2", k2, k)):
            if second is None:
                if self.views == 2:
                    raise InputError(field, "None", f"a tensor of {shape_of(first)}: the mechanism has two views")
                continue
            if self.views == 1:
                raise InputError(field, shape_of(second), "None: the mechanism has one view")
            check_tensor(field, second, 4, exact=True)
            same_kind(field, second, q)
            if second.shape != first.shape:
                raise InputError(field, shape_of(second), f"the {shape_of(first)} of the first view")

    def prepare(
        self,
        *views: Tensor,
        causal: bool = False,
        key_mask: Tensor | None = None,
        mask: Tensor | None = None,
        n: Tensor | int | None = None,
        head_dim: int | None = None,
        x: Tensor | None = None,
        q: Tensor | None = None,
    ) -> tuple[Scope, tuple[Tensor, ...]]:
        """Checked scores (..., T, S), one tensor a view, and their scope: what :meth:`row_weights` takes.

        The way to what lies between scores and weights, such as the thresholds of a row or the two maps of TDA
        before they are subtracted: ``tda.both_views(views, scope)``. Arguments and errors as in :meth:`weights`;
        masked scores come back as 0, with ``scope.visible`` to tell them from a score of 0.
        """
        views = self._views(views[0], *views[1:2]) if len(views) in (1, 2) else views
        if len(views) != self.views or views[0].ndim < 2:
            raise InputError("views", f"{len(views)} tensors", f"{self.views}, each of shape (..., T, S)")
        scores = views[0]
        t, s = scores.shape[-2:]
        if s == 0:
            raise InputError("scores", shape_of(scores), "at least one key a row")
        if self.causal_only and not causal:
            raise InputError("causal", "False", "True: the mechanism is defined by the decoding order")
        visible = torch.ones_like(scores, dtype=torch.bool)
        if causal:
            if t > s:
                raise InputError("scores", shape_of(scores), "at least as many keys as queries when causal")
            order = torch.ones(t, s, dtype=torch.bool, device=scores.device)
            visible = visible & torch.tril(order, diagonal=s - t)
        if key_mask is not None:
            batch = scores.shape[0] if scores.ndim == 4 else 1
            key_mask = check_key_mask(key_mask, batch, s, scores.device)
            visible = visible & (key_mask if key_mask.shape[0] == 1 else key_mask[:, None, None, :])
        if mask is not None:
            visible = visible & check_mask(mask, scores)
        for field, view in zip(("scores", "scores2"), views, strict=False):
            if trusted(view):
                break
            seen = view.masked_fill(~visible, 0.0)
            if bool(torch.isnan(seen).any()):
                raise InputError(field, f"NaN in {shape_of(view)}", "numbers, or -inf for masked")
            if bool((seen == math.inf).any()):
                raise InputError(field, f"+inf in {shape_of(view)}", "numbers, or -inf for masked")
        for view in views:
            visible = visible & (view != -math.inf)
        # Masked entries become a finite 0, so no branch of a where can send NaN back.
        views = tuple(view.masked_fill(~visible, 0.0) for view in views)
        if n is None:
            # At least 1, so that logarithms of it are finite on rows that see nothing.
            count = visible.sum(-1, keepdim=True).clamp(min=1).to(scores.dtype)
        else:
            count = torch.as_tensor(n, dtype=scores.dtype, device=scores.device)
            try:
                count = count.expand(*scores.shape[:-1], 1)
            except RuntimeError:
                raise InputError("n", shape_of(count), f"broadcastable to {(*scores.shape[:-1], 1)}") from None
            if not trusted(count) and bool((count < 1).any()):
                raise InputError("n", repr(count.min().item()), "at least 1")
        if head_dim is not None and head_dim < 1:
            raise InputError("head_dim", repr(head_dim), "at least 1")
        for field, tensor in (("x", x), ("q", q)):
            if tensor is not None:
                same_kind(field, tensor, scores)
        return Scope(visible, count, causal, head_dim, x, q), views
