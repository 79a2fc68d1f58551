"""The claims of ETA, elastic threshold attention (arXiv 2609.20888), each with the controls that must fail.

The work is in ``eta_bounds`` (screening of key blocks) and ``eta_rows`` (pruning, the floor, the worked example).
"""

from __future__ import annotations

from theory_lab.errors import InputError
from theory_lab.studies import eta_bounds, eta_rows
from theory_lab.studies.base import Piece, Request, Study

#: Head dimension, keys a block and default cases of each search for a dropped key.
_BLOCKS = (
    ("norm", 16, 3, 25_000),
    ("norm", 64, 3, 8_000),
    ("channel", 16, 3, 25_000),
    ("center", 16, 3, 25_000),
    ("cap", 16, 3, 25_000),
    ("reference", 64, 3, 8_000),
)


def _plan_block_bound(request: Request) -> list[Piece]:
    pieces: list[Piece] = []
    if request.head_dim and max(request.head_dim) > 256:
        raise InputError("head_dim", max(request.head_dim), "eta-block-bound searches head dimensions of at most 256")
    asked = request.head_dim and {max(4, d) for d in request.head_dim}  # a key's recipe takes three channels
    for name, dim, keys, cases in _BLOCKS:
        for d in sorted(asked) if asked else (dim,):
            trials = request.trials or cases
            cost = 1.5e-6 * trials * d
            if any(p["bound"] == name and p["dim"] == d for p in pieces):
                continue
            pieces.append(Piece.of("eta-block-bound", cost, bound=name, dim=d, keys=keys, trials=trials))
    return pieces


def _plan_hard_soft(request: Request) -> list[Piece]:
    return [
        Piece.of("eta-hard-soft", 4e-5 * trials, reading=reading, trials=trials)
        for reading, trials in (
            ("logit", request.trials or 20_000),
            ("weight", request.trials or 20_000),
            ("exact", max(8, request.trials // 10) if request.trials else 4_000),
        )
    ]


def _plan_floor(request: Request) -> list[Piece]:
    trials = request.trials or 100_000
    return [Piece.of("eta-floor", 7e-6 * trials, trials=trials)]


def _plan_example(request: Request) -> list[Piece]:
    return [Piece.of("eta-example", 0.1)]


STUDIES: tuple[Study, ...] = (
    Study(
        id="eta-block-bound",
        kind="invariance",
        paper="eta",
        source="arXiv 2609.20888, screening of key blocks",
        statement=(
            "max over a block of s_ij <= |q_i| max |k_j|, and the bounds by channel, center and cap: no key with "
            "s >= tau is dropped, with bfloat16 inputs and float32 accumulation in any order."
        ),
        bound_text="score - bound <= 0 in the arithmetic used",
        assumptions=(
            "the derived rounding margin is added",
            "magnitudes from 2^-30 to 2^30",
            "cap: keys of unit length",
        ),
        exact_text="none",
        parameters=("head_dim",),
        plan=_plan_block_bound,
        work=eta_bounds.work,
        needs_torch=True,
    ),
    Study(
        id="eta-hard-soft",
        kind="invariance",
        paper="eta",
        source="arXiv 2609.20888, hard pruning at inference",
        statement=(
            "Pruning the soft weights changes a row by exactly the suppressed mass (total variation after "
            "renormalizing), and the output by at most 2 x mass x max |v|. The softmax of the survivors' scores does "
            "not stay within it."
        ),
        bound_text="distance - suppressed mass <= its rounding budget",
        assumptions=("at least one key survives", "the soft weights themselves are pruned"),
        exact_text="the identity in rational arithmetic",
        parameters=(),
        plan=_plan_hard_soft,
        work=eta_rows.work_hard_soft,
        needs_torch=True,
    ),
    Study(
        id="eta-floor",
        kind="invariance",
        paper="eta",
        source="arXiv 2609.20888, uniform attention floor",
        statement=(
            "With suppressed logits, a suppressed key has weight exp(0) / Z within a factor exp(|m s|), and never less "
            "than exp(-1 / (alpha e)) / Z."
        ),
        bound_text="|log(a Z)| - |m s| <= its rounding budget",
        assumptions=("the mask multiplies the logits (reading logit)", "0 < tau < 1"),
        exact_text="none",
        parameters=(),
        plan=_plan_floor,
        work=eta_rows.work_floor,
        needs_torch=True,
    ),
    Study(
        id="eta-example",
        kind="invariance",
        paper="eta",
        source="arXiv 2609.20888, worked example",
        statement="The worked example's threshold, masks, weights, survivors and blocks.",
        bound_text="distance from the printed figures < 1 unit of their last decimal (1/2 for our own figures)",
        assumptions=("every step starts from the printed figures of the one before",),
        exact_text="float64",
        parameters=(),
        plan=_plan_example,
        work=eta_rows.work_example,
        needs_torch=True,
    ),
)
