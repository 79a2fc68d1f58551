"""The ``torch.library`` operators behind elastic decoding: opaque to ``torch.compile``, shapes without data.

Eager calls do without them (:func:`wanted`): an operator of so many tensors costs the host more than it gives. There
is no autograd: decoding is inference.
"""

# mypy: disable-error-code="no-untyped-def"
# The fake functions get their types from the operators they stand for.

import torch
from torch import Tensor

from ..attention.operator import _register
from . import chunked, reference
from .bounds import BlockBounds, refresh
from .cache import Paging
from .problem import DecodeStatistics, Problem, View


def wanted(x: Tensor) -> bool:
    """Whether a call has to be an operator: it is compiled, or has shapes and no data."""
    return torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter) or x.device.type == "meta"


def run(problem: Problem, counted: bool, implementation: str) -> tuple[Tensor, DecodeStatistics | None]:
    """Output (B, H, T, E), and with ``counted`` what was met, by one of the implementations."""
    if implementation == "triton":
        from . import launch

        return launch.forward(problem, counted)
    return (reference if implementation == "reference" else chunked).forward(problem)


def _forward(
    q: Tensor,
    k: Tensor,
    bounds: list[Tensor],
    q2: Tensor | None,
    k2: Tensor | None,
    bounds2: list[Tensor],
    v: Tensor,
    tau: Tensor,
    lam: Tensor | None,
    lengths: Tensor | None,
    table: Tensor | None,
    kind: str,
    block: int,
    scale: float,
    softmax: bool,
    power: float,
    normalize: bool,
    rms_eps: float | None,
    counted: bool,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, survivors, blocks read, maximum and log-sum-exp of a :class:`.problem.Problem`; empty if not counted.

    ``bounds`` are norm, vectors and scalars of :class:`.bounds.BlockBounds`, or nothing.
    """
    batch, page = (k.shape[0] if table is None else table.shape[0]), k.shape[2]
    paging = Paging(table, page, batch, page if table is None else page * table.shape[1], k.device)
    views = [View(q, k, BlockBounds(kind, block, *bounds) if bounds else None)]
    if q2 is not None and k2 is not None:
        views.append(View(q2, k2, BlockBounds(kind, block, *bounds2) if bounds2 else None))
    problem = Problem(views, v, tau, lam, lengths, paging, block, scale, softmax, power, normalize, rms_eps)
    out, found = run(problem, counted, implementation)
    none = torch.empty(0, device=q.device)
    if not counted or found is None:
        return out, none.int(), none.int(), none, none.clone()
    maximum, logsumexp = found.maximum, found.logsumexp
    if maximum is None or logsumexp is None:
        maximum, logsumexp = none, none.clone()
    return out, found.survivors, found.blocks_read, maximum, logsumexp


def _fake_forward(
    q, k, bounds, q2, k2, bounds2, v, tau, lam, lengths, table, kind, block, scale, softmax, power, normalize, rms_eps,
    counted, implementation,
):  # fmt: skip
    wide = torch.float64 if q.dtype == torch.float64 and implementation != "triton" else torch.float32
    rows = q.shape[:3] if counted else (0,)
    sums = q.shape[:3] if counted and softmax else (0,)
    return (
        v.new_empty((*q.shape[:3], v.shape[-1])),
        q.new_empty(rows, dtype=torch.int32),
        q.new_empty((q.shape[0], k.shape[1]) if counted else (0,), dtype=torch.int32),
        q.new_empty(sums, dtype=wide if counted and softmax else torch.float32),
        q.new_empty(sums, dtype=wide if counted and softmax else torch.float32),
    )


def call(problem: Problem, counted: bool, implementation: str) -> tuple[Tensor, DecodeStatistics | None]:
    """:func:`run` as an operator."""
    one, two = problem.views[0], problem.views[1] if len(problem.views) == 2 else None
    out, survivors, blocks, maximum, logsumexp = elastic_decode_forward(
        one.q, one.k, _tensors(one.bounds), None if two is None else two.q, None if two is None else two.k,
        _tensors(None if two is None else two.bounds), problem.v, problem.tau, problem.lam, problem.lengths,
        problem.paging.table, "" if one.bounds is None else one.bounds.kind, problem.block, problem.scale,
        problem.softmax, problem.power, problem.normalize, problem.rms_eps, counted, implementation,
    )  # fmt: skip
    if not counted:
        return out, None
    return out, DecodeStatistics(survivors, blocks, *((maximum, logsumexp) if problem.softmax else (None, None)))


def _tensors(bounds: BlockBounds | None) -> list[Tensor]:
    return [] if bounds is None else [bounds.norm, bounds.vectors, bounds.scalars]


def _update(
    norm: Tensor,
    vectors: Tensor,
    scalars: Tensor,
    k: Tensor,
    table: Tensor | None,
    start: Tensor,
    length: Tensor,
    kind: str,
    block: int,
    touched: int,
    implementation: str,
) -> None:
    """Compute ``touched`` blocks of the bounds anew, in place."""
    batch, page = (k.shape[0] if table is None else table.shape[0]), k.shape[2]
    paging = Paging(table, page, batch, page if table is None else page * table.shape[1], k.device)
    refresh(BlockBounds(kind, block, norm, vectors, scalars), k, paging, start, length, touched, implementation)


def _fake_update(norm, vectors, scalars, k, table, start, length, kind, block, touched, implementation) -> None:
    return None


elastic_decode_forward = _register("elastic_decode", _forward, _fake_forward)
update_bounds = _register("update_block_bounds", _update, _fake_update, mutates=("norm", "vectors", "scalars"))
